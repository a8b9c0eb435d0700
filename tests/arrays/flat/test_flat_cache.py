"""The flat cache: what the original's tests show, and what the original leaves unchecked."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvcache.arrays import FlatKVCache
from pykvcache.errors import (
    CacheDTypeError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    KvCacheError,
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


# The original's own behaviour -------------------------------------------------------------


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


def test_layers_and_values_are_kept_apart() -> None:
    cache = filled()
    for layer in range(2):
        expected = np.concatenate([entry(layer, token, 6) for token in range(3)])
        np.testing.assert_array_equal(cache.k(layer), expected)
        np.testing.assert_array_equal(cache.v(layer), -expected)


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


def test_a_cache_grows_past_its_capacity() -> None:
    cache = FlatKVCache.with_capacity(2, 1, 2, 2)
    for token in range(700):
        for layer in range(2):
            cache.append(layer, entry(layer, token, 2), -entry(layer, token, 2))
        cache.advance()
    assert len(cache) == 700
    for layer in range(2):
        expected = np.concatenate([entry(layer, token, 2) for token in range(700)])
        np.testing.assert_array_equal(cache.k(layer), expected)
        np.testing.assert_array_equal(cache.v(layer), -expected)


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


def test_a_token_is_readable_before_advance() -> None:
    # Attention of the current token reads it from the cache, as in the original.
    cache = filled(tokens=1)
    cache.append(0, entry(0, 1, 6), -entry(0, 1, 6))
    assert len(cache) == 1
    assert cache.k(0).shape == (12,)
    assert cache.k(1).shape == (6,)
    np.testing.assert_array_equal(cache.v(0)[6:], -entry(0, 1, 6))


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


# What the original leaves unchecked ---------------------------------------------------------


def test_advance_needs_every_layer() -> None:
    cache = FlatKVCache(2, 1, 2)
    with pytest.raises(CacheOrderError, match="layer 0"):
        cache.advance()
    cache.append(0, entry(0, 0, 2), entry(0, 0, 2))
    before = contents(cache)
    with pytest.raises(CacheOrderError, match="layer 1"):
        cache.advance()
    assert contents(cache) == before
    cache.append(1, entry(1, 0, 2), entry(1, 0, 2))
    cache.advance()
    assert len(cache) == 1


def test_a_second_append_before_advance_is_refused() -> None:
    cache = filled(tokens=1)
    cache.append(1, entry(1, 1, 6), entry(1, 1, 6))
    before = contents(cache)
    with pytest.raises(CacheOrderError, match="advance"):
        cache.append(1, entry(1, 2, 6), entry(1, 2, 6))
    assert contents(cache) == before


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


def test_every_error_is_a_cache_error() -> None:
    for error in (CacheDTypeError, CacheLayerError, CacheOrderError, CacheValueError):
        assert issubclass(error, KvCacheError)
    assert issubclass(CacheLayerError, IndexError)
    assert issubclass(CacheValueError, ValueError)
    assert issubclass(CacheOrderError, RuntimeError)
    assert issubclass(CacheDTypeError, TypeError)


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


# A prompt at once, a step back, other dtypes ----------------------------------------------


def test_extend_equals_token_by_token() -> None:
    cache = FlatKVCache(2, 2, 3)
    for layer in range(2):
        k = np.concatenate([entry(layer, token, 6) for token in range(3)])
        cache.extend(layer, k, -k)
    assert len(cache) == 0
    cache.advance()
    assert contents(cache) == contents(filled())


@pytest.mark.parametrize(("k_size", "v_size"), [(0, 0), (7, 7), (12, 6), (6, 12)])
def test_extend_needs_whole_tokens(k_size: int, v_size: int) -> None:
    cache = filled()
    before = contents(cache)
    with pytest.raises(CacheValueError):
        cache.extend(0, np.zeros(k_size, np.float32), np.zeros(v_size, np.float32))
    with pytest.raises(CacheValueError):
        cache.extend(0, np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32))
    assert contents(cache) == before


def test_layers_must_agree_on_the_number_of_tokens() -> None:
    cache = filled()
    cache.extend(0, np.zeros(12, np.float32), np.zeros(12, np.float32))
    before = contents(cache)
    with pytest.raises(CacheOrderError, match="2"):
        cache.append(1, np.zeros(6, np.float32), np.zeros(6, np.float32))
    assert contents(cache) == before
    cache.extend(1, np.ones(12, np.float32), np.ones(12, np.float32))
    cache.advance()
    assert len(cache) == 5


def test_truncate_steps_back() -> None:
    cache = filled(tokens=3)
    cache.truncate(1)
    assert len(cache) == 1
    np.testing.assert_array_equal(cache.k(1), entry(1, 0, 6))
    for layer in range(2):
        cache.append(layer, entry(layer, 9, 6), -entry(layer, 9, 6))
    cache.advance()
    np.testing.assert_array_equal(cache.k(1)[6:], entry(1, 9, 6))


def test_truncate_takes_back_an_unfinished_token() -> None:
    cache = filled()
    before = contents(cache)
    cache.append(0, entry(0, 5, 6), entry(0, 5, 6))
    cache.truncate(len(cache))
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
