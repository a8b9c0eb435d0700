"""What the issue and the seeds settle about the encoder cache and the wrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvcache.arrays import CacheConfig, CausalCache, EncoderCache, SWACache, WrapperCache
from pykvcache.errors import KvCacheError, KvCacheFull


def numbers(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32).reshape(-1, 1, 1)


def encoder() -> EncoderCache:
    cache = EncoderCache()
    cache.init(np.float32, 1, 16, 16)
    return cache


def store(cache: EncoderCache, positions: list[int], multimodal: tuple[int, ...]) -> None:
    cache.start_forward(positions, [0] * len(positions), multimodal=multimodal)
    cache.set_layer(0)
    cache.put(np.ones((3, 4), np.float32), np.zeros((2, 2, 2), np.float32))


# EncoderCache -----------------------------------------------------------------------------


def test_any_shape_comes_back_without_a_mask() -> None:
    cache = encoder()
    cache.start_forward([0], [0], multimodal=(0,))
    rng = np.random.default_rng(0)
    stored = {}
    for layer, shape in enumerate([(5,), (2, 3), (2, 3, 4, 5)]):
        cache.set_layer(layer)
        stored[layer] = rng.random(shape, np.float32), rng.random((7, *shape), np.float32)
        cache.put(*stored[layer])
    for layer, (key, value) in stored.items():
        cache.set_layer(layer)
        got_key, got_value, mask = cache.get()
        np.testing.assert_array_equal(got_key, key)
        np.testing.assert_array_equal(got_value, value)
        assert mask is None


def test_permuted_values() -> None:
    cache = EncoderCache()
    cache.set_config(CacheConfig(permuted_v=True))
    cache.init(np.float32, 1, 16, 16)
    cache.start_forward([0], [0], multimodal=(0,))
    value = np.random.default_rng(0).random((5, 2, 3), np.float32)
    for _ in range(2):
        cache.put(value, value)
        np.testing.assert_array_equal(cache.get()[0], value)
        np.testing.assert_array_equal(cache.get()[1], value.transpose(1, 2, 0))


def test_an_empty_layer_gives_nothing() -> None:
    cache = encoder()
    cache.start_forward([0], [0])
    cache.set_layer(3)
    assert tuple(cache.get()) == (None, None, None)


def test_a_second_put_replaces_and_must_have_the_first_shape() -> None:
    cache = encoder()
    store(cache, [0], (0,))
    cache.start_forward([1], [0], multimodal=(0,))
    key, value = np.full((3, 4), 5, np.float32), np.full((2, 2, 2), 6, np.float32)
    cache.put(key, value)
    np.testing.assert_array_equal(cache.get()[0], key)
    for wrong in ((key[:2], value), (key, value[0]), (key.ravel(), value)):
        with pytest.raises(KvCacheError):
            cache.put(*wrong)
        np.testing.assert_array_equal(cache.get()[0], key)
        np.testing.assert_array_equal(cache.get()[1], value)


def test_nothing_is_shared_with_the_caller() -> None:
    cache = encoder()
    cache.start_forward([0], [0], multimodal=(0,))
    key = np.ones((2, 2), np.float32)
    cache.put(key, key)
    key[:] = 3
    np.testing.assert_array_equal(cache.get()[0], np.ones((2, 2)))


def test_the_last_multimodal_item_counts() -> None:
    cache = encoder()
    assert cache.encoder_cached is False
    store(cache, [4, 5, 6, 7], (0, 2))
    assert cache.encoder_cached is True
    cache.remove(0, 4, 6)
    assert cache.encoder_cached is True
    cache.remove(0, 7)
    assert cache.encoder_cached is True
    cache.remove(0, 6, 7)
    assert cache.encoder_cached is False


@pytest.mark.parametrize(
    ("begin", "end", "cached"),
    [
        (0, None, False),
        (5, None, False),
        (6, None, True),
        (0, 5, True),
        (0, 6, False),
        (5, 6, False),
    ],
)
def test_removing_the_item_forgets_it(begin: int, end: int | None, cached: bool) -> None:
    cache = encoder()
    store(cache, [3, 4, 5], (2,))
    cache.remove(0, begin, end)
    assert cache.encoder_cached is cached


def test_a_reserve_pass_stores_nothing() -> None:
    cache = encoder()
    cache.start_forward([3], [0], reserve=True, multimodal=(0,))
    cache.put(np.ones((3, 4), np.float32), np.ones((2, 2, 2), np.float32))
    assert cache.encoder_cached is False
    store(cache, [5], (0,))
    before = [np.array(array) for array in cache.get()[:2]]
    cache.start_forward([9], [0], reserve=True, multimodal=(0,))
    cache.put(np.full((3, 4), 8, np.float32), np.full((2, 2, 2), 8, np.float32))
    cache.start_forward([6], [0])
    for old, new in zip(before, cache.get()[:2], strict=True):
        np.testing.assert_array_equal(old, new)
    cache.remove(0, 9, 10)
    assert cache.encoder_cached is True
    cache.remove(0, 5, 6)
    assert cache.encoder_cached is False


@pytest.mark.parametrize("multimodal", [(1,), (-1,), (0, 7), (True,), (0.0,)])
def test_items_outside_the_batch_are_refused(multimodal: Any) -> None:
    cache = encoder()
    with pytest.raises((KvCacheError, TypeError)):
        cache.start_forward([0], [0], multimodal=multimodal)


def test_one_sequence_and_no_padding_only() -> None:
    with pytest.raises(KvCacheError):
        EncoderCache().init(np.float32, 2, 16, 16)
    for padding in (0, 1):
        cache = EncoderCache()
        cache.set_config(CacheConfig(cache_padding=padding))
        cache.init(np.float32, 1, 16, 16)
    cache = EncoderCache()
    cache.set_config(CacheConfig(cache_padding=2))
    with pytest.raises(KvCacheError):
        cache.init(np.float32, 1, 16, 16)


def test_copies_are_refused_and_every_position_can_be_resumed() -> None:
    cache = encoder()
    store(cache, [0], (0,))
    with pytest.raises(KvCacheError):
        cache.copy_prefix(0, 1, 1)
    assert cache.encoder_cached is True
    assert cache.can_resume(0, 0) is True
    assert cache.can_resume(9, 99) is True


# WrapperCache -----------------------------------------------------------------------------


def mask_of(cache: WrapperCache) -> NDArray[Any]:
    mask = cache.get()[2]
    assert mask is not None
    return mask


def put_both(cache: WrapperCache, *values: float) -> None:
    for kind in range(2):
        cache.set_layer_type(kind)
        cache.set_layer(0)
        cache.put(numbers(*values), numbers(*values))


def test_calls_reach_every_cache_and_get_the_current_one() -> None:
    first, second = CausalCache(), SWACache(1)
    cache = WrapperCache(first, second)
    cache.set_config(CacheConfig(mask_batch_padding=2))
    cache.init(np.float32, 1, 100, 4)
    cache.start_forward([0, 1, 2], [0, 0, 0])
    assert cache.underlying_cache is first
    put_both(cache, 10, 11, 12)
    assert cache.underlying_cache is second
    assert mask_of(cache).shape == (4, 3)
    np.testing.assert_array_equal(mask_of(cache)[2] == 0, [False, True, True])
    cache.set_layer_type(0)
    np.testing.assert_array_equal(mask_of(cache)[2] == 0, [True, True, True])
    cache.start_forward([3], [0])
    assert cache.underlying_cache is first  # a forward pass begins with the first type
    put_both(cache, 13)
    cache.copy_prefix(0, 1, 3)
    for one in (first, second):
        assert one.can_resume(1, 3) is True
    cache.remove(0, 0)
    assert second.can_resume(0, 4) is False
    assert second.can_resume(1, 3) is True
    cache.close()
    for one in (first, second):
        with pytest.raises(KvCacheError):
            one.start_forward([0], [0])


def test_resuming_needs_every_cache() -> None:
    cache = WrapperCache(CausalCache(), SWACache(2))
    cache.init(np.float32, 1, 100, 4)
    assert cache.can_resume(0, 0) is False
    for start in (0, 4):
        cache.start_forward([start, start + 1, start + 2, start + 3], [0] * 4)
        put_both(cache, 1, 2, 3, 4)
    assert cache.can_resume(0, 8) is True
    assert cache.can_resume(0, 2) is False


def test_items_are_passed_on() -> None:
    inner = EncoderCache()
    cache = WrapperCache(inner, CausalCache())
    cache.init(np.float32, 1, 16, 4)
    cache.start_forward([0, 1, 2], [0, 0, 0], multimodal=(0, 1))
    put_both(cache, 1, 2, 3)
    assert inner.encoder_cached is True
    inner.remove(0, 1, 2)
    assert inner.encoder_cached is False


def test_a_full_member_undoes_the_pass_of_the_others() -> None:
    first, second = CausalCache(), SWACache(2)
    cache = WrapperCache(first, second)
    cache.init(np.float32, 1, 10, 2)  # 10 and 4 cells
    for start in (0, 2):
        cache.start_forward([start, start + 1], [0, 0])
        put_both(cache, start, start + 1)
    cache.start_forward([0, 1], [1, 1])
    put_both(cache, 50, 51)
    with pytest.raises(KvCacheFull):
        cache.start_forward([0, 1], [2, 2])
    assert cache.underlying_cache is second
    # As if it had never been tried: the others go on, and sequence 2 is unknown.
    assert second.can_resume(2, 2) is False
    assert second.can_resume(0, 4) is second.can_resume(1, 2) is True
    first.start_forward([0, 4], [2, 0])
    first.put(numbers(9, 4), numbers(9, 4))
    key, _, mask = first.get()
    assert key[mask[0] == 0][:, 0, 0].tolist() == [9]
    assert sorted(key[mask[1] == 0][:, 0, 0].tolist()) == [0, 1, 2, 3, 4]


def test_a_full_member_leaves_the_others_exactly_as_they_were() -> None:
    # The first cache would evict for this batch; undoing must bring those tokens back.
    first, second = SWACache(2), CausalCache()
    cache = WrapperCache(first, second)
    cache.init(np.float32, 1, 8, 4)  # 6 and 8 cells
    cache.start_forward([0, 1, 2, 3], [0] * 4)
    put_both(cache, 0, 1, 2, 3)
    cache.start_forward([0, 1], [1, 1])
    put_both(cache, 50, 51)
    assert first.can_resume(0, 4) is True
    before = [first.can_resume(seq, pos) for seq in (0, 1) for pos in range(8)]
    with pytest.raises(KvCacheFull):
        cache.start_forward([6, 7, 8], [0, 0, 0])
    assert [first.can_resume(seq, pos) for seq in (0, 1) for pos in range(8)] == before
    cache.start_forward([4], [0])
    put_both(cache, 4)
    key, _, mask = first.get()
    assert sorted(key[mask[0] == 0][:, 0, 0].tolist()) == [2, 3, 4]


def test_removal_stops_at_the_first_error_and_changes_nothing() -> None:
    def shift(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
        return key

    first, second = CausalCache(shift), CausalCache()
    cache = WrapperCache(first, second)
    cache.init(np.float32, 1, 10, 4)
    cache.start_forward([0, 1, 2, 3], [0] * 4)
    put_both(cache, 0, 1, 2, 3)
    with pytest.raises(KvCacheError):
        cache.remove(0, 1, 2)
    cache.start_forward([4], [0])
    put_both(cache, 4)
    for one in (first, second):
        key, _, mask = one.get()
        assert sorted(key[mask[0] == 0][:, 0, 0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [-1, 2, True, 0.0])
def test_layer_types_that_do_not_exist_are_refused(kind: Any) -> None:
    cache = WrapperCache(CausalCache(), CausalCache())
    with pytest.raises((KvCacheError, TypeError)):
        cache.set_layer_type(kind)
    assert cache.underlying_cache is not None
