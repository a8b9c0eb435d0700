"""Refusals of LlamaBatch, with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaBatch

MAX = 2**31 - 1
NO_INTEGERS = [True, np.True_, 1.0, np.float64(2), "1", b"1", None, 1j, object()]
NO_INT32 = [-1, MAX + 1, -(2**31) - 1, 2**63, -(2**63), 10**30]

Use = Callable[[LlamaBatch, Any], object]

INTEGERS: list[Use] = [
    lambda b, v: b.add(v, 0, 0),
    lambda b, v: b.add(0, v, 0),
    lambda b, v: b.add(0, 0, [v]),
    lambda b, v: b.add(0, 0, [0, 1, v]),
    lambda b, v: b.add_sequence([1, 2], v),
    lambda b, v: b.add_sequence([1, 2], 0, start=v),
    lambda b, v: (
        LlamaBatch.from_arrays([1], [0], v) if not isinstance(v, (str, bytes)) else b.add(v, 0, 0)
    ),
]


@pytest.fixture
def batch() -> LlamaBatch:
    one = LlamaBatch(2)
    one.add_sequence([1, 2, 3], 0)
    return one


def unchanged(batch: LlamaBatch) -> bool:
    return len(batch) == 3 and batch.token.tolist() == [1, 2, 3] and batch.seq_id.shape == (3, 1)


@pytest.mark.parametrize("use", INTEGERS)
@pytest.mark.parametrize("value", NO_INTEGERS)
def test_other_types_than_integers_are_type_errors(batch: LlamaBatch, use: Use, value: Any) -> None:
    with pytest.raises(TypeError):
        use(batch, value)
    assert unchanged(batch)


@pytest.mark.parametrize("use", INTEGERS)
@pytest.mark.parametrize("value", NO_INT32)
def test_misfits_are_value_errors(batch: LlamaBatch, use: Use, value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        use(batch, value)
    assert unchanged(batch)


@pytest.mark.parametrize("value", [0, 1, None, "yes", 1.0, np.int8(1), [True]])
def test_a_flag_is_true_or_false(batch: LlamaBatch, value: Any) -> None:
    with pytest.raises(TypeError, match="logits"):
        batch.add(1, 0, 0, value)
    with pytest.raises(TypeError, match="logits"):
        batch.add_sequence([1], 0, value)
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


def test_positions_that_would_pass_the_last_int32_are_refused(batch: LlamaBatch) -> None:
    with pytest.raises(ValueError, match="start"):
        batch.add_sequence([1, 2, 3], 0, start=MAX - 1)
    assert unchanged(batch)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.zeros((2, 2), np.int32), ValueError),
        (np.zeros((0, 3), np.int32), ValueError),
        (np.array(3), ValueError),
        (np.zeros(3), TypeError),
        (np.zeros(3, bool), TypeError),
        (np.zeros(3, np.complex64), TypeError),
        (np.array(["1"]), TypeError),
        (np.array([1, None]), TypeError),
        (np.array([1], "M8[s]"), TypeError),
        (np.array([MAX + 1]), ValueError),
        (np.array([-(2**40)]), ValueError),
        (np.array([2**63], np.uint64), ValueError),
        ([1, 2**31], ValueError),
        ([1, -(2**31) - 1], ValueError),
        ([1, True], TypeError),
        ([1, 2.0], TypeError),
        ([[1]], TypeError),
        ("12", TypeError),
        (b"12", TypeError),
        (None, TypeError),
        (7, TypeError),
        (float("nan"), TypeError),
    ],
)
def test_values_that_are_not_vectors_of_int32_are_refused(
    batch: LlamaBatch, tokens: Any, error: type[Exception]
) -> None:
    for use in (
        lambda: batch.add_sequence(tokens, 0),
        lambda: LlamaBatch.from_arrays(tokens, [0], 0),
        lambda: LlamaBatch.from_arrays([1], tokens, 0),
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
        ([], 0, False),
        ([0, 1], [0], False),
        ([0, 1], [0, 1, 2], False),
        ([0, 1], np.zeros((1, 2), int), False),
        ([0, 1], np.zeros((3, 1), int), False),
        ([0, 1], np.zeros((2, 0), int), False),
        ([0, 1], np.zeros((2, 1, 1), int), False),
        ([0, 1], 0, [True]),
        ([0, 1], 0, np.ones(3, bool)),
        ([0, 1], 0, np.ones((2, 1), bool)),
        ([0, 1], 0, np.array(True)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(pos: Any, seq_ids: Any, logits: Any) -> None:
    with pytest.raises(ValueError, match=r"values|shape|dimension"):
        LlamaBatch.from_arrays([1, 2], pos, seq_ids, logits)


@pytest.mark.hazard("D6", "D7")
@pytest.mark.parametrize("seq_ids", [[-1, 0], np.array([0, 2**31]), np.array([[0], [-5]])])
def test_invalid_sequence_ids_are_refused_at_once_or_by_decode(
    make_context: Any, seq_ids: Any
) -> None:
    ctx = make_context("llama")
    with pytest.raises((ValueError, IndexError)):
        ctx.decode(LlamaBatch.from_arrays([1, 2], [0, 1], seq_ids))
    assert ctx.kv_cache_seq_pos_max(0) == -1


@pytest.mark.parametrize("logits", [[0.5, 1.0], ["a", "b"], None, "ab", [None, True], 1.5])
def test_flags_must_be_booleans(logits: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        LlamaBatch.from_arrays([1, 2], [0, 1], 0, logits)


@pytest.mark.parametrize("value", [-1, 2**31, 10**20, True, 1.5, "4", None])
def test_capacity_is_a_size(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        LlamaBatch(value)


@pytest.mark.parametrize("value", [0, -1, 257, 2**40, True, 1.5, "4", None])
def test_n_seq_max_is_between_1_and_256(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        LlamaBatch(4, value)
