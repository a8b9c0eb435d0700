"""The flat cache against plain lists, over random calls, good and bad."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pykvcache.arrays import FlatKVCache
from pykvcache.errors import CacheOrderError, CacheValueError


class Lists:
    """The same cache, as lists of floats."""

    def __init__(self, layers: int) -> None:
        self.k: list[list[float]] = [[] for _ in range(layers)]
        self.v: list[list[float]] = [[] for _ in range(layers)]


class FlatMachine(RuleBasedStateMachine):
    """Random appends, advances and cuts; the refused ones must change nothing."""

    @initialize(
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        dim=st.integers(1, 4),
        capacity=st.integers(0, 4),
    )
    def start(self, layers: int, heads: int, dim: int, capacity: int) -> None:
        self.cache = FlatKVCache.with_capacity(layers, heads, dim, capacity)
        self.lists = Lists(layers)
        self.size = heads * dim
        self.length = 0
        self.pending = [0] * layers
        self.clock = 0

    @rule(layer=st.integers(0, 2), count=st.integers(1, 5), single=st.booleans())
    def append(self, layer: int, count: int, single: bool) -> None:
        layer %= self.cache.num_layers
        count = 1 if single else count
        data = np.arange(self.clock, self.clock + count * self.size, dtype=np.float32)
        self.clock += data.size
        call = self.cache.append if single else self.cache.extend
        if self.pending[layer] or max(self.pending) not in (0, count):
            with pytest.raises(CacheOrderError):
                call(layer, data, -data)
            return
        call(layer, data, -data)
        self.lists.k[layer] += data.tolist()
        self.lists.v[layer] += (-data).tolist()
        self.pending[layer] = count

    @rule(layer=st.integers(0, 2), size=st.integers(0, 30))
    def append_wrong(self, layer: int, size: int) -> None:
        if size != self.size:
            data = np.zeros(size, np.float32)
            with pytest.raises(CacheValueError):
                self.cache.append(layer % self.cache.num_layers, data, data)

    @rule()
    def advance(self) -> None:
        if 0 in self.pending:
            with pytest.raises(CacheOrderError):
                self.cache.advance()
            return
        self.cache.advance()
        self.length += self.pending[0]
        self.pending = [0] * len(self.pending)

    @rule(length=st.integers(-1, 12))
    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            with pytest.raises(CacheValueError):
                self.cache.truncate(length)
            return
        self.cache.truncate(length)
        self.cut(length)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.cut(0)

    @rule()
    def go_on_with_a_copy(self) -> None:
        self.cache = self.cache.copy()

    def cut(self, length: int) -> None:
        self.length = length
        self.pending = [0] * len(self.pending)
        for rows in (*self.lists.k, *self.lists.v):
            del rows[length * self.size :]

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.length
        assert self.cache.is_empty() == (self.length == 0)
        assert self.cache.capacity >= self.length + max(self.pending)
        for layer in range(self.cache.num_layers):
            assert self.cache.k(layer).tolist() == self.lists.k[layer]
            assert self.cache.v(layer).tolist() == self.lists.v[layer]


TestFlatMachine = FlatMachine.TestCase
TestFlatMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
