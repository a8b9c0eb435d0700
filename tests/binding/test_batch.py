"""LlamaBatch: arrays that grow, read-only to the outside."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaBatch

COLUMNS = ["token", "pos", "n_seq_id", "seq_id", "logits"]
MAX = 2**31 - 1


class NoElements(np.ndarray):
    """An array that does not let itself be read one by one."""

    def __iter__(self) -> Any:
        raise AssertionError("a Python loop over the elements")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, np.integer)):
            raise AssertionError("one element was read from Python")
        return super().__getitem__(key)

    def tolist(self) -> Any:
        raise AssertionError("the array was turned into a list")


def rows(batch: LlamaBatch) -> list[tuple[int, int, list[int], int]]:
    return [
        (int(t), int(p), batch.seq_id[i, : batch.n_seq_id[i]].tolist(), int(flag))
        for i, (t, p, flag) in enumerate(zip(batch.token, batch.pos, batch.logits, strict=True))
    ]


# Adding -------------------------------------------------------------------------------


def test_a_new_batch_of_any_capacity_is_empty() -> None:
    for batch in (LlamaBatch(), LlamaBatch(0), LlamaBatch(7, 3), LlamaBatch(capacity=1)):
        assert len(batch) == 0
        assert not rows(batch)
        assert repr(batch) == "<LlamaBatch of 0 tokens>"


def test_add_appends_one_token() -> None:
    batch = LlamaBatch(1)
    batch.add(5, 0, 3)
    batch.add(np.int64(6), np.uint8(1), [0, np.int32(2), 7], True)
    batch.add(7, 2, (1,), logits=np.bool_(True))
    batch.add(8, 0, np.array([4, 5]))
    assert rows(batch) == [(5, 0, [3], 0), (6, 1, [0, 2, 7], 1), (7, 2, [1], 1), (8, 0, [4, 5], 0)]
    assert len(batch) == 4


def test_add_sequence_counts_positions_and_asks_for_the_last_logits() -> None:
    batch = LlamaBatch()
    batch.add_sequence([9, 8, 7], 2)
    batch.add_sequence(np.array([6, 5]), 0, True, start=40)
    batch.add_sequence([], 1)
    assert rows(batch) == [
        (9, 0, [2], 0),
        (8, 1, [2], 0),
        (7, 2, [2], 1),
        (6, 40, [0], 1),
        (5, 41, [0], 1),
    ]


@pytest.mark.parametrize(
    ("seq_ids", "logits", "expected"),
    [
        (3, False, [([3], 0), ([3], 0)]),
        (np.int16(3), True, [([3], 1), ([3], 1)]),
        ([0, 1], [True, False], [([0], 1), ([1], 0)]),
        (np.array([[0, 1], [2, 3]]), np.array([0, 9]), [([0, 1], 0), ([2, 3], 1)]),
        (np.array([[5], [6]], np.uint64), np.True_, [([5], 1), ([6], 1)]),
    ],
)
def test_from_arrays_takes_every_shape(seq_ids: Any, logits: Any, expected: Any) -> None:
    batch = LlamaBatch.from_arrays([1, 2], np.array([0, 1], np.uint16), seq_ids, logits)
    assert rows(batch) == [(i + 1, i, *row) for i, row in enumerate(expected)]
    batch.add(3, 2, [0, 1, 2])
    assert rows(batch)[:2] == [(i + 1, i, *row) for i, row in enumerate(expected)]
    assert rows(batch)[2] == (3, 2, [0, 1, 2], 0)


def test_growth_keeps_what_was_added() -> None:
    batch, expected = LlamaBatch(1), []
    rng = np.random.default_rng(3)
    for i in range(300):
        ids = rng.permutation(20)[: rng.integers(1, 6)].tolist()
        batch.add(i, 2 * i, ids, bool(i % 3))
        expected.append((i, 2 * i, ids, int(bool(i % 3))))
        if i % 50 == 0:
            batch.add_sequence([i] * 70, 1, start=i)
            expected += [(i, i + k, [1], int(k == 69)) for k in range(70)]
    assert rows(batch) == expected


def test_clear_empties_and_the_batch_can_be_filled_again() -> None:
    batch = LlamaBatch(2)
    for _ in range(3):
        batch.add_sequence([1, 2, 3], 0, True)
        assert len(batch) == 3
        batch.clear()
        assert len(batch) == 0
        assert batch.token.shape == (0,)
        batch.add(4, 0, [1, 2])
        assert rows(batch) == [(4, 0, [1, 2], 0)]
        batch.clear()


def test_4096_tokens_are_added_without_a_python_loop() -> None:
    tokens = np.arange(4096, dtype=np.int32).view(NoElements)
    for dtype in (np.int32, np.int64, np.uint16):
        batch = LlamaBatch()
        batch.add_sequence(tokens.astype(dtype), 0)
        assert (batch.token == np.arange(4096)).all()
    pos, seqs = tokens.copy(), np.zeros((4096, 2), np.int64).view(NoElements)
    batch = LlamaBatch.from_arrays(tokens, pos, seqs, np.ones(4096, bool).view(NoElements))
    assert len(batch) == 4096
    assert (batch.pos == np.arange(4096)).all()
    assert batch.seq_id.shape == (4096, 2)


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of Python that `work` executes, comprehensions included."""
    lines = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_work_in_python_does_not_grow_with_the_tokens(dtype: Any) -> None:
    def add(n: int) -> int:
        tokens, batch = np.zeros(n, dtype), LlamaBatch(n)
        seqs, flags = np.zeros((n, 2), dtype), np.zeros(n, bool)
        made = lines_run(lambda: LlamaBatch.from_arrays(tokens, tokens, seqs, flags))
        return made + lines_run(lambda: batch.add_sequence(tokens, 0))

    assert 10 < add(16) == add(4096) < 200


# Arrays -------------------------------------------------------------------------------


def test_the_views_have_the_types_of_llama_batch_and_cannot_be_written() -> None:
    batch = LlamaBatch()
    batch.add_sequence([1, 2, 3], 0)
    assert [getattr(batch, n).dtype for n in COLUMNS] == [np.int32] * 4 + [np.int8]
    for name in COLUMNS:
        view = getattr(batch, name)
        assert len(view) == 3
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(AttributeError):
            setattr(batch, name, view)


def test_the_batch_copies_its_arguments() -> None:
    tokens, pos = np.array([1, 2, 3], np.int32), np.arange(3, dtype=np.int32)
    seqs, flags = np.zeros((3, 1), np.int32), np.ones(3, np.int8)
    made = LlamaBatch.from_arrays(tokens, pos, seqs, flags)
    added = LlamaBatch()
    added.add_sequence(tokens, 0, True)
    for array in (tokens, pos, seqs, flags):
        array[:] = 9
    expected = [(1, 0, [0], 1), (2, 1, [0], 1), (3, 2, [0], 1)]
    assert rows(made) == rows(added) == expected


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ">i4", "<i8", np.uint64, np.int16])
def test_any_integer_dtype_and_stride_is_taken(dtype: Any) -> None:
    wide = np.arange(24).astype(dtype)
    for tokens in (wide[::3], wide[::-1], wide.reshape(4, 6)[:, 2], np.broadcast_to(wide[5], 8)):
        batch = LlamaBatch()
        batch.add_sequence(tokens, 0)
        assert batch.token.tolist() == tokens.tolist()
        seqs = np.lib.stride_tricks.as_strided(tokens, (len(tokens), 2), (tokens.strides[0], 0))
        made = LlamaBatch.from_arrays(tokens, tokens, seqs)
        assert made.pos.tolist() == tokens.tolist()
        assert made.seq_id[:, 1].tolist() == tokens.tolist()


def test_a_read_only_array_is_taken() -> None:
    tokens = np.arange(5, dtype=np.int32)
    tokens.flags.writeable = False
    batch = LlamaBatch.from_arrays(tokens, tokens, tokens)
    batch.add_sequence(tokens, 0)
    assert len(batch) == 10


def test_a_batch_can_be_pickled_and_copied_deeply() -> None:
    batch = LlamaBatch()
    batch.add_sequence([1, 2, 3], 4)
    for other in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert rows(other) == rows(batch)
        other.add(4, 3, 4)
        assert len(batch) == 3


def test_views_outlive_growth_and_the_batch() -> None:
    batch = LlamaBatch(2)
    batch.add(7, 3, [1, 2], True)
    views = [getattr(batch, name) for name in COLUMNS]
    before = [view.tolist() for view in views]
    batch.add_sequence(np.arange(5000), 0)
    batch.add(1, 0, range(9))
    del batch
    assert [view.tolist() for view in views] == before == [[7], [3], [2], [[1, 2]], [1]]
    for view in views:
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_a_copy_is_an_independent_batch() -> None:
    batch = LlamaBatch(3, 2)
    batch.note = "of a subclass or a caller"  # type: ignore[attr-defined]
    batch.add(5, 0, [1, 0, 2])
    batch.add(6, 1, 3, True)
    for other in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert rows(other) == rows(batch)
        assert other.note == batch.note  # type: ignore[attr-defined]
        other.clear()
        other.add(9, 9, 9)
        assert rows(batch) == [(5, 0, [1, 0, 2], 0), (6, 1, [3], 1)]
    assert rows(copy.copy(LlamaBatch(0))) == []


def test_damaged_rows_are_refused() -> None:
    batch = LlamaBatch()
    batch.add_sequence([1, 2, 3], 0)
    make, (n, width, data) = batch.native.__reduce__()  # type: ignore[misc]
    assert make(n, width, data).token.tolist() == [1, 2, 3]
    for wrong in ((n + 1, width, data), (n, width + 1, data), (n, width, data[:-1]), (0, 1, b"x")):
        with pytest.raises(ValueError, match="not the rows"):
            make(*wrong)
    for n, width in ((-1, 1), (2**31, 1), (1, 0), (1, 257)):
        with pytest.raises(ValueError, match="shape"):
            make(n, width, data)


# Plain values, which the compiled layer reads, and all others -------------------------


class Number:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


WAYS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda v: np.array(v, np.int32),
    lambda v: np.array(v, np.int64),
    lambda v: np.array(v, ">i4"),
    lambda v: np.repeat(np.array(v, np.int32), 2)[::2],
    lambda v: np.frombuffer(b"_" + np.array(v, np.int32).tobytes(), np.int32, len(v), 1),
    lambda v: [np.int32(x) for x in v],
    lambda v: [Number(x) for x in v],
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("one", [int, np.int32, np.int64, np.uint8, Number])
def test_containers_of_equal_values_make_equal_batches(way: Any, one: Any) -> None:
    batch, expected = LlamaBatch(1), []
    for values in ([4], [9, 8, 7], []):
        for flag in (False, True, np.True_):
            batch.add_sequence(way(values), one(2), flag, start=one(5))
            last = len(values) - 1
            expected += [(v, 5 + i, [2], int(flag or i == last)) for i, v in enumerate(values)]
    assert rows(batch) == expected
    batch.clear()
    batch.add(one(3), one(1), way([6, 5]), np.True_)
    batch.add(one(3), one(2), one(6), False)
    assert rows(batch) == [(3, 1, [6, 5], 1), (3, 2, [6], 0)]
    for seq, flags in ((one(3), [0, 1]), (way([3, 3]), np.array([0, 7]))):
        made = LlamaBatch.from_arrays(way([1, 2]), way([0, 1]), seq, np.array(flags) != 0)
        assert rows(made) == [(1, 0, [3], 0), (2, 1, [3], 1)]
        made = LlamaBatch.from_arrays(way([1, 2]), way([0, 1]), seq, np.array(flags, np.int32))
        assert rows(made) == [(1, 0, [3], 0), (2, 1, [3], 1)]


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, 2**31, -1, 2**70])
def test_a_refused_value_leaves_the_batch_unchanged(wrong: Any) -> None:
    batch = LlamaBatch()
    batch.add_sequence([1, 2], 0)
    before = rows(batch)
    calls: list[Callable[[], object]] = [
        lambda: batch.add(wrong, 0, 0),
        lambda: batch.add(1, wrong, 0),
        lambda: batch.add(1, 0, wrong),
        lambda: batch.add(1, 0, [0, wrong]),
        lambda: batch.add_sequence([1], wrong),
        lambda: batch.add_sequence([1], 0, start=wrong),
        lambda: LlamaBatch.from_arrays([1], [0], wrong) if wrong != -1 else batch.add(1, 0, -1),
    ]
    if wrong != -1:  # decode() checks the vocabulary
        calls.append(lambda: batch.add_sequence([1, wrong], 0))
    for call in calls:
        with pytest.raises((TypeError, ValueError)):
            call()
    assert rows(batch) == before


def test_positions_past_the_limit_are_refused() -> None:
    batch = LlamaBatch()
    for tokens in ([1, 2], np.array([1, 2], np.int32), np.array([1, 2])):
        batch.add_sequence(tokens, 0, start=MAX - 2)
        with pytest.raises(ValueError, match=rf"start is {MAX - 1}"):
            batch.add_sequence(tokens, 0, start=MAX - 1)
    assert batch.pos.tolist() == [MAX - 2, MAX - 1] * 3
