"""What the issue settles about rings, batches, chunks, arrays and lists of caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_kit import (
    feed,
    filled,
    keys_of,
    rebuilt,
    same_state,
    values_of,
)

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    MambaCache,
    PromptCacheConfig,
    RotatingKVCache,
    make_prompt_cache,
)
from pykvcache.errors import KvCacheError, NotSupported

# Rings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(-1,), (True,), (2.0,), (4, -1)])
def test_rings_that_cannot_work_are_refused(arguments: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        RotatingKVCache(*arguments)


def test_a_ring_without_room_for_its_kept_tokens_still_takes_new_ones() -> None:
    # A window below ROTATING_DEFAULT_KEEP makes such rings.
    [cache] = make_prompt_cache(PromptCacheConfig(1, sliding_window=3))
    for token in range(1, 9):
        seen = feed(cache, [[token]])[0][0]
        assert token in seen
        assert len(seen) == min(token, 3)
    [nothing] = make_prompt_cache(PromptCacheConfig(1, sliding_window=-2))
    assert nothing.max_size == 0
    with pytest.raises(KvCacheError):
        feed(nothing, [[1]])


def test_a_ring_cannot_be_quantised() -> None:
    for cache in (RotatingKVCache(4), BatchRotatingKVCache(4, [0])):
        with pytest.raises(NotSupported):
            cache.to_quantized(group_size=32, bits=8)


def test_a_ring_meta_reads_as_mlx_lm_writes_it() -> None:
    cache = filled("RotatingKVCache", 8)
    keep, size, offset, _ = cache.meta_state
    assert (keep, size, offset) == ("2", "6", "8")


def test_the_ring_keeps_its_first_tokens_and_the_latest() -> None:
    cache = RotatingKVCache(5, keep=2)
    for token in range(1, 21):
        seen = feed(cache, [[token]])[0][0]
    assert sorted(seen) == [1, 2, 18, 19, 20]
    rows = feed(cache, [[21, 22, 23]])[0]
    for row in rows:
        assert {1, 2} <= set(row)


# Batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 8])
def test_left_padding_after_tokens_is_refused(limit: int | None) -> None:
    cache: Any = BatchKVCache([0, 1]) if limit is None else BatchRotatingKVCache(limit, [0, 1])
    assert cache.left_padding.tolist() == [0, 1]
    cache.prepare(left_padding=[1, 0])
    assert cache.left_padding.tolist() == [1, 1]
    feed(cache, [[-1, 1], [-1, 2]])
    before = cache.copy()
    with pytest.raises(KvCacheError) as caught:
        cache.prepare(left_padding=[1, 0])
    assert isinstance(caught.value, ValueError)
    same_state(before, cache)


def test_decoding_needs_finalize_in_rings() -> None:
    cache = BatchRotatingKVCache(4, [0, 0])
    cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    feed(cache, [[1, 2, 3], [4, -1, -1]])
    with pytest.raises(KvCacheError) as caught:
        cache.update(keys_of([[5], [6]]), values_of([[5], [6]]))
    assert isinstance(caught.value, RuntimeError)
    cache.finalize()
    assert [sorted(row[0]) for row in feed(cache, [[5], [6]])] == [[1, 2, 3, 5], [4, 6]]


def test_right_padding_evicts_no_token() -> None:
    cache = BatchRotatingKVCache(3, [0, 0])
    cache.prepare(lengths=[6, 2], right_padding=[0, 4])
    feed(cache, [[1, 2, 3, 4, 5, 6], [7, 8, -1, -1, -1, -1]])
    cache.finalize()
    assert [sorted(row[0]) for row in feed(cache, [[9], [10]])] == [[5, 6, 9], [7, 8, 10]]


def test_rings_of_different_sizes_do_not_merge() -> None:
    rings = [RotatingKVCache(4), RotatingKVCache(5)]
    for ring in rings:
        feed(ring, [[1, 2]])
    with pytest.raises(KvCacheError) as caught:
        RotatingKVCache.merge(rings)
    assert isinstance(caught.value, ValueError)


def test_merging_caches_of_different_lengths() -> None:
    caches = [KVCache(), KVCache(), KVCache()]
    feed(caches[0], [[1, 2, 3]])
    feed(caches[1], [[4]])
    merged = KVCache.merge(caches)
    assert merged.left_padding.tolist() == [0, 2, 3]
    assert merged.rope_offset.tolist() == [3, 1, 0]
    rows = feed(merged, [[5], [6], [7]])
    assert [row[0] for row in rows] == [[1, 2, 3, 5], [4, 6], [7]]
    assert feed(caches[0], [[8]]) == [[[1, 2, 3, 8]]]  # the members are untouched


def test_empty_batches_keep_their_padding() -> None:
    for cache in (BatchKVCache([0, 2]), BatchRotatingKVCache(4, [0, 2])):
        again = rebuilt(type(cache).__name__, cache.state, cache.meta_state)
        assert again.left_padding.tolist() == [0, 2]
        assert cache.copy().left_padding.tolist() == [0, 2]
        assert cache.rope_offset.tolist() == [0, -2]


@pytest.mark.parametrize("indices", [[5], [-1], [True], [0.0]])
def test_rows_that_do_not_exist_are_refused(indices: Any) -> None:
    for cache in (BatchKVCache([0, 1]), BatchRotatingKVCache(4, [0, 1])):
        feed(cache, [[1, 2], [-1, 3]])
        before = cache.copy()
        with pytest.raises((KvCacheError, TypeError)):
            cache.filter(indices)
        with pytest.raises((KvCacheError, TypeError)):
            cache.extract(indices[0])
        same_state(before, cache)


# Chunks, arrays, lists -----------------------------------------------------------------------


def test_a_front_trimmed_cache_survives_as_a_state() -> None:
    cache = ChunkedKVCache(3)
    feed(cache, [[1, 2, 3, 4, 5]])
    cache.maybe_trim_front()
    assert (cache.start_position, cache.offset, cache.chunk_size) == (2, 5, 3)
    again = rebuilt("ChunkedKVCache", cache.state, cache.meta_state)
    assert (again.start_position, again.offset, again.chunk_size) == (2, 5, 3)
    assert feed(again, [[6]]) == [[[3, 4, 5, 6]]]
    assert again.trim(9) == 4
    assert again.offset == 2


def test_slots_of_an_arrays_cache() -> None:
    cache = ArraysCache(3)
    assert len(cache) == 3
    assert cache[0] is None
    first = np.arange(6.0).reshape(2, 3)
    cache[0] = first
    cache[2] = first + 1
    np.testing.assert_array_equal(cache[0], first)
    first[:] = 0
    np.testing.assert_array_equal(cache[2], np.arange(6.0).reshape(2, 3) + 1)
    assert cache.is_empty() is False
    cache.filter([1])
    np.testing.assert_array_equal(cache[2], [[4, 5, 6]])
    assert cache[1] is None
    assert len(MambaCache()) == 2
    for index in (3, True, "0"):
        with pytest.raises((KvCacheError, TypeError, IndexError)):
            cache[index]  # type: ignore[index]


def test_batch_rows_of_arrays_caches() -> None:
    one, two = ArraysCache(2), ArraysCache(2)
    one[0], two[0] = np.ones((1, 2)), np.full((2, 2), 2.0)
    two[1] = np.full((2, 3), 3.0)
    one.extend(two)
    np.testing.assert_array_equal(one[0], [[1, 1], [2, 2], [2, 2]])
    np.testing.assert_array_equal(one[1], [[0, 0, 0], [3, 3, 3], [3, 3, 3]])
    row = one.extract(2)
    np.testing.assert_array_equal(row[1], [[3, 3, 3]])
    merged = ArraysCache.merge([row, row])
    np.testing.assert_array_equal(merged[0], [[2, 2], [2, 2]])


def test_masks_of_arrays_caches() -> None:
    assert ArraysCache(1).make_mask(3) is None
    cache = ArraysCache(1, left_padding=[0, 2])
    np.testing.assert_array_equal(cache.make_mask(3), [[True] * 3, [False, False, True]])
    cache.advance(1)
    np.testing.assert_array_equal(cache.make_mask(2), [[True] * 2, [False, True]])
    other = ArraysCache(1)
    other.prepare(lengths=[3, 1])
    np.testing.assert_array_equal(other.make_mask(3), [[True] * 3, [True, False, False]])
    other.advance(2)
    np.testing.assert_array_equal(other.make_mask(1), [[True], [False]])
    other.finalize()
    assert other.make_mask(2) is None


def test_states_of_arrays_caches() -> None:
    cache = MambaCache()
    cache[1] = np.ones((1, 4))
    again = rebuilt("MambaCache", cache.state, cache.meta_state)
    assert isinstance(again, MambaCache)
    assert again[0] is None
    np.testing.assert_array_equal(again[1], np.ones((1, 4)))


def test_lists_of_caches() -> None:
    inner: Any = CacheList(KVCache(), RotatingKVCache(4))
    cache: Any = CacheList(inner, KVCache())
    assert cache.is_empty() is True
    assert cache.is_trimmable() is True
    for member in (inner[0], inner[1], cache[1]):
        feed(member, [[1, 2, 3]])
    assert cache.nbytes == inner[0].nbytes + inner[1].nbytes + cache[1].nbytes
    assert cache.trim(1) == 1
    names, metas = cache.meta_state
    assert list(names) == ["CacheList", "KVCache"]
    assert len(metas) == 2
    again = rebuilt("CacheList", cache.state, cache.meta_state)
    assert isinstance(again[0], CacheList)
    assert isinstance(again[0][1], RotatingKVCache)
    assert feed(again[0][1], [[4]]) == [[[1, 2, 4]]]
    assert feed(again[0][0], [[5]]) == [[[1, 2, 5]]]
    copy = cache.copy()
    feed(copy[1], [[9]])
    assert cache[1].offset == 2
