"""What the issue settles about the causal caches, sentence by sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

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
from pykvcache.errors import KvCacheError, KvCacheFull, NotSupported, SharedCellsError

NINF = -np.inf


def add_shift(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(key + shift[:, None, None])


def started(cache: Any, sequences: int = 1, capacity: int = 16, batch: int = 16) -> Any:
    cache.init(np.float32, sequences, capacity, batch)
    return cache


def numbers(values: list[float], dim: int = 1) -> NDArray[np.float32]:
    return np.repeat(np.array(values, np.float32), dim).reshape(len(values), 1, dim)


def forward(
    cache: Any, positions: list[int], sequences: list[int] | None = None, base: int = 100
) -> tuple[list[float], NDArray[Any]]:
    """Store ``base + position`` as V, its negative as K; returns V of the history and the mask."""
    sequences = [0] * len(positions) if sequences is None else sequences
    cache.start_forward(positions, sequences)
    cache.set_layer(0)
    stored = numbers([base + pos for pos in positions])
    cache.put(-stored, stored)
    _, value, mask = cache.get()
    return value[:, 0, 0].tolist(), mask


def seen(cache: Any, positions: list[int], sequences: list[int] | None = None) -> list[set[float]]:
    """Which stored numbers each row of a new batch sees."""
    key, mask = forward(cache, positions, sequences)
    return [{k for k, m in zip(key, row, strict=True) if m == 0} for row in mask]


def snapshot(cache: Any) -> list[Any]:
    return [None if array is None else np.array(array) for array in cache.get()]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def refused(cache: Any, call: Callable[..., object], *errors: type[BaseException]) -> None:
    """`call` must raise one of `errors` and change nothing that can be seen."""
    before = snapshot(cache)
    with pytest.raises(errors or KvCacheError):
        call()
    assert_same(before, snapshot(cache))


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


# Visibility ---------------------------------------------------------------------------------


def test_a_window_of_w_sees_w_plus_one_tokens() -> None:
    cache = started(SWACache(3), capacity=100)
    assert seen(cache, list(range(8)))[-1] == {104, 105, 106, 107}


def test_chunks_see_no_earlier_chunk() -> None:
    cache = started(ChunkedAttentionCache(3))
    rows = seen(cache, list(range(8)))
    for pos, row in enumerate(rows):
        assert row == {100.0 + p for p in range(pos - pos % 3, pos + 1)}


def test_sequences_do_not_see_each_other() -> None:
    cache = started(CausalCache(), sequences=2)
    rows = seen(cache, [0, 0, 1, 1, 2], [0, 1, 0, 1, 0])
    assert rows == [{100}, {100}, {100, 101}, {100, 101}, {100, 101, 102}]


def test_except_rows_see_ahead_until_the_next_batch() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1, 2])
    cache.set_causal(except_=(1,))
    np.testing.assert_array_equal(
        cache.get()[2] == 0, [[True, False, False], [True, True, True], [True, True, True]]
    )
    cache.set_causal()
    np.testing.assert_array_equal(cache.get()[2] == 0, np.tri(3, dtype=bool))
    cache.set_causal(except_=[0, 2])
    assert (cache.get()[2][0] == 0).all()
    rows = seen(cache, [3, 4])
    assert rows[0] == {100, 101, 102, 103}


@pytest.mark.parametrize("row", [-1, 3, 100])
def test_except_rows_outside_the_batch_are_refused(row: int) -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1, 2])
    refused(cache, lambda: cache.set_causal(except_=(0, row)), KvCacheError)
    refused(cache, lambda: cache.set_causal(except_=(True,)), TypeError)


def test_an_except_row_keeps_its_window() -> None:
    cache = started(SWACache(1), capacity=100)
    forward(cache, [0, 1, 2, 3])
    cache.set_causal(except_=(1,))
    np.testing.assert_array_equal(cache.get()[2][1] == 0, [True, True, True, True])
    cache.set_causal(except_=(2,))
    np.testing.assert_array_equal(cache.get()[2][2] == 0, [False, True, True, True])


def test_sequences_outside_the_batch_are_evicted_too() -> None:
    cache = SWACache(2)
    cache.init(np.float32, 1, 100, 6)  # 8 cells
    forward(cache, [0, 1, 2, 3, 4, 5])
    # Sequence 0 needs two tokens for its next one; the other four cells come free.
    forward(cache, [0, 1, 2, 3, 4, 5], [1] * 6, base=200)
    assert cache.can_resume(0, 6) is True
    assert cache.can_resume(0, 5) is False


# Copy, resume, remove -------------------------------------------------------------------------


def test_copies_share_and_replace() -> None:
    cache = started(CausalCache(), sequences=2, capacity=3)
    forward(cache, [0, 1, 2])
    forward(cache, [0, 1], [1, 1], base=200)
    cache.copy_prefix(0, 1, 2)  # shares cells: the two of sequence 1 come free
    rows = seen(cache, [2, 3, 4], [1, 1, 1])
    assert rows[0] == {100, 101, 102}
    assert rows[2] == {100, 101, 102, 103, 104}


def test_copying_a_sequence_to_itself_keeps_the_prefix() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1, 2, 3])
    cache.copy_prefix(0, 0, 2)
    assert seen(cache, [2]) == [{100, 101, 102}]


def test_copying_an_unknown_sequence_empties_the_destination() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1])
    cache.copy_prefix(9, 0, 5)
    assert seen(cache, [2]) == [{102}]


@pytest.mark.parametrize("arguments", [(-1, 0, 1), (0, -1, 1), (0, 1, -1), (0, True, 1)])
def test_wrong_copies_are_refused(arguments: tuple[Any, Any, Any]) -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1])
    refused(cache, lambda: cache.copy_prefix(*arguments), KvCacheError, TypeError)


def test_resuming() -> None:
    unlimited = started(CausalCache())
    assert unlimited.can_resume(5, 3) is True
    cache = started(SWAMemCache(2, 4), 1, 100, 4)
    assert cache.can_resume(0, 0) is False
    for start in range(0, 12, 4):
        forward(cache, list(range(start, start + 4)))
    # Positions 4 to 11 are stored: 8 - 4 = 4 is the oldest that the last batch kept.
    assert [cache.can_resume(0, pos) for pos in range(14)] == [6 <= pos <= 12 for pos in range(14)]
    assert cache.can_resume(1, 0) is False


def test_removing_the_tail_needs_no_shift() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1, 2, 3])
    cache.remove(0, 2)
    assert seen(cache, [2]) == [{100, 101, 102}]
    cache.remove(0, 0, None)
    assert seen(cache, [0]) == [{100}]
    cache.remove(77, 0)


def test_removing_the_middle_shifts_what_is_behind() -> None:
    cache = started(CausalCache(add_shift))
    forward(cache, [0, 1, 2, 3, 4])
    cache.remove(0, 1, 3)
    # 103 and 104 moved by -2 positions, and the shift function added -2 to their keys.
    cache.start_forward([3], [0])
    cache.put(numbers([103]), numbers([103]))
    key, value, mask = cache.get()
    see = mask[0] == 0
    assert sorted(zip(key[see][:, 0, 0], value[see][:, 0, 0], strict=True)) == [
        (-106, 104),
        (-105, 103),
        (-100, 100),
        (103, 103),
    ]


def test_shifting_goes_in_chunks_of_max_batch() -> None:
    calls: list[tuple[int, list[int]]] = []

    def record(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
        calls.append((layer, shift.tolist()))
        assert key.shape == (len(shift), 1, 1)
        return key

    cache = started(CausalCache(record), sequences=2, capacity=20, batch=4)
    for start in range(0, 12, 4):
        positions = list(range(start, start + 4))
        forward(cache, positions, [0, 0, 1, 0])
    cache.remove(0, 1, 4)
    # Cells 0 to 11 in chunks of 4; the first has nothing to move, cell 6 and 10 are not ours.
    assert calls == [(0, [-3, -3, 0, -3]), (0, [-3, -3, 0, -3])]


def test_a_middle_removal_without_shift_function() -> None:
    cache = started(CausalCache())
    forward(cache, [0, 1, 2, 3])
    refused(cache, lambda: cache.remove(0, 1, 3), NotSupported)
    assert cache.can_resume(0, 4)
    cache.remove(0, 2, 4)  # nothing stands behind
    cache.remove(0, 50, 60)
    assert seen(cache, [2]) == [{100, 101, 102}]


def test_shared_cells_are_not_shifted() -> None:
    for shift_fn in (add_shift, None):
        cache = started(CausalCache(shift_fn), sequences=2)
        forward(cache, [0, 1, 2, 3])
        cache.copy_prefix(0, 1, 4)
        refused(cache, lambda cache=cache: cache.remove(0, 1, 2), SharedCellsError)
        assert seen(cache, [4, 4], [0, 1]) == [{100, 101, 102, 103, 104}] * 2
    assert not issubclass(SharedCellsError, NotSupported)
    assert issubclass(SharedCellsError, KvCacheError)


def test_shared_cells_before_the_removal_do_no_harm() -> None:
    cache = started(CausalCache(add_shift), sequences=2)
    forward(cache, [0, 1, 2, 3])
    cache.copy_prefix(0, 1, 2)
    cache.remove(0, 1, 3)
    assert seen(cache, [2], [1]) == [{100, 101, 102}]
    assert seen(cache, [2], [0]) == [{100, 103, 102}]


def test_a_window_is_not_pulled_over_dropped_tokens() -> None:
    cache = started(SWAMemCache(2, 4, add_shift), 1, 100, 4)
    for start in range(0, 12, 4):
        forward(cache, list(range(start, start + 4)))
    # Positions 4 to 11 are stored; without 4 to 10 the next window begins at 3, which is lost.
    refused(cache, lambda: cache.remove(0, 4, 11), NotSupported)
    assert cache.can_resume(0, 12) is True
    cache.remove(0, 6, 8)
    assert cache.can_resume(0, 10) is True
    cache.remove(0, 0)
    assert cache.can_resume(0, 10) is False


@pytest.mark.parametrize(
    "arguments", [(0, 3, 2), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 1.0, 2), (0, 0, True)]
)
def test_wrong_removals_are_refused(arguments: tuple[Any, Any, Any]) -> None:
    cache = started(CausalCache(add_shift))
    forward(cache, [0, 1, 2, 3])
    refused(cache, lambda: cache.remove(*arguments), KvCacheError, TypeError)


def test_a_raising_shift_function() -> None:
    fail = True

    def shift(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
        if fail and layer == 1:
            raise ZeroDivisionError("on purpose")
        return add_shift(layer, key, shift)

    cache = started(CausalCache(shift), sequences=2, batch=2)
    for start in range(0, 8, 2):
        for seq in (0, 1):
            cache.start_forward([start, start + 1], [seq, seq])
            for layer in (0, 1):
                cache.set_layer(layer)
                stored = numbers([start + 100 * seq, start + 1 + 100 * seq])
                cache.put(stored, stored)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        cache.remove(0, 1, 3)
    for layer in (0, 1):
        cache.set_layer(layer)
    cache.start_forward([8], [1])
    for layer in (0, 1):
        cache.set_layer(layer)
        cache.put(numbers([108]), numbers([108]))
        key, value, mask = cache.get()
        see = mask[0] == 0
        assert sorted(key[see][:, 0, 0]) == sorted(value[see][:, 0, 0]) == list(range(100, 109))
    fail = False
    cache.remove(0, 0)
    cache.set_layer(0)
    assert seen(cache, [0, 1]) == [{100}, {100, 101}]


@pytest.mark.parametrize("wrong", ["shape", "dtype", "none"])
def test_a_shift_function_that_returns_something_else(wrong: str) -> None:
    def shift(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> Any:
        return {"shape": key[:1], "dtype": key.astype(complex), "none": None}[wrong]

    cache = started(CausalCache(shift), sequences=2)
    forward(cache, [0, 1, 2, 3])
    with pytest.raises((KvCacheError, TypeError)):
        cache.remove(0, 1, 2)
    cache.remove(0, 0)
    assert seen(cache, [0]) == [{100}]


def test_attention_through_the_cache_equals_attention_over_the_history() -> None:
    rng = np.random.default_rng(3)
    window, n, dim = 4, 30, 8
    q, k, v = (rng.standard_normal((n, dim)).astype(np.float32) for _ in range(3))
    cache = started(SWACache(window), 1, 200, 6)
    rows, start = [], 0
    for count in (6, 1, 5, 1, 1, 6, 6, 4):
        cache.start_forward(list(range(start, start + count)), [0] * count)
        part = slice(start, start + count)
        cache.put(k[part, None], v[part, None])
        key, value, mask = cache.get()
        scores = q[part] @ key[:, 0].T + mask
        weights = np.exp(scores - scores.max(1, keepdims=True))
        rows.append(weights / weights.sum(1, keepdims=True) @ value[:, 0])
        start += count
    places = np.arange(n)
    visible = (places <= places[:, None]) & (places >= places[:, None] - window)
    scores = np.where(visible, q @ k.T, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-5)
