"""Batches, failures and aborts: the same on every memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case, apart
from pykvcache import KvCacheError, LlamaBatch, LlamaContext
from pykvcache.errors import (
    DecodeAborted,
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    PositionError,
    SequenceIdError,
    UnsupportedOperation,
)

MakeBench = Callable[..., Bench]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
Rows = tuple[list[int], list[int], list[list[int]]]

# Sequence 0 holds 0..19, sequence 1 holds 0..11, 2 and 3 nothing.
REFUSED: dict[str, Rows] = {
    "position held already": ([7], [19], [[0]]),
    "gap after what is held": ([7], [21], [[0]]),
    "start over": ([7], [0], [[0]]),
    "same position twice": ([7, 8], [20, 20], [[0], [0]]),
    "gap inside": ([7, 8], [20, 22], [[0], [0]]),
    "backwards": ([7, 8], [21, 20], [[0], [0]]),
    "gap inside a new sequence": ([7, 8, 9], [0, 1, 3], [[2], [2], [2]]),
    "same position twice in a new sequence": ([7, 8], [0, 0], [[2], [2]]),
    "good, then bad": ([7, 8, 9], [20, 12, 14], [[0], [1], [1]]),
    "sequence twice": ([7], [20], [[0, 0]]),
    "token past the vocabulary": ([10**6], [20], [[0]]),
    "last position of int32": ([7], [2**31 - 1], [[2]]),
}


@pytest.mark.hazard("D4", "D5", "D6", "D11", "D13", "D14", "D15")
@every_case
def test_bad_batches_are_refused_before_the_call(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.feed(1, 12)
    for name, (tokens, pos, seqs) in REFUSED.items():
        with pytest.raises((InvalidBatch, PositionError)) as caught:
            b.ctx.decode(LlamaBatch.from_arrays(tokens, pos, np.array(seqs)))
        assert isinstance(caught.value, ValueError), name
        b.positions()
        assert b.ctx.logits() is not None, "nothing was decoded, so the last logits stay"
    nothing: tuple[Any, ...] = (LlamaBatch(), [], np.empty(0, np.int32))
    for empty in nothing:
        with pytest.raises(InvalidBatch):
            b.ctx.decode(empty)
    for bad in ([-1], [case.n_vocab], [7, -(2**31)]):
        with pytest.raises(InvalidBatch):
            b.ctx.decode(bad)
    with pytest.raises(SequenceIdError):
        b.ctx.decode(LlamaBatch.from_arrays([7], [0], 4))
    b.check()


@pytest.mark.hazard("D20")
@every_case
def test_tokens_of_diverged_sequences_are_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.feed(1, 20)
    with pytest.raises((InvalidBatch, UnsupportedOperation)):
        b.ctx.decode(LlamaBatch.from_arrays([7], [20], np.array([[0, 1]])))
    # Diverging inside the batch counts too.
    batch = LlamaBatch()
    for token, pos, seqs in [(7, 0, [2]), (8, 0, [3]), (9, 1, [2, 3])]:
        batch.add(token, pos, seqs)
    with pytest.raises((InvalidBatch, UnsupportedOperation)):
        b.ctx.decode(batch)
    b.check()


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.info.can_couple or (not c.unified and c.info.can_remove_partial)],
    ids=str,
)
def test_coupled_tokens_count_in_each_or_are_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    tokens = b.prompt(5)
    batch = LlamaBatch.from_arrays(tokens, np.arange(20, 25), np.tile([1, 0], (5, 1)))
    if case.unified:
        b.ctx.decode(batch)
        for seq in (0, 1):
            b.held[seq] += tokens.tolist()
    else:
        with pytest.raises(UnsupportedOperation, match="kv_unified"):
            b.ctx.decode(batch)
    b.check()
    # Equal tokens at equal positions in separate cells are not the same sequence.
    more = b.prompt(3)
    for seq in (0, 1):
        b.ctx.decode(more, seq_id=seq)
        b.held[seq] += more.tolist()
    end = b.ctx.kv_cache_seq_pos_max(0) + 1
    with pytest.raises((InvalidBatch, UnsupportedOperation)):
        b.ctx.decode(LlamaBatch.from_arrays([7], [end], np.array([[0, 1]])))
    b.check()


@pytest.mark.hazard("D1")
@every_case
def test_batches_beyond_n_batch_are_split(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_batch=20, n_ubatch=20)
    for seq in range(3):
        b.held[seq] = b.prompt(21 + 10 * seq).tolist()
    batch = LlamaBatch()
    for seq in range(3):
        batch.add_sequence(b.held[seq], seq)
    b.ctx.decode(batch)
    for back, seq in enumerate([2, 1, 0], start=1):
        assert apart(b.ctx.logits(-back), b.fresh(b.held[seq])) < b.case.tolerance
    b.check()
    tokens = b.feed(3, 75)
    assert apart(b.ctx.logits(), b.fresh(tokens)) < b.case.tolerance
    assert apart(b.ctx.logits(74), b.fresh(tokens)) < b.case.tolerance
    with pytest.raises(IndexError):
        b.ctx.logits(73)
    b.check()


@pytest.mark.hazard("D2")
def test_batches_that_must_be_computed_at_once_are_not_split(
    make_context: Callable[..., LlamaContext],
) -> None:
    ctx = make_context("bert", n_batch=32, n_ubatch=16)
    with pytest.raises(InvalidBatch, match="n_ubatch"):
        ctx.decode(np.arange(17))
    ctx.decode(np.arange(16))


@pytest.mark.hazard("D21")
@pytest.mark.parametrize("case", [c for c in CASES if c.info.memory != "recurrent"], ids=str)
def test_a_refusal_of_a_full_cache_changes_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_ctx=256 if case.unified else 1024, n_batch=20, n_ubatch=20)
    b.feed(0, 100)
    if case.unified:
        b.feed(1, 100)
    tokens, row = b.prompt(200), b.ctx.logits()
    with pytest.raises(NoKvCacheSlot) as caught:
        b.ctx.decode(tokens, seq_id=0)
    assert caught.value.code == 1
    assert caught.value.n_decoded == 0
    np.testing.assert_array_equal(b.ctx.logits(), row)
    b.positions()
    b.check(0)
    # Room comes back with removal.
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.feed(0, 50)
    b.check()


@pytest.mark.hazard("D23", "D33", "D34")
@every_case
def test_logits_need_a_decode(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    if not case.info.has_encoder:
        with pytest.raises(IndexError):
            b.ctx.logits()
    b.feed(0, 3)
    for i in (3, 100, -2, -100, 2**31, -(2**63), 0, 1):
        with pytest.raises(IndexError):
            b.ctx.logits(i)
    b.ctx.decode(LlamaBatch.from_arrays([7, 8], [0, 1], 1, False))
    with pytest.raises(IndexError):
        b.ctx.logits()


def abort_one(b: Bench, seq: int) -> list[int]:
    """Decode a long prompt in another thread and abort it; return the prompt."""
    tokens = b.prompt(900)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            b.ctx.decode(tokens, seq_id=seq)
        except KvCacheError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.003)
    while thread.is_alive() and not b.ctx.abort():
        thread.join(0.001)
    thread.join()
    assert [type(error) for error in caught] == [DecodeAborted]
    return [int(token) for token in tokens]


@every_case
def test_an_aborted_decode_leaves_right_positions_or_asks_for_removal(
    case: Case, bench: MakeBench
) -> None:
    size = 20 if case.info.has_encoder else 1
    b = bench(case, n_ctx=1024 if case.unified else 4096, n_batch=32, n_ubatch=size)
    b.feed(1, 10)
    b.feed(0, 30)
    tokens = abort_one(b, 0)
    with pytest.raises(IndexError):
        b.ctx.logits()
    if not case.info.can_remove_partial:
        # Its state does not follow from the tokens: nothing but removal is possible, or all is well
        # because the abort came between two parts.
        try:
            b.ctx.decode([7], seq_id=0)
        except DecodeError:
            with pytest.raises(UnsupportedOperation):
                b.ctx.copy_kv_cache_seq(0, 2)
            assert b.ctx.clear_kv_cache_seq(0, 29) is False
    else:
        decoded = b.ctx.kv_cache_seq_pos_max(0) + 1 - 30
        assert 0 <= decoded < 900
        b.held[0] += tokens[:decoded]
        b.check()
    # Only that sequence is concerned, and removing all of it cures it.
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.check(1)
    b.feed(0, 20)
    b.check()
