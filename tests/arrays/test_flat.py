"""The flat cache against plain lists, and by example."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pykvcache.arrays import FlatKVCache
from pykvcache.errors import CacheDTypeError, CacheLayerError, CacheOrderError, CacheValueError


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
        self.k: list[list[float]] = [[] for _ in range(layers)]
        self.v: list[list[float]] = [[] for _ in range(layers)]
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
        self.k[layer] += data.tolist()
        self.v[layer] += (-data).tolist()
        self.pending[layer] = count

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
        for rows in (*self.k, *self.v):
            del rows[length * self.size :]

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == self.length
        assert self.cache.is_empty() == (self.length == 0)
        assert self.cache.capacity >= self.length + max(self.pending)
        for layer in range(self.cache.num_layers):
            assert self.cache.k(layer).tolist() == self.k[layer]
            assert self.cache.v(layer).tolist() == self.v[layer]


TestFlatMachine = FlatMachine.TestCase
TestFlatMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)


def filled(tokens: int = 3) -> FlatKVCache:
    """Hold tokens of two layers of 6 numbers, with V the negative of K."""
    cache = FlatKVCache(2, 2, 3)
    for token in range(tokens):
        for layer in range(2):
            k = np.arange(6, dtype=np.float32) + 100 * token + 10_000 * layer + 1
            cache.append(layer, k, -k)
        cache.advance()
    return cache


def contents(cache: FlatKVCache) -> tuple[Any, ...]:
    layers = range(cache.num_layers)
    return (
        len(cache),
        cache.capacity,
        [cache.k(layer).tolist() for layer in layers],
        [cache.v(layer).tolist() for layer in layers],
    )


def test_clear_empties_and_keeps_the_memory() -> None:
    cache = filled()
    capacity, address = cache.capacity, cache.k(0).ctypes.data
    cache.clear()
    assert cache.is_empty()
    assert cache.k(0).size == cache.v(1).size == 0
    assert cache.capacity == capacity >= 3
    cache.append(0, np.ones(6), np.ones(6))
    assert cache.k(0).ctypes.data == address


def test_with_capacity_allocates_once() -> None:
    cache = FlatKVCache.with_capacity(16, 8, 64, 40)
    assert cache.is_empty()
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (16, 8, 64)
    assert (cache.entry_size, cache.capacity) == (512, 40)
    addresses = set()
    data = np.zeros(512, np.float32)
    for _ in range(40):
        for layer in range(16):
            cache.append(layer, data, data)
        cache.advance()
        addresses.add(cache.k(0).ctypes.data)
    assert len(addresses) == 1
    assert cache.capacity == 40


def test_growth_copies_a_constant_number_of_times_per_token() -> None:
    cache = FlatKVCache(1, 1, 1)
    one = np.ones(1, np.float32)
    capacities = []
    for _ in range(5000):
        cache.append(0, one, one)
        cache.advance()
        capacities.append(cache.capacity)
    reallocations = [b for a, b in itertools.pairwise(capacities) if a != b]
    assert len(reallocations) > 1
    assert sum(reallocations) <= 5 * 5000


def test_copies_inputs_and_views_are_apart() -> None:
    cache, data = filled(), np.ones(6, np.float32)
    cache.append(0, data, data)
    data[:] = 7
    assert cache.k(0)[-6:].tolist() == [1] * 6
    with pytest.raises(ValueError, match="read-only"):
        cache.k(0)[0] = 5
    views = cache.v(0)[:6], cache.k(0)[:6]
    expected = [array.tolist() for array in views]
    swapped = cache.copy()
    views = swapped.v(0)[:6], swapped.k(0)[:6]
    swapped.clear()
    swapped.append(0, *views)  # keys are written first
    assert [swapped.k(0).tolist(), swapped.v(0).tolist()] == expected
    before = contents(cache)
    for other in (cache.copy(), copy.copy(cache), copy.deepcopy(cache)):
        assert contents(other) == before
        other.append(1, data, data)
        other.advance()
        other.truncate(1)
        for layer in range(2):
            other.append(layer, data, data)
        assert contents(cache) == before


def test_repr_names_the_sizes() -> None:
    assert repr(FlatKVCache.with_capacity(2, 4, 16, 8)) == (
        "FlatKVCache(num_layers=2, num_kv_heads=4, head_dim=16, dtype=float32, len=0, capacity=8)"
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_numbers_are_converted_to_the_type_of_the_cache(dtype: Any) -> None:
    numbers = np.array([0.1, -2.5, 65504]).astype(dtype)
    for stored in (np.float16, np.float32, np.float64):
        cache = FlatKVCache(np.int64(1), np.uint8(1), 3, dtype=stored)
        cache.append(0, numbers, [0.1, -2.5, 3.0])  # type: ignore[arg-type]
        assert cache.k(np.int8(0)).dtype == cache.v(0).dtype == cache.dtype == stored
        np.testing.assert_array_equal(cache.k(0), numbers.astype(stored))
        np.testing.assert_array_equal(cache.v(0), np.array([0.1, -2.5, 3], stored))
    for wrong in (np.int8, np.complex64, "U4"):
        with pytest.raises(CacheDTypeError):
            FlatKVCache(1, 1, 1, dtype=wrong)


SIX = np.zeros(6, np.float32)
GIANT = np.broadcast_to(np.int8(1), (2**61,))
WRONG_SHAPES = ((5,), (7,), (0,), (12,), (2, 3), (1, 6), ())
WRONG_KINDS = (np.bool_, np.complex64, object, "U3", "M8[s]")
REFUSED: list[tuple[str, tuple[Any, ...], Any]] = [
    *[("append", (0, np.zeros(shape), SIX), CacheValueError) for shape in WRONG_SHAPES],
    *[("append", (0, SIX, np.zeros(shape)), CacheValueError) for shape in WRONG_SHAPES],
    *[("append", (0, SIX.astype(kind), SIX), CacheDTypeError) for kind in WRONG_KINDS],
    *[("append", (0, SIX, SIX.astype(kind)), CacheDTypeError) for kind in WRONG_KINDS],
    *[("extend", (0, np.zeros(n), np.zeros(m)), CacheValueError) for n, m in ((0, 0), (7, 7))],
    *[("extend", (0, np.zeros(n), np.zeros(m)), CacheValueError) for n, m in ((12, 6), (6, 12))],
    ("extend", (0, np.zeros((2, 6)), np.zeros((2, 6))), CacheValueError),
    ("extend", (0, GIANT, GIANT), CacheValueError),
    *[(name, (at, SIX, SIX), CacheLayerError) for name in ("append", "extend") for at in (-1, 2)],
    *[(name, (at,), CacheLayerError) for name in ("k", "v") for at in (-1, 2, 10**30)],
    *[("k", (at,), TypeError) for at in (True, 0.0, "0", None)],
    *[("truncate", (n,), CacheValueError) for n in (-1, 4)],
    *[("__init__", sizes, CacheValueError) for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, -1))],
    *[("__init__", sizes, TypeError) for sizes in ((True, 1, 1), (1, 1.0, 1), (1, 1, None))],
    *[("with_capacity", (1, 1, 1, n), CacheValueError) for n in (-1, 2**62, 2**70)],
    *[("with_capacity", (*n, 1, 0), CacheValueError) for n in ((1, 2**80), (2**70, 1))],
]


@pytest.mark.parametrize(("name", "arguments", "error"), REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    name: str, arguments: tuple[Any, ...], error: type
) -> None:
    cache = filled()
    before = contents(cache)
    call = FlatKVCache if name == "__init__" else getattr(cache, name)
    with pytest.raises(error):
        call(*arguments)
    assert contents(cache) == before
