"""Caches that are driven as one by example: all members change, or none."""

from __future__ import annotations

import numpy as np
import pytest
from mlx_support import filled, kv, snapshot, stored

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
)
from pykvcache.errors import CacheDTypeError, CacheValueError, NotSupported


def test_list_is_trimmable_if_all_are():
    both = CacheList(filled(KVCache(), [[1, 2, 3]]), filled(KVCache(), [[4]]))
    assert both.is_trimmable()
    assert both.trim(2) == 1
    assert stored(both[0]) == [1]
    assert stored(both[1]) == []
    one = CacheList(filled(KVCache(), [[1, 2, 3]]), ArraysCache(1))
    assert not one.is_trimmable()
    before = snapshot(one)
    assert one.trim(2) == 0
    assert snapshot(one) == before
    with pytest.raises(CacheValueError):
        both.trim(-1)


def test_list_size_empty_and_nbytes():
    caches = CacheList(filled(KVCache(), [[1]]), filled(KVCache(), [[1, 2, 3]]))
    assert caches.size() == 3
    assert not caches.is_empty()
    assert caches.nbytes == caches[0].nbytes + caches[1].nbytes
    assert CacheList(KVCache(), filled(KVCache(), [[1]])).is_empty()
    assert not CacheList(filled(KVCache(), [[1]]), KVCache()).is_empty()
    assert CacheList().is_empty()
    assert CacheList().size() == 0
    assert CacheList().trim(1) == 0
    assert caches.offset == caches.rope_offset == 1


def test_list_changes_all_members_or_none():
    one, two = BatchKVCache([0, 0]), KVCache()
    one.update(*kv([1, 2], [3, 4]))
    two.update(*kv([1, 2]))
    caches = CacheList(one, two)
    before = snapshot(caches)
    for change in (
        lambda: caches.filter([0]),
        lambda: caches.prepare(right_padding=[0, 1]),
        lambda: caches.extend(CacheList(BatchKVCache([0]), KVCache())),
        lambda: caches.extend(CacheList(one)),
        lambda: caches.extract(0),
    ):
        with pytest.raises((NotSupported, CacheValueError)):
            change()
        assert snapshot(caches) == before
    other = CacheList(BatchKVCache([0, 0]), BatchKVCache([0]))
    with pytest.raises(CacheValueError):
        other.filter([1])
    assert other[0].batch_size == 2
    for rows in (iter([0]), {0}, {0: 1}, b"\0"):  # every member would read them again
        with pytest.raises(CacheDTypeError):
            other.filter(rows)
    state = caches.state
    with pytest.raises(CacheValueError):
        caches.from_serialized((state[0], state[0]), caches.meta_state)
    with pytest.raises(CacheValueError):
        caches.state = ((), kv([1])[:1])
    assert snapshot(caches) == before


def test_list_drives_batches_together():

    def single(a, b):
        caches = CacheList(filled(KVCache(), [a]), ArraysCache(1))
        caches[1][0] = np.full((1, 2), float(b), np.float32)
        return caches

    batch = CacheList.merge([single([1, 2, 3], 5), single([4], 6)])
    assert batch[0].left_padding.tolist() == [0, 2]
    assert batch[1][0][:, 0].tolist() == [5, 6]
    batch.prepare(lengths=[2, 1], right_padding=[0, 1])
    batch[0].update(*kv([7, 8], [9, 0]))
    batch.advance(2)
    assert batch[1].lengths.tolist() == [0, -1]
    batch.finalize()
    assert batch[0].left_padding.tolist() == [0, 3]
    assert batch[1].lengths is None
    batch.extend(CacheList.merge([single([1], 9)]))
    batch.filter([2, 1])
    alone = batch.extract(1)
    assert stored(alone[0]) == [4, 9]
    assert alone[1][0][:, 0].tolist() == [6]
    assert stored(batch.extract(0)[0]) == [1]


def test_members_without_rows_follow_the_others():

    def fresh(rows):
        return CacheList(ArraysCache(1), CacheList(BatchKVCache([0] * rows)))

    caches = fresh(3)
    assert caches.extract(2)[0].is_empty()
    caches.filter([2])
    assert caches[1][0].batch_size == 1
    with pytest.raises(CacheValueError):
        caches.filter([1])
    other, caches = fresh(2), fresh(3)
    other[0][0] = np.array([[7.0], [8.0]], np.float32)
    caches.extend(other)
    assert caches[1][0].batch_size == 5
    assert caches[0][0].ravel().tolist() == [0, 0, 0, 7, 8]
    other.extend(fresh(1))
    assert other[0][0].ravel().tolist() == [7, 8, 0]


def test_list_itself_stores_nothing():
    caches = CacheList(KVCache())
    with pytest.raises(NotSupported):
        caches.update(*kv([1]))
    with pytest.raises(NotSupported):
        caches.make_mask(1)
    with pytest.raises(CacheDTypeError):
        CacheList(KVCache(), None)
