"""Plain, chunked and batch caches by example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_support import HEADS, K_DIM, V_DIM, filled, kv, real, snapshot, stored

from pykvcache.arrays import (
    BatchKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    from_state,
)
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, KvCacheError

P = 0  # padding
TOKEN = HEADS * (K_DIM + V_DIM) * 4


def single(*tokens: int) -> Any:
    return filled(KVCache(), [tokens]) if tokens else KVCache()


def batch(left_padding: Any, *rows: Any) -> Any:
    cache = BatchKVCache(left_padding)
    return filled(cache, rows) if rows else cache


def test_masks_are_none_causal_or_an_array() -> None:
    cache = single(1, 2, 3)
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None
    assert cache.make_mask(2) == "causal"
    expected = [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert cache.make_mask(2, return_array=True).astype(int).tolist() == expected
    windowed = cache.make_mask(2, window_size=2).astype(int).tolist()
    assert windowed == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert cache.make_mask(1, window_size=2).astype(int).tolist() == [[0, 0, 1, 1]]
    for n in (True, 1.0, None):
        with pytest.raises(TypeError):
            cache.make_mask(n)


def test_a_concatenating_cache_has_no_spare_room() -> None:
    cache = filled(ConcatenateKVCache(), [[1, 2, 3]], [[4]])
    assert cache.nbytes == 4 * TOKEN


@pytest.mark.parametrize("bits", [4, 8])
def test_to_quantized_holds_the_same_tokens(bits: int) -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 1, 2, 5, 64)).astype(np.float32)
    cache = KVCache()
    cache.update(keys, values)
    assert (cache.to_quantized().group_size, cache.to_quantized().bits) == (64, 4)
    quantized = cache.to_quantized(group_size=32, bits=bits)
    assert isinstance(quantized, QuantizedKVCache)
    assert quantized.bits == bits
    one = rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    got, _ = quantized.update(one, one)
    assert np.abs(got[:, :, :5] - keys).max() < 6 / (2**bits - 1) / 2
    assert KVCache().to_quantized().is_empty()


def test_zero_tokens_are_an_empty_state() -> None:
    """mlx-lm saves them after a full trim."""
    nothing = kv([])
    assert from_state("KVCache", nothing, ()).state == ()


# ChunkedKVCache ------------------------------------------------------------------------------


def test_trimming_the_front_keeps_memory_bounded() -> None:
    cache = ChunkedKVCache(300)
    for n in range(2000):
        cache.maybe_trim_front()
        filled(cache, [[n]])
    assert cache.nbytes <= 1024 * TOKEN
    assert (cache.offset, cache.start_position) == (2000, 2000 - 301)
    assert stored(cache) == [*range(1699, 2000)]


# BatchKVCache --------------------------------------------------------------------------------


def test_finalize_moves_right_padding_to_the_left() -> None:
    cache = batch([0, 0], [1, 2], [3, 4])
    cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    filled(cache, [[5], [7]])
    with pytest.raises(CacheOrderError, match="only 1 columns have been stored since"):
        cache.finalize()
    filled(cache, [[6], [P]])
    for call in (
        lambda: cache.extend(batch([0])),
        lambda: batch([0]).extend(cache),
        lambda: cache.extract(0),
        lambda: cache.state,
        lambda: cache.prepare(right_padding=[1, 0]),
    ):
        with pytest.raises(CacheOrderError, match="finalize"):
            call()
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    filled(cache, [[8], [P]])
    cache.finalize()
    assert (cache.left_padding.tolist(), cache.rope_offset.tolist()) == ([0, 2], [5, 3])
    assert [real(cache, 0), real(cache, 1)] == [[1, 2, 5, 6, 8], [3, 4, 7]]


def test_filter_drops_the_common_padding() -> None:
    cache = batch([1, 3, 2], [P, 1, 2, 3], [P, P, P, 4], [P, P, 5, 6])
    cache.filter([2, 1])
    assert (cache.offset, cache.left_padding.tolist()) == (2, [0, 1])
    empty = batch([2, 3])
    empty.filter([1])  # mlx-lm counts below zero
    assert (empty.left_padding.tolist(), empty.offset) == ([3], 0)
    for bad, error in (([2], CacheValueError), ([-1], CacheValueError), ([0.5], CacheDTypeError)):
        with pytest.raises(error):
            cache.filter(bad)


def test_extend_leaves_the_other_and_takes_padding_of_what_is_empty() -> None:
    other = batch([0], [4, 5, 6, 7])
    before = snapshot(other)
    batch([1, 0], [P, 1], [2, 3]).extend(other)
    assert snapshot(other) == before
    other.extend(other)
    assert [real(other, row) for row in (0, 1)] == [[4, 5, 6, 7]] * 2
    empty = batch([0, 1])
    empty.extend(batch([2]))
    empty.extend(batch([0], [5, 6]))
    assert empty.rope_offset.tolist() == [0, -1, -2, 2]  # the padding that they wait for
    with pytest.raises(CacheDTypeError):
        other.extend(KVCache())


def test_merge_pads_on_the_left_and_refuses_other_layouts() -> None:
    merged = KVCache.merge(cache for cache in [single(1, 2, 3), single(), single(4)])
    assert type(merged) is BatchKVCache
    assert merged.left_padding.tolist() == [0, 3, 2]
    assert [real(merged, row) for row in range(3)] == [[1, 2, 3], [], [4]]
    assert BatchKVCache.merge([single(), single()]).left_padding.tolist() == [0, 0]
    wide, double = KVCache(), KVCache()
    wide.update(np.ones((1, 3, 1, 8), np.float32), np.ones((1, 3, 1, 4), np.float32))
    double.update(*(a.astype(np.float64) for a in kv([1])))
    two = filled(KVCache(), [[1], [2]])
    for bad, error in ((wide, ValueError), (double, TypeError), (two, ValueError), (7, TypeError)):
        with pytest.raises(error) as caught:
            BatchKVCache.merge([single(1), bad])
        assert isinstance(caught.value, KvCacheError)
    for index in (2, -1):
        with pytest.raises(CacheValueError):
            batch([1, 0], [P, 1], [2, 3]).extract(index)
