"""What the issue settles about the causal caches: visibility, copies, removals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from causal_kit import (
    add_shift,
    forward,
    numbers,
    refused,
    seen,
    started,
)
from numpy.typing import NDArray

from pykvcache.arrays import (
    CausalCache,
    ChunkedAttentionCache,
    SWACache,
    SWAMemCache,
)
from pykvcache.errors import KvCacheError, NotSupported, SharedCellsError

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


def test_a_window_is_not_pulled_over_the_very_first_token() -> None:
    cache = started(SWACache(2, add_shift), 1, 100, 4)
    forward(cache, [0, 1, 2])
    forward(cache, [3])  # token 0 is dropped
    assert cache.can_resume(0, 3) is True
    assert cache.can_resume(0, 2) is False
    refused(cache, lambda: cache.remove(0, 1, 3), NotSupported)
    cache.remove(0, 0, 1)  # nothing but what is lost already
    assert cache.can_resume(0, 3) is True


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
