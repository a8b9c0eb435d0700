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
from numpy.typing import NDArray

from pykvcache.arrays import FlatKVCache
from pykvcache.errors import (
    CacheDTypeError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
)


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


def filled(layers: int = 2, heads: int = 2, dim: int = 3, tokens: int = 3) -> FlatKVCache:
    """Hold `tokens` tokens whose K is the running element number, and V its negative."""
    cache = FlatKVCache(layers, heads, dim)
    for token in range(tokens):
        for layer in range(layers):
            k = entry(layer, token, heads * dim)
            cache.append(layer, k, -k)
        cache.advance()
    return cache


def entry(layer: int, token: int, size: int) -> NDArray[np.float32]:
    return np.arange(size, dtype=np.float32) + 100 * token + 10_000 * layer + 1


def contents(cache: FlatKVCache) -> tuple[Any, ...]:
    layers = range(cache.num_layers)
    return (
        len(cache),
        cache.capacity,
        [cache.k(layer).tolist() for layer in layers],
        [cache.v(layer).tolist() for layer in layers],
    )


def test_one_token_in_two_layers() -> None:
    cache = FlatKVCache(2, 4, 16)
    assert cache.is_empty()
    assert len(cache) == 0
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (2, 4, 16)
    assert cache.entry_size == 64
    ones = np.ones(64, np.float32)
    cache.append(0, ones, ones)
    cache.append(1, ones, ones)
    cache.advance()
    assert len(cache) == 1
    assert not cache.is_empty()
    assert cache.k(0).shape == (64,)
    assert cache.v(1).shape == (64,)


def test_five_tokens_stand_in_order() -> None:
    cache = FlatKVCache(1, 2, 8)
    for token in range(5):
        data = np.full(16, token, np.float32)
        cache.append(0, data, data)
        cache.advance()
    assert len(cache) == 5
    assert cache.k(0).shape == (80,)
    assert cache.k(0).dtype == np.float32
    np.testing.assert_array_equal(cache.k(0), np.repeat(np.arange(5, dtype=np.float32), 16))


def test_clear_empties_and_keeps_the_memory() -> None:
    cache = filled()
    capacity = cache.capacity
    address = cache.k(0).ctypes.data
    cache.clear()
    assert len(cache) == 0
    assert cache.is_empty()
    assert cache.k(0).size == cache.v(1).size == 0
    assert cache.capacity == capacity >= 3
    cache.append(0, entry(0, 0, 6), entry(0, 0, 6))
    assert cache.k(0).ctypes.data == address


def test_with_capacity_allocates_once() -> None:
    cache = FlatKVCache.with_capacity(16, 8, 64, 40)
    assert cache.is_empty()
    assert cache.num_layers == 16
    assert cache.entry_size == 512
    assert cache.capacity == 40
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


def test_copies_are_independent() -> None:
    cache = filled()
    cache.append(0, entry(0, 3, 6), entry(0, 3, 6))
    before = contents(cache)
    for other in (cache.copy(), copy.copy(cache), copy.deepcopy(cache)):
        assert contents(other) == before
        other.append(1, entry(1, 3, 6), entry(1, 3, 6))
        other.advance()
        other.truncate(1)
        for layer in range(2):
            other.append(layer, np.zeros(6, np.float32), np.zeros(6, np.float32))
        assert contents(cache) == before


def test_repr_names_the_sizes() -> None:
    assert repr(FlatKVCache.with_capacity(2, 4, 16, 8)) == (
        "FlatKVCache(num_layers=2, num_kv_heads=4, head_dim=16, dtype=float32, len=0, capacity=8)"
    )


@pytest.mark.parametrize("shape", [(5,), (7,), (0,), (12,), (2, 3), (1, 6), ()])
@pytest.mark.parametrize("which", ["k", "v"])
def test_wrong_lengths_are_refused(which: str, shape: tuple[int, ...]) -> None:
    cache = filled()
    before = contents(cache)
    arrays = {"k": np.zeros(6, np.float32), "v": np.zeros(6, np.float32)}
    arrays[which] = np.zeros(shape, np.float32)
    with pytest.raises(CacheValueError, match=rf"{which} has shape"):
        cache.append(0, arrays["k"], arrays["v"])
    assert contents(cache) == before


@pytest.mark.parametrize("dtype", [np.bool_, np.complex64, object, "U3", "M8[s]"])
def test_dtypes_that_are_not_real_numbers_are_refused(dtype: Any) -> None:
    cache = filled()
    before = contents(cache)
    good, bad = np.zeros(6, np.float32), np.zeros(6, dtype)
    for k, v in ((bad, good), (good, bad)):
        with pytest.raises(CacheDTypeError, match="dtype"):
            cache.append(0, k, v)
    assert contents(cache) == before


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_other_numbers_are_converted(dtype: Any) -> None:
    cache = FlatKVCache(1, 1, 3)
    numbers = np.array([0.1, -2.5, 65504]).astype(dtype)
    cache.append(0, numbers, [0.1, -2.5, 3.0])  # type: ignore[arg-type]
    assert cache.k(0).dtype == cache.v(0).dtype == np.float32
    np.testing.assert_array_equal(cache.k(0), numbers.astype(np.float32))
    np.testing.assert_array_equal(cache.v(0), np.array([0.1, -2.5, 3], np.float32))


@pytest.mark.parametrize("layer", [-1, 2, 10**30])
def test_layers_that_do_not_exist_are_refused(layer: int) -> None:
    cache = filled()
    before = contents(cache)
    zeros = np.zeros(6, np.float32)
    for call in (
        lambda: cache.append(layer, zeros, zeros),
        lambda: cache.extend(layer, zeros, zeros),
        lambda: cache.k(layer),
        lambda: cache.v(layer),
    ):
        with pytest.raises(CacheLayerError, match=str(layer)):
            call()
    assert contents(cache) == before


@pytest.mark.parametrize("layer", [True, 0.0, "0", None])
def test_a_layer_is_an_integer(layer: Any) -> None:
    with pytest.raises(TypeError):
        filled().k(layer)


def test_numpy_integers_are_integers() -> None:
    cache = FlatKVCache(np.int64(2), np.uint8(2), np.int32(3))
    assert cache.k(np.int8(1)).size == 0


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(CacheValueError):
        FlatKVCache(*sizes)


@pytest.mark.parametrize("sizes", [(True, 1, 1), (1, 1.0, 1), (1, 1, None)])
def test_sizes_are_integers(sizes: tuple[Any, Any, Any]) -> None:
    with pytest.raises(TypeError):
        FlatKVCache(*sizes)


def test_capacity_is_not_negative() -> None:
    with pytest.raises(CacheValueError, match="-1"):
        FlatKVCache.with_capacity(1, 1, 1, -1)
    assert FlatKVCache.with_capacity(1, 1, 1, 0).capacity == 0


def test_sizes_beyond_every_address_are_refused() -> None:
    for sizes in ((1, 2**40, 2**40, 0), (2**70, 1, 1, 0), (1, 1, 1, 2**62), (1, 1, 1, 2**70)):
        with pytest.raises(CacheValueError):
            FlatKVCache.with_capacity(*sizes)


def test_a_prompt_that_no_array_can_hold_once_converted_is_refused() -> None:
    giant = np.broadcast_to(np.int8(1), (2**61,))
    with pytest.raises(CacheValueError, match="an array has at most"):
        FlatKVCache(1, 1, 1, dtype="f32").extend(0, giant, giant)


def test_the_cache_shares_no_memory_with_its_inputs() -> None:
    cache = FlatKVCache(1, 1, 3)
    data = np.ones(3, np.float32)
    cache.append(0, data, data)
    data[:] = 7
    np.testing.assert_array_equal(cache.k(0), np.ones(3))


def test_views_cannot_be_written() -> None:
    cache = filled()
    with pytest.raises(ValueError, match="read-only"):
        cache.k(0)[0] = 5


def test_views_are_not_copies() -> None:
    cache = filled()
    assert np.shares_memory(cache.k(0), cache.k(0))
    assert not np.shares_memory(cache.k(0), cache.v(0))


@pytest.mark.parametrize(("k_size", "v_size"), [(0, 0), (7, 7), (12, 6), (6, 12)])
def test_extend_needs_whole_tokens(k_size: int, v_size: int) -> None:
    cache = filled()
    before = contents(cache)
    with pytest.raises(CacheValueError):
        cache.extend(0, np.zeros(k_size, np.float32), np.zeros(v_size, np.float32))
    with pytest.raises(CacheValueError):
        cache.extend(0, np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32))
    assert contents(cache) == before


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_stays_inside(length: int) -> None:
    cache = filled(tokens=3)
    before = contents(cache)
    with pytest.raises(CacheValueError, match=str(length)):
        cache.truncate(length)
    assert contents(cache) == before


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(dtype: Any) -> None:
    cache = FlatKVCache.with_capacity(1, 1, 2, 1, dtype=dtype)
    data = np.array([0.1, 0.2], dtype)
    cache.append(0, data, data)
    assert cache.k(0).dtype == cache.dtype == dtype
    np.testing.assert_array_equal(cache.v(0), data)


@pytest.mark.parametrize("dtype", [np.int8, np.complex64, "U4"])
def test_dtypes_that_are_not_floats_are_refused(dtype: Any) -> None:
    with pytest.raises(CacheDTypeError):
        FlatKVCache(1, 1, 1, dtype=dtype)
