import numpy as np
import pytest
from mlx_reference import ids, kv, snapshot, stored

from pykvcache.arrays import BatchRotatingKVCache, RotatingKVCache, from_state
from pykvcache.errors import (
    CacheDTypeError,
    CacheOrderError,
    CacheValueError,
    KvCacheError,
    NotSupported,
)

P = 0


def ring(max_size, *tokens):
    cache = RotatingKVCache(max_size)
    for token in tokens:
        cache.update(*kv([token]))
    return cache


def batch(max_size, left_padding, *columns):
    cache = BatchRotatingKVCache(max_size, left_padding)
    for column in columns:
        cache.update(*kv(*([token] for token in column)))
    return cache


def real(cache, row):
    """The tokens of a row from old to new."""
    alone = cache.extract(row)
    return stored(alone) if not alone.is_empty() else []


def visible(cache, row, mask, values):
    return sorted(np.array(ids(values, row))[mask[row, 0, -1]].tolist())


def test_batch_ring_rotates_and_counts_rows():
    """BatchRotatingKVCache: rotated, _offset, per-row offsets."""
    cache = batch(3, [0, 1], (1, P), (2, 11))
    assert not cache.rotated
    assert cache.offset == 2
    assert cache.rope_offset.tolist() == [2, 1]
    for column in ((3, 12), (4, 13)):
        cache.update(*kv(*([t] for t in column)))
    assert cache.rotated
    assert cache.offset == 4
    assert cache.rope_offset.tolist() == [4, 3]
    assert cache.size() == cache.max_size == 3
    assert ids(cache.state[1], 0) == [4, 2, 3]
    assert real(cache, 0) == [2, 3, 4]
    assert real(cache, 1) == [11, 12, 13]
    assert cache.left_padding.tolist() == [0, 0]


def test_batch_ring_takes_several_columns_in_order():
    """BatchRotatingKVCache: multi-token path orders the ring, max_size + S - 1 at most."""
    cache = batch(3, [0], (1,), (2,), (3,), (4,))
    assert ids(cache.update(*kv([5, 6]))[1]) == [3, 4, 5, 6]
    assert not cache.rotated
    assert cache.offset == 6
    assert ids(cache.update(*kv([7]))[1]) == [7, 5, 6]


def test_right_padding_does_not_evict_tokens():
    """BatchRotatingKVCache: right padding must not evict valid tokens."""
    cache = BatchRotatingKVCache(4, [0, 0])
    cache.prepare(lengths=[6, 3], right_padding=[0, 3])
    cache.update(*kv([1, 2], [11, 12]))
    cache.update(*kv([3, 4], [13, P]))
    cache.update(*kv([5, 6], [P, P]))
    cache.finalize()
    assert real(cache, 0) == [2, 3, 4, 5, 6]
    assert real(cache, 1) == [11, 12, 13]
    assert cache.rope_offset.tolist() == [6, 3]
    mask = cache.make_mask(1)
    values = cache.update(*kv([7], [14]))[1]
    assert visible(cache, 0, mask, values) == [4, 5, 6, 7]
    assert visible(cache, 1, mask, values) == [11, 12, 13, 14]


def test_decoding_before_finalize_is_an_error():
    """BatchRotatingKVCache: RuntimeError, finalize() should be called before decoding."""
    cache = BatchRotatingKVCache(4, [0, 0])
    cache.prepare(lengths=[2, 1], right_padding=[0, 1])
    cache.update(*kv([1, 2], [11, P]))
    with pytest.raises(RuntimeError, match=r"finalize\(\) should be called before decoding"):
        cache.update(*kv([3], [12]))
    for call in (
        lambda: cache.state,
        lambda: cache.extract(0),
        lambda: cache.extend(BatchRotatingKVCache(4, [0])),
        lambda: BatchRotatingKVCache(4, [0]).extend(cache),
        lambda: cache.prepare(lengths=[1, 1], right_padding=[0, 1]),
    ):
        with pytest.raises(CacheOrderError, match="finalize"):
            call()
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    cache.finalize()
    assert real(cache, 0) == [1, 2]
    assert real(cache, 1) == [11]


def test_filter_keeps_announced_lengths():
    """BatchRotatingKVCache: filter keeps rows, offsets and announced lengths (mlx-lm does not)."""
    cache = BatchRotatingKVCache(4, [0, 0, 0])
    cache.prepare(lengths=[3, 1, 2], right_padding=[0, 2, 1])
    cache.update(*kv([1, 2, 3], [11, P, P], [21, 22, P]))
    cache.filter([2, 1])
    cache.finalize()
    assert real(cache, 0) == [21, 22]
    assert real(cache, 1) == [11]
    assert cache.rope_offset.tolist() == [2, 1]
    assert cache.batch_size == 2
    with pytest.raises(CacheValueError):
        cache.filter([2])


def test_merge_needs_one_max_size():
    """BatchRotatingKVCache: merge of different max_size -> ValueError; order and offsets kept."""
    merged = BatchRotatingKVCache.merge([ring(4, 1, 2, 3, 4, 5, 6), ring(4), ring(4, 7)])
    assert [real(merged, row) for row in range(3)] == [[3, 4, 5, 6], [], [7]]
    assert merged.rope_offset.tolist() == [6, 0, 1]
    assert merged.left_padding.tolist() == [0, 4, 3]
    assert not merged.is_trimmable()
    merged.update(*kv([8], [9], [10]))
    assert [real(merged, row) for row in range(3)] == [[4, 5, 6, 8], [9], [7, 10]]
    assert BatchRotatingKVCache.merge([ring(4), ring(4)]).is_empty()
    for bad in ([ring(4), ring(5)], []):
        with pytest.raises(ValueError, match="max_size") as caught:
            BatchRotatingKVCache.merge(bad)
        assert isinstance(caught.value, KvCacheError)
    with pytest.raises(CacheDTypeError):
        BatchRotatingKVCache.merge([ring(4), None])
    with pytest.raises(NotSupported):
        BatchRotatingKVCache.merge([RotatingKVCache(4, keep=1)])


def test_rotated_flag_survives_saving():
    """BatchRotatingKVCache: meta "rotated" is read back as it was (mlx-lm: bool("False"))."""
    for columns in (2, 3, 4, 5, 6):
        cache = batch(3, [0, 1], *((n + 1, n + 11) for n in range(columns)))
        assert cache.meta_state[3] == str(cache.rotated)
        again = from_state("BatchRotatingKVCache", cache.state, cache.meta_state)
        assert snapshot(again) == snapshot(cache)
        assert again.rotated == cache.rotated
        new = kv([99], [98])
        assert ids(again.update(*new)[1]) == ids(cache.update(*new)[1])


def test_empty_batch_ring_keeps_its_padding():
    cache = BatchRotatingKVCache(3, [2, 0])
    again = from_state("BatchRotatingKVCache", cache.state, cache.meta_state)
    assert cache.state == ()
    assert again.left_padding.tolist() == [2, 0]
    assert again.max_size == 3
    assert again.rope_offset.tolist() == [-2, 0]


@pytest.mark.parametrize(
    "meta", [("3", "1", "0", "False"), ("3", "0", "1", "False"), ("3", "0", "0", "True")]
)
def test_empty_batch_ring_needs_fresh_meta(meta):
    """from_state: BatchRotating empty => offset = 0, _idx = 0, not rotated."""
    with pytest.raises(CacheValueError):
        from_state("BatchRotatingKVCache", (), meta)


@pytest.mark.parametrize(
    "meta",
    [
        ("0", "3", "3", "False"),  # max_size >= 1
        ("3", "5", "4", "False"),  # _idx <= L
        ("4", "5", "2", "True"),  # rotated => L == max_size
        ("3", "2", "3", "False"),  # L <= _offset
        ("3", "5", "1", "no"),
        ("3", "5", "3"),
        ("3", "5", "3", "False", "0"),
        (),
    ],
)
def test_batch_ring_state_and_meta_must_fit(meta):
    """from_state: BatchRotating max_size >= 1, idx <= L, rotated => L == max, L <= offset."""
    state = (*kv([1, 2, 3]), np.array([5]), np.array([0]))
    assert from_state("BatchRotatingKVCache", state, ("3", "5", "1", "True")).rotated
    with pytest.raises(CacheValueError):
        from_state("BatchRotatingKVCache", state, meta)


def test_mask_after_rotation_hides_no_valid_token():
    """Masks: after rotation no valid token is hidden (mlx-lm's batch-rotating mask hides one)."""
    cache = batch(4, [0, 1], *((n + 1, n + 11) for n in range(5)))
    assert cache.rotated
    mask = cache.make_mask(2)
    values = cache.update(*kv([6, 7], [16, 17]))[1]
    assert mask.shape[-1] == values.shape[2] == 5
    assert sorted(np.array(ids(values, 0))[mask[0, 0, 0]].tolist()) == [3, 4, 5, 6]
    assert sorted(np.array(ids(values, 1))[mask[1, 0, 0]].tolist()) == [13, 14, 15, 16]
    mask = cache.make_mask(1)
    values = cache.update(*kv([8], [18]))[1]
    assert visible(cache, 1, mask, values) == [15, 16, 17, 18]
    narrow = cache.make_mask(1, window_size=2)
    values = cache.update(*kv([9], [19]))[1]
    assert visible(cache, 1, narrow, values) == [18, 19]


def test_batch_ring_trims_while_nothing_was_dropped():
    cache = batch(4, [0, 1], (1, P), (2, 11), (3, 12))
    assert cache.is_trimmable()
    assert cache.trim(1) == 1
    assert cache.offset == 2
    assert cache.rope_offset.tolist() == [2, 1]
    for column in ((4, 13), (5, 14)):
        cache.update(*kv(*([t] for t in column)))
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    assert real(cache, 0) == [1, 2, 4, 5]
    assert real(cache, 1) == [11, 13, 14]


def test_left_padding_only_while_the_ring_is_empty():
    cache = BatchRotatingKVCache(4, [0, 0])
    cache.prepare(left_padding=[1, 0])
    assert cache.rope_offset.tolist() == [-1, 0]
    cache.update(*kv([P, 1], [2, 3]))
    with pytest.raises(ValueError, match="only be added to an empty BatchRotatingKVCache"):
        cache.prepare(left_padding=[1, 0])
    with pytest.raises(CacheValueError, match="lengths"):
        cache.prepare(right_padding=[1, 0])


def test_extend_orders_both_rings_and_leaves_the_other_alone():
    """BatchRotatingKVCache: extend right-justifies; the other cache is not touched."""
    a = batch(3, [0, 1], *((n + 1, n + 11) for n in range(5)))
    b = batch(3, [0], (21,), (22,))
    before = snapshot(a)
    b.extend(a)
    assert snapshot(a) == before
    assert [real(b, row) for row in range(3)] == [[21, 22], [3, 4, 5], [13, 14, 15]]
    assert b.rope_offset.tolist() == [2, 5, 4]
    assert b.left_padding.tolist() == [1, 0, 0]
    mask = b.make_mask(1)
    values = b.update(*kv([23], [6], [16]))[1]
    assert visible(b, 0, mask, values) == [21, 22, 23]
    assert visible(b, 1, mask, values) == [4, 5, 6]
    with pytest.raises(ValueError, match="max_size"):
        b.extend(BatchRotatingKVCache(4, [0]))
    with pytest.raises(CacheDTypeError):
        b.extend(RotatingKVCache(3))


def test_padding_that_left_the_ring_does_not_come_back():
    """BatchRotatingKVCache: rows added later are not shown evicted padding (mlx-lm flaw)."""
    short = batch(3, [1], (P,), (1,), (2,), (3,), (4,))
    long = BatchRotatingKVCache(3, [0])
    long.update(*kv([11, 12, 13, 14, 15]))
    short.extend(long)
    mask = short.make_mask(2)
    values = short.update(*kv([5, 6], [16, 17]))[1]
    assert sorted(np.array(ids(values, 0))[mask[0, 0, 0]].tolist()) == [3, 4, 5]
    assert visible(short, 0, mask, values) == [4, 5, 6]


def test_extract_gives_a_ring_in_order():
    cache = batch(3, [0, 2], *((n + 1, n + 11) for n in range(4)))
    alone = cache.extract(1)
    assert type(alone) is RotatingKVCache
    assert alone.max_size == 3
    assert alone.keep == 0
    assert stored(alone) == [13, 14]
    assert alone.offset == 2
    assert alone.is_trimmable()
    assert ids(alone.update(*kv([15]))[1]) == [13, 14, 15]
    assert ids(alone.update(*kv([16]))[1]) == [16, 14, 15]


def test_batch_ring_refuses_and_keeps():
    """Wrong shapes leave a batch ring as it was."""
    cache = batch(3, [0, 0], (1, 11), (2, 12))
    before = snapshot(cache)
    for keys, values in (kv([1]), kv([1, 2], [3, 4])[::-1], kv([1], [2], [3])):
        with pytest.raises(CacheValueError):
            cache.update(keys, values)
    assert snapshot(cache) == before
    with pytest.raises(CacheValueError):
        BatchRotatingKVCache(0, [0]).update(*kv([1]))
    cache.advance(1)
    assert snapshot(cache) == before
