"""What the issue settles about the causal caches: sizes, storage and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from causal_kit import (
    NINF,
    forward,
    numbers,
    refused,
    seen,
    started,
)

from pykvcache.arrays import (
    Cache,
    CacheConfig,
    CausalCache,
    ChunkedAttentionCache,
    EncoderCache,
    SWACache,
    SWAMemCache,
    WrapperCache,
)
from pykvcache.errors import KvCacheError, KvCacheFull

# Protocol, sizes and configuration ----------------------------------------------------------


@pytest.mark.parametrize(
    "cache",
    [
        CausalCache(),
        SWACache(4),
        SWAMemCache(4, 6),
        ChunkedAttentionCache(4),
        EncoderCache(),
        WrapperCache(CausalCache()),
    ],
)
def test_every_class_follows_the_protocol(cache: object) -> None:
    assert isinstance(cache, Cache)


def worst_case(cache: Any, batch: int = 1) -> tuple[int, ...]:
    cache.start_forward([0] * batch, [0] * batch, reserve=True)
    cache.set_layer(0)
    cache.put(numbers([0] * batch), numbers([0] * batch))
    shape: tuple[int, ...] = cache.get()[2].shape
    return shape


@pytest.mark.parametrize(
    ("cache", "sequences", "capacity", "batch", "cells"),
    [
        (CausalCache(), 3, 10, 4, 30),
        (ChunkedAttentionCache(4), 2, 10, 4, 20),
        (SWACache(4), 1, 100, 8, 12),
        (SWACache(4), 3, 100, 8, 3 * 5 + 8),  # room for the stop token of each sequence
        (SWAMemCache(4, 9), 3, 100, 8, 3 * 9 + 8),
        (SWAMemCache(4, 0), 1, 100, 8, 12),  # memory 0 is the window
        (SWACache(0), 2, 10, 8, 20),  # window 0 is unlimited
        (SWACache(10), 2, 10, 8, 20),  # memory of the capacity or more never slides
        (SWAMemCache(8, 3), 1, 3, 4, 3),  # ... which is looked at before memory < window
        (SWAMemCache(8, 3), 2, 100, 4, 2 * 9 + 4),  # several sequences raise the memory first
    ],
)
def test_number_of_cells(cache: Any, sequences: int, capacity: int, batch: int, cells: int) -> None:
    cache.init(np.float32, sequences, capacity, batch)
    assert worst_case(cache) == (1, cells)


def test_memory_below_the_window_is_refused() -> None:
    with pytest.raises(KvCacheError):
        SWAMemCache(8, 3).init(np.float32, 1, 100, 4)


def test_padding_rounds_the_cells_up_and_aligns_the_history() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(cache_padding=8, mask_batch_padding=4, mask_dtype=np.float16))
    cache.init(np.float32, 1, 20, 16)
    assert worst_case(cache, 3) == (4, 24)
    _, mask = forward(cache, [0, 1, 2])
    assert mask.shape == (4, 8)
    assert mask.dtype == np.float16
    expected = np.full((4, 8), NINF)
    for row in range(3):
        expected[row, : row + 1] = 0
    np.testing.assert_array_equal(mask, expected)


def test_padding_zero_is_one() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(cache_padding=0, mask_batch_padding=0))
    started(cache, capacity=5)
    assert forward(cache, [0, 1, 2])[1].shape == (3, 3)


def test_the_history_begins_at_an_aligned_cell() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(cache_padding=4))
    started(cache, sequences=2)
    forward(cache, list(range(6)), [0] * 6)
    key, mask = forward(cache, [0], [1], base=500)
    assert len(key) == 4  # cells 4 to 7, of which the sequence has cell 6
    np.testing.assert_array_equal(mask, [[NINF, NINF, 0, NINF]])
    assert key[2] == 500


def test_the_config_is_set_once_and_before_init() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig())
    with pytest.raises(KvCacheError):
        cache.set_config(CacheConfig(cache_padding=2))
    other = started(CausalCache())
    with pytest.raises(KvCacheError):
        other.set_config(CacheConfig())


@pytest.mark.parametrize(
    "arguments", [(0, 4, 4), (1, 0, 4), (1, 4, 0), (-1, 4, 4), (True, 4, 4), (1, 4.0, 4)]
)
def test_init_needs_positive_integers(arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        CausalCache().init(np.float32, *arguments)


@pytest.mark.parametrize("window", [-1, 1.5, True])
def test_a_window_is_an_integer_of_zero_or_more(window: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        SWACache(window).init(np.float32, 1, 16, 16)


def test_calls_before_init_and_after_close_are_refused() -> None:
    closed = started(CausalCache())
    closed.close()
    for cache in (CausalCache(), closed):
        calls: dict[str, tuple[Any, ...]] = {
            "start_forward": ([0], [0]),
            "put": (numbers([1]), numbers([1])),
            "get": (),
            "copy_prefix": (0, 1, 1),
            "remove": (0, 0),
            "can_resume": (0, 0),
        }
        for name, arguments in calls.items():
            with pytest.raises(KvCacheError):
                getattr(cache, name)(*arguments)


# Storage ----------------------------------------------------------------------------------


def test_shapes_and_permuted_values() -> None:
    rng = np.random.default_rng(0)
    key = rng.standard_normal((3, 2, 5)).astype(np.float32)
    value = rng.standard_normal((3, 2, 7)).astype(np.float32)
    for permuted in (False, True):
        cache = CausalCache()
        cache.set_config(CacheConfig(permuted_v=permuted))
        started(cache)
        cache.start_forward([0, 1, 2], [0, 0, 0])
        cache.set_layer(3)
        cache.put(key, value)
        got_key, got_value, _ = cache.get()
        np.testing.assert_array_equal(got_key, key)
        expected = value.transpose(1, 2, 0) if permuted else value
        np.testing.assert_array_equal(got_value, expected)


def test_get_returns_views_and_nothing_is_shared_with_the_input() -> None:
    cache = started(CausalCache())
    cache.start_forward([0, 1], [0, 0])
    given = numbers([1, 2])
    cache.put(given, given)
    first, second = cache.get()[0], cache.get()[0]
    assert np.shares_memory(first, second)
    given[:] = 9
    np.testing.assert_array_equal(cache.get()[0], numbers([1, 2]))


def test_the_dtype_is_that_of_init() -> None:
    cache = CausalCache()
    cache.init(np.float16, 1, 4, 4)
    assert forward(cache, [0])[0] == [100]
    assert cache.get()[0].dtype == cache.get()[1].dtype == np.float16


def test_wrong_puts_are_refused() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1])
    good = numbers([1, 2])
    for key, value in (
        (numbers([1]), numbers([1])),
        (numbers([1, 2, 3]), numbers([1, 2, 3])),
        (good, numbers([1])),
        (good[:, 0], good),
        (numbers([1, 2], 3), good),
        (good, numbers([1, 2], 3)),
        (np.zeros((2, 2, 1), np.float32), np.zeros((2, 2, 1), np.float32)),
        (good.astype(complex), good),
        (good, good.astype(object)),
    ):
        refused(cache, lambda key=key, value=value: cache.put(key, value))


def test_a_layer_without_data_and_negative_layers_are_refused() -> None:
    cache = started(CausalCache())
    forward(cache, [0])
    with pytest.raises(KvCacheError):
        cache.set_layer(-1)
    cache.set_layer(1)
    with pytest.raises(KvCacheError):
        cache.get()


def test_reserve_stores_nothing_and_leaves_the_metadata() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1])
    cache.start_forward([0, 1], [0, 0], reserve=True)
    cache.put(numbers([7, 8]), numbers([7, 8]))
    assert seen(cache, [2]) == [{100, 101, 102}]


def test_a_full_cache_can_still_be_reserved() -> None:
    cache = started(CausalCache(), capacity=3)
    forward(cache, [0, 1, 2])
    assert worst_case(cache, 3) == (3, 3)


# Batches ------------------------------------------------------------------------------------


def test_sequence_ids_may_exceed_max_sequences() -> None:
    cache = started(CausalCache(), sequences=1, capacity=8)
    assert seen(cache, [0, 0, 0], [5, 1000, 2**31 - 1]) == [{100}, {100}, {100}]


@pytest.mark.parametrize(
    ("positions", "sequences"),
    [
        ([], []),
        ([0] * 5, [0] * 5),
        ([0, 1], [0]),
        ([-1], [0]),
        ([0], [-1]),
        ([2**31], [0]),
        ([0.0], [0]),
        ([True], [0]),
        ([0], [None]),
    ],
)
def test_wrong_batches_are_refused(positions: list[Any], sequences: list[Any]) -> None:
    cache = started(CausalCache(), batch=4)
    forward(cache, [0, 1])
    for reserve in (False, True):
        refused(
            cache,
            lambda reserve=reserve: cache.start_forward(positions, sequences, reserve),
            KvCacheError,
            TypeError,
        )
    assert seen(cache, [2]) == [{100, 101, 102}]


def test_blocks_are_contiguous_and_the_first_that_fits() -> None:
    cache = started(CausalCache(), sequences=2, capacity=5)
    forward(cache, [0, 1, 2], [0, 0, 0])
    forward(cache, [0, 1, 2, 3], [1, 1, 1, 1], base=200)
    cache.remove(0, 1)  # cells 1 and 2 are free, and 7 to 9
    key, mask = forward(cache, [4, 5, 6], [1, 1, 1], base=200)
    assert key == [200, 201, 202, 203, 204, 205, 206]  # went behind, not into the hole
    key, _ = forward(cache, [1, 2], [0, 0])
    assert key == [100, 101, 102]
    assert mask.shape == (3, 7)


def test_defragmentation_keeps_position_and_data_together() -> None:
    # A hole of two cells takes the last two, in their order, as the seed moves the data.
    cache = started(CausalCache(), capacity=8)
    forward(cache, list(range(8)), [0, 0, 1, 1, 0, 0, 0, 0])
    cache.remove(1, 0)
    cache.remove(0, 7)
    key, mask = forward(cache, [7, 8, 9])
    assert key == [100, 101, 105, 106, 104, 107, 108, 109]
    np.testing.assert_array_equal(mask[0] == 0, [True] * 6 + [False] * 2)
    np.testing.assert_array_equal(mask[2] == 0, [True] * 8)


def test_a_full_cache_is_an_error_that_changes_nothing() -> None:
    cache = started(CausalCache(), capacity=4)
    forward(cache, [0, 1, 2])
    refused(cache, lambda: cache.start_forward([3, 4], [0, 0]), KvCacheFull)
    assert seen(cache, [3]) == [{100, 101, 102, 103}]


def test_a_refused_batch_evicts_and_moves_nothing() -> None:
    cache = SWACache(2)
    cache.init(np.float32, 1, 100, 4)  # 6 cells
    forward(cache, [0, 1, 2, 3])
    forward(cache, [0, 1], [1, 1])
    # Position 5 lets sequence 0 drop its token 2, and still only three cells are free.
    before = [cache.can_resume(seq, pos) for seq in (0, 1) for pos in range(9)]
    assert before[4] is True
    refused(cache, lambda: cache.start_forward([5, 0, 0, 0], [0, 5, 6, 7]), KvCacheFull)
    assert [cache.can_resume(seq, pos) for seq in (0, 1) for pos in range(9)] == before
    with pytest.raises(KvCacheFull) as caught:
        cache.start_forward([5, 0, 0, 0], [0, 5, 6, 7])
    assert (caught.value.capacity, caught.value.batch) == (6, 4)
    assert seen(cache, [4]) == [{102, 103, 104}]
