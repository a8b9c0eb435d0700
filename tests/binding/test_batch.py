"""LlamaBatch: arrays that grow, read-only to the outside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaBatch

COLUMNS = ["token", "pos", "n_seq_id", "seq_id", "logits"]
MAX = 2**31 - 1


def rows(batch: LlamaBatch) -> list[tuple[int, int, list[int], int]]:
    return [
        (int(t), int(p), batch.seq_id[i, : batch.n_seq_id[i]].tolist(), int(flag))
        for i, (t, p, flag) in enumerate(zip(batch.token, batch.pos, batch.logits, strict=True))
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
    tokens.flags.writeable = False
    made = LlamaBatch.from_arrays(tokens, pos, seqs, flags)
    added = LlamaBatch()
    added.add_sequence(tokens, 0, True)
    tokens.flags.writeable = True
    for array in (tokens, pos, seqs, flags):
        array[:] = 9
    expected = [(1, 0, [0], 1), (2, 1, [0], 1), (3, 2, [0], 1)]
    assert rows(made) == rows(added) == expected


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
    lambda v: np.array(v, np.uint64),
    lambda v: np.array(v[::-1], np.int8)[::-1],
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
    batch.add_sequence(way([9, 8]), one(2))
    assert rows(batch) == [(9, 0, [2], 0), (8, 1, [2], 1)]
    batch.clear()
    batch.add(one(3), one(1), way([6, 5]), np.True_)
    batch.add(one(3), one(2), one(6), False)
    assert rows(batch) == [(3, 1, [6, 5], 1), (3, 2, [6], 0)]
    for seq, flags in ((one(3), [0, 1]), (way([3, 3]), np.array([0, 7]))):
        made = LlamaBatch.from_arrays(way([1, 2]), way([0, 1]), seq, np.array(flags) != 0)
        assert rows(made) == [(1, 0, [3], 0), (2, 1, [3], 1)]
        made = LlamaBatch.from_arrays(way([1, 2]), way([0, 1]), seq, np.array(flags, np.int32))
        assert rows(made) == [(1, 0, [3], 0), (2, 1, [3], 1)]


def test_positions_past_the_limit_are_refused() -> None:
    batch = LlamaBatch()
    for tokens in ([1, 2], np.array([1, 2], np.int32), np.array([1, 2])):
        batch.add_sequence(tokens, 0, start=MAX - 2)
        with pytest.raises(ValueError, match=rf"start is {MAX - 1}"):
            batch.add_sequence(tokens, 0, start=MAX - 1)
    assert batch.pos.tolist() == [MAX - 2, MAX - 1] * 3


@pytest.fixture
def batch() -> LlamaBatch:
    one = LlamaBatch(2)
    one.add_sequence([1, 2, 3], 0)
    return one


def unchanged(batch: LlamaBatch) -> bool:
    return len(batch) == 3 and batch.token.tolist() == [1, 2, 3] and batch.seq_id.shape == (3, 1)


def test_what_is_no_flag_is_refused(batch: LlamaBatch) -> None:
    for flag in (0, None, "yes", np.int8(1), [True]):
        with pytest.raises(TypeError, match="logits"):
            batch.add(1, 0, 0, flag)
        with pytest.raises(TypeError, match="logits"):
            batch.add_sequence([1], 0, flag)
    for flags in ([0.5, 1.0], ["a", "b"], None, "ab", [None, True]):
        with pytest.raises((TypeError, ValueError)):
            LlamaBatch.from_arrays([1, 2], [0, 1], 0, flags)
    with pytest.raises(TypeError, match="seq_ids"):
        LlamaBatch.from_arrays([1, 2], [0, 1], np.zeros((2, 1)))
    assert unchanged(batch)


@pytest.mark.hazard("D8")
def test_a_token_belongs_to_at_least_one_and_at_most_256_sequences(batch: LlamaBatch) -> None:
    with pytest.raises(ValueError, match="at least one"):
        batch.add(1, 3, [])
    for many in (257, 10**6):
        with pytest.raises(ValueError, match="256"):
            batch.add(1, 3, range(many))
        with pytest.raises(ValueError, match="256"):
            LlamaBatch.from_arrays([1], [0], np.zeros((1, many), np.int32))
    assert unchanged(batch)


def test_values_that_are_not_vectors_of_int32_are_refused(batch: LlamaBatch) -> None:
    types: list[Any] = [np.zeros(3), np.zeros(3, bool), np.array(["1"]), np.array([1, None])]
    types += [[1, True], [1, 2.0], [[1]], "12", b"12", None, 7]
    ranges: list[Any] = [np.zeros((2, 2), np.int32), np.array(3), np.array([MAX + 1])]
    ranges += [np.array([2**63], np.uint64), [1, 2**31]]
    for error, wrong in ((TypeError, types), (ValueError, ranges)):
        for tokens in wrong:
            for use in (
                lambda tokens=tokens: batch.add_sequence(tokens, 0),
                lambda tokens=tokens: LlamaBatch.from_arrays(tokens, [0], 0),
                lambda tokens=tokens: LlamaBatch.from_arrays([1], tokens, 0),
            ):
                with pytest.raises(error):
                    use()
    assert unchanged(batch)


@pytest.mark.hazard("D9")
@pytest.mark.parametrize(
    ("pos", "seq_ids", "logits"),
    [
        ([0], 0, False),
        ([0, 1, 2], 0, False),
        ([0, 1], [0, 1, 2], False),
        ([0, 1], np.zeros((3, 1), int), False),
        ([0, 1], np.zeros((2, 0), int), False),
        ([0, 1], np.zeros((2, 1, 1), int), False),
        ([0, 1], 0, [True]),
        ([0, 1], 0, np.ones((2, 1), bool)),
        ([0, 1], 0, np.array(True)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(pos: Any, seq_ids: Any, logits: Any) -> None:
    with pytest.raises(ValueError, match=r"values|shape|dimension"):
        LlamaBatch.from_arrays([1, 2], pos, seq_ids, logits)
