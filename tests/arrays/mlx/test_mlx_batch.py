import numpy as np
import pytest
from mlx_reference import ids, kv, snapshot, stored

from pykvcache.arrays import (
    BatchKVCache,
    KVCache,
    TokenBuffer,
    create_causal_mask,
    from_state,
)
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, KvCacheError

P = 0  # padding


def single(*tokens):
    cache = KVCache()
    if tokens:
        cache.update(*kv(list(tokens)))
    return cache


def batch(left_padding, *rows):
    cache = BatchKVCache(left_padding)
    if rows:
        cache.update(*kv(*rows))
    return cache


def real(cache, row):
    """The tokens of a row, as `extract` gives them."""
    return stored(cache.extract(row))


def test_batch_offset_starts_at_minus_left_padding():
    """BatchKVCache(left_padding): offset = -left_padding; one rope offset per row."""
    cache = batch([1, 3, 0])
    assert cache.rope_offset.tolist() == [-1, -3, 0]
    assert cache.offset == 0
    cache.update(*kv([P, 1, 2, 3], [P, P, P, 4], [5, 6, 7, 8]))
    assert cache.rope_offset.tolist() == [3, 1, 4]
    assert cache.offset == 4
    assert [real(cache, row) for row in range(3)] == [[1, 2, 3], [4], [5, 6, 7, 8]]
    assert cache.left_padding.tolist() == [1, 3, 0]
    assert cache.size() == 4


def test_batch_mask_hides_left_padding():
    """BatchKVCache make_mask: always an array, causal, with left padding and window."""
    cache = batch([1, 0], [P, 1], [2, 3])
    mask = cache.make_mask(2)
    assert np.array_equal(mask, create_causal_mask(2, 2, left_padding=[1, 0]))
    assert mask.shape == (2, 1, 2, 4)
    assert not mask[0, 0, :, 0].any()
    windowed = cache.make_mask(1, window_size=2)
    assert windowed[:, 0, 0].astype(int).tolist() == [[0, 1, 1], [0, 1, 1]]


def test_left_padding_only_while_empty():
    """BatchKVCache: prepare(left_padding) only if empty, else ValueError."""
    cache = batch([0, 1])
    cache.prepare(left_padding=[2, 0])
    assert cache.left_padding.tolist() == [2, 1]
    assert cache.rope_offset.tolist() == [-2, -1]
    cache.update(*kv([P, P, 1], [P, 2, 3]))
    before = snapshot(cache)
    with pytest.raises(ValueError, match="only be added to an empty BatchKVCache") as caught:
        cache.prepare(left_padding=[1, 1])
    assert isinstance(caught.value, KvCacheError)
    assert snapshot(cache) == before


def test_finalize_rolls_right_padding_to_the_left():
    """BatchKVCache: finalize rolls right padding to the left."""
    cache = batch([0, 0], [1, 2], [3, 4])
    cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    cache.update(*kv([5, 6], [7, P]))
    cache.update(*kv([8], [P]))
    cache.finalize()
    assert cache.left_padding.tolist() == [0, 2]
    assert cache.rope_offset.tolist() == [5, 3]
    assert real(cache, 0) == [1, 2, 5, 6, 8]
    assert real(cache, 1) == [3, 4, 7]
    assert ids(cache.update(*kv([9], [10]))[1], 1)[2:] == [3, 4, 7, 10]
    cache.finalize()
    assert cache.left_padding.tolist() == [0, 2]


def test_missing_finalize_is_an_error():
    """Missing finalize: RuntimeError, nothing lost."""
    cache = batch([0, 0], [1, 2], [3, 4])
    cache.prepare(right_padding=[0, 1])
    cache.update(*kv([5], [P]))
    for call in (
        lambda: cache.extend(batch([0])),
        lambda: batch([0]).extend(cache),
        lambda: cache.extract(0),
        lambda: cache.state,
        lambda: cache.prepare(right_padding=[1, 0]),
    ):
        with pytest.raises(RuntimeError, match="finalize") as caught:
            call()
        assert isinstance(caught.value, CacheOrderError)
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    twin = cache.copy()
    twin.filter([1])
    twin.finalize()
    assert real(twin, 0) == [3, 4]
    cache.finalize()
    assert real(cache, 0) == [1, 2, 5]
    assert real(cache, 1) == [3, 4]


def test_finalize_waits_for_the_announced_columns():
    cache = batch([0, 0], [1, 2], [3, 4])
    cache.prepare(right_padding=[0, 2])
    cache.update(*kv([5], [P]))
    with pytest.raises(CacheOrderError):
        cache.finalize()
    cache.update(*kv([6], [P]))
    cache.finalize()
    assert real(cache, 1) == [3, 4]
    cache.prepare(right_padding=[1, 0])
    cache.finalize()  # nothing came: nothing to move
    assert real(cache, 0) == [1, 2, 5, 6]


def test_filter_keeps_rows_and_shifts_common_padding():
    """BatchKVCache: filter shifts left by the common padding."""
    cache = batch([1, 3, 2], [P, 1, 2, 3], [P, P, P, 4], [P, P, 5, 6])
    cache.filter([2, 1])
    assert cache.offset == 2
    assert cache.left_padding.tolist() == [0, 1]
    assert cache.rope_offset.tolist() == [2, 1]
    assert cache.batch_size == 2
    assert real(cache, 0) == [5, 6]
    assert real(cache, 1) == [4]
    cache.filter([1, 1])
    assert [real(cache, row) for row in (0, 1)] == [[4], [4]]
    cache.filter([])
    assert cache.batch_size == 0
    for bad, error in (([0], CacheValueError), ([[0]], CacheValueError), ([0.5], CacheDTypeError)):
        with pytest.raises(error):
            cache.filter(bad)


def test_filter_of_an_empty_batch_keeps_its_padding():
    """BatchKVCache: filter on an empty batch does not count below zero (mlx-lm does)."""
    cache = batch([2, 3])
    cache.filter([1])
    assert cache.left_padding.tolist() == [3]
    assert cache.offset == 0
    assert ids(cache.update(*kv([P, P, P, 1]))[1]) == [P, P, P, 1]
    assert real(cache, 0) == [1]


def test_extend_right_justifies():
    """BatchKVCache: extend right-justifies."""
    cache = batch([1, 0], [P, 1], [2, 3])
    other = batch([0], [4, 5, 6, 7])
    before = snapshot(other)
    cache.extend(other)
    assert cache.left_padding.tolist() == [3, 2, 0]
    assert cache.rope_offset.tolist() == [1, 2, 4]
    assert [real(cache, row) for row in range(3)] == [[1], [2, 3], [4, 5, 6, 7]]
    assert snapshot(other) == before
    assert not np.shares_memory(cache.state[0], other.state[0])
    other.extend(other)
    assert [real(other, row) for row in (0, 1)] == [[4, 5, 6, 7]] * 2


def test_extend_with_an_empty_side():
    cache = batch([0, 1])
    cache.extend(batch([2]))
    assert cache.left_padding.tolist() == [0, 1, 2]
    assert cache.is_empty()
    cache.extend(batch([0], [5, 6]))
    assert real(cache, 3) == [5, 6]
    assert [real(cache, row) for row in range(3)] == [[]] * 3
    # The empty rows go on with the padding that they wait for.
    assert cache.rope_offset.tolist() == [0, -1, -2, 2]
    cache.update(*kv([1, 2], [P, 3], [P, P], [7, 8]))
    assert [real(cache, row) for row in range(4)] == [[1, 2], [3], [], [5, 6, 7, 8]]


def test_extract_gives_a_cache_without_padding():
    """BatchKVCache: extract -> KVCache without padding."""
    cache = batch([1, 0], [P, 1], [2, 3])
    alone = cache.extract(0)
    assert type(alone) is KVCache
    assert alone.offset == 1
    assert stored(alone) == [1]
    alone.update(*kv([9]))
    assert real(cache, 0) == [1]
    assert batch([3]).extract(0).is_empty()
    for bad in (2, -1):
        with pytest.raises(CacheValueError):
            cache.extract(bad)


def test_merge_pads_on_the_left():
    """BatchKVCache: merge."""
    merged = BatchKVCache.merge([single(1, 2, 3), single(), single(4)])
    assert merged.left_padding.tolist() == [0, 3, 2]
    assert merged.rope_offset.tolist() == [3, 0, 1]
    assert [real(merged, row) for row in range(3)] == [[1, 2, 3], [], [4]]
    empty = BatchKVCache.merge([single(), single()])
    assert empty.is_empty()
    assert empty.left_padding.tolist() == [0, 0]
    wide, double = KVCache(), KVCache()
    wide.update(np.ones((1, 3, 1, 8), np.float32), np.ones((1, 3, 1, 4), np.float32))
    double.update(*(a.astype(np.float64) for a in kv([1])))
    two = KVCache()
    two.update(*kv([1], [2]))
    for bad, error in ((wide, ValueError), (double, TypeError), (two, ValueError), (7, TypeError)):
        with pytest.raises(error) as caught:
            BatchKVCache.merge([single(1), bad])
        assert isinstance(caught.value, KvCacheError)


def test_batch_trim_drops_columns():
    """BatchKVCache: trim drops columns of all rows; padding stays."""
    cache = batch([0, 2], [1, 2, 3], [P, P, 4])
    assert cache.is_trimmable()
    assert cache.trim(1) == 1
    assert cache.rope_offset.tolist() == [2, 0]
    assert cache.left_padding.tolist() == [0, 2]
    cache.update(*kv([5], [6]))
    assert real(cache, 0) == [1, 2, 5]
    assert real(cache, 1) == [6]
    assert cache.trim(9) == 3
    assert cache.is_empty()
    assert cache.left_padding.tolist() == [0, 2]


@pytest.mark.parametrize("rows", [(), ([P, 1], [2, 3])])
def test_batch_state_round_trip(rows):
    """BatchKVCache: state (keys, values, offset, left_padding); empty batches keep padding."""
    cache = batch([1, 0], *rows)
    assert len(cache.state) == (4 if rows else 0)
    again = from_state("BatchKVCache", cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)
    assert again.left_padding.tolist() == [1, 0]
    cache.state = ()
    assert cache.is_empty()
    assert cache.left_padding.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "meta"),
    [
        ({2: [5, 5]}, ()), ({2: [1, 2, 3]}, ()), ({3: [1]}, ()), ({3: [-1, 0]}, ()),
        ({2: [[1, 2]]}, ()), ({3: [0.5, 0]}, ()), ({}, ("1",)), ({1: kv([1])[1]}, ()),
    ],
)  # fmt: skip
def test_batch_state_must_fit(change, meta):
    state = list(batch([1, 0], [P, 1], [2, 3]).state)
    for i, part in change.items():
        state[i] = np.array(part)
    with pytest.raises(KvCacheError):
        from_state("BatchKVCache", state, meta)
    with pytest.raises(CacheValueError):
        from_state("BatchKVCache", state[:3], ())


def test_batch_update_needs_as_many_rows():
    """Wrong shapes leave a batch as it was."""
    cache = batch([0, 0])
    for rows in ([[1]], [[1], [2], [3]]):
        with pytest.raises(CacheValueError):
            cache.update(*kv(*rows))
    cache.update(*kv([1], [2]))
    with pytest.raises(CacheValueError):
        cache.update(*kv([1]))
    for name in ("left_padding", "lengths", "right_padding"):
        with pytest.raises(CacheValueError):
            cache.prepare(**{name: [1]})
    cache.advance(3)
    assert cache.offset == 1


def test_a_bool_among_integers_is_refused():
    """A bool is no integer, also in a list of integers, which NumPy would convert."""
    cache = batch([0, 0], [1], [2])
    for call in (
        lambda: BatchKVCache([True, 2]),
        lambda: cache.filter([1, np.bool_(False)]),
        lambda: cache.prepare(right_padding=[True, 0]),
        lambda: TokenBuffer([3, True]),
    ):
        with pytest.raises(TypeError, match="a bool") as caught:
            call()
        assert isinstance(caught.value, CacheDTypeError)
    assert cache.batch_size == 2


def test_a_class_of_somebody_else_may_derive_from_it() -> None:
    class Mine(BatchKVCache):
        pass

    assert type(KVCache.merge([single(1)])) is BatchKVCache
    assert type(Mine.merge([single(1)])) is Mine
