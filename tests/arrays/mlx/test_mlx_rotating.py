import numpy as np
import pytest
from mlx_reference import HEADS, K_DIM, V_DIM, ids, kv, snapshot, stored

from pykvcache.arrays import BatchRotatingKVCache, RotatingKVCache, from_state
from pykvcache.errors import CacheValueError, NotSupported


def ring(max_size, tokens, keep=0, one_by_one=True):
    cache = RotatingKVCache(max_size, keep)
    for token in tokens if one_by_one else []:
        cache.update(*kv([token]))
    if not one_by_one:
        cache.update(*kv(tokens))
    return cache


def test_single_tokens_are_written_in_a_ring_from_keep():
    """RotatingKVCache: the single-token path writes in a ring from `keep`."""
    assert stored(ring(4, [1, 2, 3, 4])) == [1, 2, 3, 4]
    assert stored(ring(4, [1, 2, 3, 4, 5])) == [5, 2, 3, 4]
    assert stored(ring(4, [1, 2, 3, 4, 5, 6, 7, 8, 9])) == [9, 6, 7, 8]
    assert stored(ring(4, [1, 2, 3, 4, 5], keep=2)) == [1, 2, 5, 4]
    assert stored(ring(4, [1, 2, 3, 4, 5, 6, 7], keep=2)) == [1, 2, 7, 6]


def test_several_tokens_come_in_temporal_order():
    """RotatingKVCache: the multi-token path orders the ring, keeps max_size + S - 1 at most."""
    cache = ring(4, [1, 2, 3, 4, 5, 6])
    assert ids(cache.update(*kv([7, 8, 9]))[1]) == [4, 5, 6, 7, 8, 9]
    assert cache.offset == 9
    assert cache.size() == 4
    assert ids(cache.update(*kv([10]))[1]) == [10, 7, 8, 9]
    kept = ring(5, [1, 2, 3, 4, 5, 6, 7], keep=2)
    assert ids(kept.update(*kv([8, 9]))[1]) == [1, 2, 6, 7, 8, 9]
    assert ids(kept.update(*kv([10, 11]))[1]) == [1, 2, 8, 9, 10, 11]
    assert ids(kept.update(*kv([12]))[1]) == [1, 2, 12, 10, 11]


def test_a_long_prompt_is_kept_whole_until_the_next_token():
    """RotatingKVCache: every token of a prompt finds its whole window."""
    cache = ring(4, [*range(10)], one_by_one=False)
    assert stored(cache) == [*range(10)]
    assert cache.size() == 4
    assert ids(cache.update(*kv([10]))[1]) == [10, 7, 8, 9]


def test_ring_grows_by_steps_up_to_its_size():
    """Growth step 256, never beyond max_size for single tokens."""
    token = HEADS * (K_DIM + V_DIM) * 4
    cache = ring(300, [1])
    assert cache.nbytes == 256 * token
    for _ in range(400):
        cache.update(*kv([2]))
    assert cache.nbytes == 300 * token
    assert cache.copy().nbytes == 300 * token


def test_ring_size_is_at_most_max_size():
    """RotatingKVCache: size = min(offset, max)."""
    cache = RotatingKVCache(3)
    for n, size in ((1, 1), (2, 2), (3, 3), (4, 3)):
        cache.update(*kv([n]))
        assert (cache.offset, cache.size(), cache.max_size) == (n, size, 3)


def test_ring_is_trimmable_only_below_max_size():
    """RotatingKVCache: trimmable only while offset < max_size."""
    cache = ring(4, [1, 2, 3])
    assert cache.is_trimmable()
    cache.update(*kv([4]))
    assert not cache.is_trimmable()
    before = snapshot(cache)
    assert cache.trim(1) == 0
    assert snapshot(cache) == before


def test_ring_trim_moves_offset_and_index():
    """RotatingKVCache: trim moves offset and _idx."""
    cache = ring(8, [1, 2, 3, 4, 5], keep=1)
    assert cache.trim(2) == 2
    assert cache.meta_state == ("1", "8", "3", "3")
    assert ids(cache.update(*kv([9]))[1]) == [1, 2, 3, 9]
    assert ids(cache.update(*kv([10, 11]))[1]) == [1, 2, 3, 9, 10, 11]
    assert cache.trim(99) == 6
    assert cache.is_empty()


def test_ring_meta_is_keep_max_offset_index():
    """RotatingKVCache: meta (keep, max, offset, _idx)."""
    cache = ring(4, [1, 2, 3, 4, 5, 6], keep=1)
    assert cache.meta_state == ("1", "4", "6", "3")
    assert cache.rotated
    assert cache.keep == 1
    again = from_state("RotatingKVCache", cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)
    assert ids(again.update(*kv([7]))[1]) == ids(cache.update(*kv([7]))[1]) == [1, 5, 6, 7]


@pytest.mark.parametrize(
    "meta",
    [
        ("0", "4", "1", "0"),  # offset without tokens
        ("0", "4", "0", "1"),  # index without tokens
    ],
)
def test_empty_ring_needs_offset_and_index_zero(meta):
    """from_state: Rotating empty => offset = 0 and idx = 0."""
    with pytest.raises(CacheValueError):
        from_state("RotatingKVCache", (), meta)
    assert from_state("RotatingKVCache", (), ("0", "4", "0", "0")).max_size == 4


@pytest.mark.parametrize(
    "meta",
    [
        ("0", "0", "3", "3"),
        ("0", "4", "3", "4"),
        ("0", "4", "2", "3"),
        ("0", "4", "9", "2"),
        ("2", "3", "9", "1"),
        ("0", "8", "5", "3"),
        ("0", "8", "-3", "3"),
        ("0", "8", "3.0", "3"),
        ("0", "8", "3"),
        (),
    ],
)
def test_ring_state_and_meta_must_fit(meta):
    """from_state: numbers of a ring that do not fit its arrays are refused."""
    with pytest.raises(CacheValueError):
        from_state("RotatingKVCache", kv([1, 2, 3]), meta)


def test_ring_cannot_be_quantized():
    """RotatingKVCache: to_quantized raises."""
    with pytest.raises(NotSupported):
        RotatingKVCache(4).to_quantized()
    with pytest.raises(NotSupported):
        BatchRotatingKVCache(4, [0]).to_quantized(group_size=32, bits=8)


def test_ring_mask_for_several_tokens():
    """RotatingKVCache make_mask N>1: causal while it fits, else an array with the window."""
    cache = RotatingKVCache(4)
    assert cache.make_mask(4) == "causal"
    assert cache.make_mask(5).shape == (5, 5)
    assert cache.make_mask(2, return_array=True).shape == (2, 2)
    cache.update(*kv([1, 2, 3]))
    assert cache.make_mask(2).astype(int).tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    cache.update(*kv([4, 5, 6, 7, 8]))
    assert cache.make_mask(2).astype(int).tolist() == [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert cache.make_mask(2, 2).astype(int).tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_ring_mask_for_one_token():
    """RotatingKVCache make_mask N==1: None unless window < max and offset >= window; rolled."""
    cache = ring(4, [1])
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, window_size=4) is None
    assert cache.make_mask(1, window_size=2) is None
    cache.update(*kv([2]))
    assert cache.make_mask(1, window_size=2).astype(int).tolist() == [0, 1, 1]
    for token in (3, 4, 5, 6):
        cache.update(*kv([token]))
    mask = cache.make_mask(1, window_size=2)
    values = cache.update(*kv([7]))[1]
    assert sorted(np.array(ids(values))[mask].tolist()) == [6, 7]
    assert cache.make_mask(1, window_size=4, return_array=True) is None


def test_kept_tokens_stay_visible():
    """Masks: kept tokens of a ring with keep > 0 stay visible (mlx-lm hides some)."""
    cache = ring(5, [*range(1, 10)], keep=2)
    assert cache.make_mask(6)[:, :2].all()
    assert cache.make_mask(6, window_size=1)[:, :2].all()
    mask = cache.make_mask(1, window_size=1)
    values = cache.update(*kv([10]))[1]
    assert sorted(np.array(ids(values))[mask].tolist()) == [1, 2, 10]


def test_keep_leaves_room_for_the_newest_token():
    cache = ring(3, [1, 2, 3, 4, 5], keep=7)
    assert cache.keep == 7
    assert stored(cache) == [1, 2, 5]
    assert stored(ring(1, [1, 2, 3], keep=4)) == [3]


def test_ring_without_room_refuses():
    cache = RotatingKVCache(0, keep=4)
    with pytest.raises(CacheValueError):
        cache.update(*kv([1]))
    assert cache.is_empty()
    assert cache.state == ()
    with pytest.raises(CacheValueError):
        RotatingKVCache(-1)


def test_ring_merge_makes_a_batch():
    batch = RotatingKVCache.merge([ring(4, [1, 2, 3, 4, 5]), ring(4, [6])])
    assert isinstance(batch, BatchRotatingKVCache)
    assert batch.max_size == 4
    assert ids(batch.state[1], 0) == [2, 3, 4, 5]
    assert batch.left_padding.tolist() == [0, 3]
    assert batch.rope_offset.tolist() == [5, 1]


def test_ring_copy_is_independent():
    cache = ring(4, [1, 2, 3, 4, 5, 6], keep=1)
    twin = cache.copy()
    before = snapshot(cache)
    assert snapshot(twin) == before
    twin.update(*kv([7, 8, 9]))
    twin.update(*kv([10]))
    assert snapshot(cache) == before
