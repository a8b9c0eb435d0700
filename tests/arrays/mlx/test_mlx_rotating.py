"""Rings by example: memory order, masks and states, of one row and of several."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_support import filled, kv, real, ring, stored

from pykvcache.arrays import BatchRotatingKVCache, RotatingKVCache, from_state
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, NotSupported

P = 0  # padding


@pytest.mark.parametrize(
    ("keep", "tokens", "lies"),
    [
        (0, 4, [1, 2, 3, 4]),
        (0, 5, [5, 2, 3, 4]),
        (0, 9, [9, 6, 7, 8]),
        (2, 5, [1, 2, 5, 4]),
        (2, 7, [1, 2, 7, 6]),
        (7, 6, [1, 2, 3, 6]),  # the newest token always has a place
    ],
)
def test_single_tokens_are_written_in_a_ring_after_the_kept_ones(
    keep: int, tokens: int, lies: list[int]
) -> None:
    cache = ring(4, range(1, tokens + 1), keep)
    assert stored(cache) == lies
    assert (cache.keep, cache.rotated) == (keep, tokens > 4 and lies[-1] != tokens)


def test_masks_of_a_ring_are_none_causal_or_an_array() -> None:
    cache: Any = RotatingKVCache(4)
    assert cache.make_mask(4) == "causal"
    assert cache.make_mask(5).shape == (5, 5)
    assert cache.make_mask(2, return_array=True).shape == (2, 2)
    assert cache.make_mask(1) is None
    filled(cache, [[1]], [[2]], [[3]])
    assert cache.make_mask(1, window_size=4, return_array=True) is None
    assert cache.make_mask(1, window_size=2).astype(int).tolist() == [0, 0, 1, 1]
    assert ring(4, [1]).make_mask(1, window_size=2) is None


def test_a_ring_without_room_refuses() -> None:
    for cache in (RotatingKVCache(0, keep=4), BatchRotatingKVCache(0, [0])):
        with pytest.raises(CacheValueError, match="max_size 0"):
            cache.update(*kv([1]))
        assert cache.is_empty()


def test_a_state_by_itself_is_in_order_of_age() -> None:
    for cache, counts in ((ring(2, range(4)), ()), (BatchRotatingKVCache(2, [0]), ([2], [0]))):
        filled(cache, [[6]], [[7]], [[8]])
        assert cache.rotated
        cache.state = (*kv([1, 2]), *counts)
        assert (stored(cache), cache.offset, cache.rotated) == ([1, 2], 2, False)


# BatchRotatingKVCache ------------------------------------------------------------------------


def test_padding_waits_for_finalize() -> None:
    cache = BatchRotatingKVCache(4, [0, 0, 0])
    with pytest.raises(CacheValueError, match="lengths"):
        cache.prepare(right_padding=[1, 0, 0])
    cache.prepare(lengths=[3, 1, 2], right_padding=[0, 2, 1])
    filled(cache, [[1, 2, 3], [11, P, P], [21, 22, P]])
    for call in (
        lambda: cache.update(*kv([3], [12], [22])),
        lambda: cache.state,
        lambda: cache.extract(0),
        lambda: cache.extend(BatchRotatingKVCache(4, [0])),
        lambda: BatchRotatingKVCache(4, [0]).extend(cache),
        lambda: cache.prepare(lengths=[1, 1, 1], right_padding=[0, 1, 0]),
    ):
        with pytest.raises(CacheOrderError, match=r"finalize\(\) should be called before"):
            call()
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    cache.filter([2, 1])  # keeps the announced lengths, which mlx-lm forgets
    cache.finalize()
    assert [real(cache, 0), real(cache, 1)] == [[21, 22], [11]]
    assert (cache.rope_offset.tolist(), cache.batch_size) == ([2, 1], 2)
    for index in ([2], [-1]):
        with pytest.raises(CacheValueError):
            cache.filter(index)
    with pytest.raises(CacheValueError):
        cache.extract(2)


def test_merge_and_extend_need_one_max_size() -> None:
    merged = RotatingKVCache.merge(iter([ring(4, [1, 2, 3, 4, 5, 6]), ring(4), ring(4, [7])]))
    assert type(merged) is BatchRotatingKVCache
    assert [real(merged, row) for row in range(3)] == [[3, 4, 5, 6], [], [7]]
    assert (merged.rope_offset.tolist(), merged.left_padding.tolist()) == ([6, 0, 1], [0, 4, 3])
    assert not merged.is_trimmable()
    filled(merged, [[8], [9], [10]])
    assert [real(merged, row) for row in range(3)] == [[4, 5, 6, 8], [9], [7, 10]]
    assert BatchRotatingKVCache.merge([ring(4), ring(4)]).is_empty()
    two: Any = filled(RotatingKVCache(4), [[1], [2]])
    for caches, error in (
        ([ring(4), ring(5)], CacheValueError),
        ([], CacheValueError),
        ([two], CacheValueError),
        ([ring(4), None], CacheDTypeError),
        ([ring(4, keep=1)], NotSupported),
    ):
        with pytest.raises(error):
            BatchRotatingKVCache.merge(caches)
    for other, error in (
        (BatchRotatingKVCache(5, [0]), CacheValueError),
        (RotatingKVCache(4), CacheDTypeError),
    ):
        with pytest.raises(error):
            merged.extend(other)


def test_columns_that_do_not_count_are_left_out() -> None:
    # Columns after `index` do not count; mlx-lm counts padding that left the ring below zero.
    shorter: Any = from_state(
        "BatchRotatingKVCache", (*kv([1, 2, 3]), [5], [0]), ("2", "5", "2", "False")
    )
    assert (real(shorter, 0), shorter.offset) == ([1, 2], 5)
    gone: Any = from_state(
        "BatchRotatingKVCache", (*kv([5, 6, 4]), [6], [-3]), ("3", "6", "2", "True")
    )
    assert (real(gone, 0), gone.left_padding.tolist()) == ([4, 5, 6], [0])
