"""Batches, failures and aborts: the same on every memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case, apart
from pykvcache import LlamaBatch, LlamaContext
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
    "begin before 0": ([7], [-1], [[2]]),
    "good, then bad": ([7, 8, 9], [20, 12, 14], [[0], [1], [1]]),
    "sequence twice": ([7], [20], [[0, 0]]),
    "token past the vocabulary": ([10**6], [20], [[0]]),
    "good, then negative": ([7, -1], [20, 21], [[0], [0]]),
    "last position of int32": ([7], [2**31 - 1], [[2]]),
}


@pytest.mark.hazard("D4", "D5", "D6", "D7", "D10", "D11", "D13", "D14", "D15")
@every_case
def test_bad_batches_are_refused_before_the_call(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.feed(1, 12)
    counted = b.ctx.tokens_evaluated
    for name, (tokens, pos, seqs) in REFUSED.items():
        with pytest.raises((InvalidBatch, PositionError)) as caught:
            b.ctx.decode(LlamaBatch.from_arrays(tokens, pos, np.array(seqs)))
        assert isinstance(caught.value, ValueError), name
        assert getattr(caught.value, "code", None) is None, name
        b.positions()
        assert b.ctx.logits() is not None, "nothing was decoded, so the last logits stay"
    nothing: list[Any] = [LlamaBatch(), [], np.empty(0, np.int32)]
    for bad in (*nothing, [-1], [case.n_vocab], [7, -(2**31)]):
        with pytest.raises(InvalidBatch) as invalid:
            b.ctx.decode(bad)
        assert invalid.value.code is None
    for seqs in ([4], [255], [-1], [0, 4], range(2, 256)):
        with pytest.raises(SequenceIdError) as wrong:
            b.ctx.decode(LlamaBatch.from_arrays([7], [20 * (seqs[0] == 0)], np.array([seqs])))
        assert (wrong.value.seq_id in seqs, wrong.value.n_seq_max) == (True, b.ctx.n_seq_max)
    assert b.ctx.tokens_evaluated == counted
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


@pytest.mark.hazard("D21", "N45")
@pytest.mark.parametrize("case", [c for c in CASES if c.info.memory != "recurrent"], ids=str)
def test_a_refusal_of_a_full_cache_changes_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_ctx=256 if case.unified else 1024, n_batch=20, n_ubatch=20)
    b.feed(0, 100)
    if case.unified:
        b.feed(1, 100)
    counted, row, free = b.ctx.tokens_evaluated, b.ctx.logits(), 156 - 100 * case.unified
    is_counted = case.name in ("llama", "gemma3", "jamba", "t5")  # others: positions have cells
    tokens = b.prompt(free + 1 if is_counted else 200)
    batch = LlamaBatch()
    batch.add_sequence(tokens, 0, start=100)
    for given in (tokens, batch):
        with pytest.raises(NoKvCacheSlot) as caught:
            b.ctx.decode(given)
        error = caught.value
        assert (error.code, error.n_decoded) == (1, 0)
        if is_counted:
            assert (error.n_tokens, error.n_free, error.n_cells) == (free + 1, free, 256)
    assert b.ctx.tokens_evaluated == counted
    np.testing.assert_array_equal(b.ctx.logits(), row)
    b.positions()
    b.check(0)
    # Room comes back with removal, all of it.
    for n in (100 + free, 50):
        assert b.ctx.clear_kv_cache_seq(0)
        b.held[0] = []
        b.feed(0, n)
        assert apart(b.ctx.logits(), b.fresh(b.held[0])) < case.tolerance
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


def removed(ctx: LlamaContext, seq: int, how: int) -> None:
    """Empty a sequence; in some ways others too."""
    if how == 0:
        ctx.clear_kv_cache()
    elif how == 1:
        ctx.kv_cache_seq_keep((seq + 1) % ctx.n_seq_max)
    else:
        assert ctx.clear_kv_cache_seq(seq)


@pytest.mark.hazard("D22", "N1", "N2", "T5")
@pytest.mark.parametrize("seqs", [[[0]], [[0], [2]], [[0, 1]]], ids=["one", "two", "coupled"])
@every_case
def test_a_decode_stopped_at_any_step_leaves_right_positions_or_asks_for_removal(
    case: Case, bench: MakeBench, seqs: list[list[int]]
) -> None:
    b = bench(case, n_ctx=512 if case.unified else 2048, n_batch=40, n_ubatch=20)
    for step in range(1, 10_000, 17):
        b.ctx.clear_kv_cache()
        b.held = {seq: [] for seq in range(3)}
        for seq in (0, 2, 1):  # the cells of 2 lie between those of the others
            b.feed(seq, 12)
        if seqs == [[0, 1]]:
            b.ctx.copy_kv_cache_seq(0, 1)
            b.held[1] = [*b.held[0]]
        batch, new = LlamaBatch(), {}
        for each in seqs:
            tokens = b.prompt(60 // len(seqs))
            new |= dict.fromkeys(each, tokens.tolist())
            for i, token in enumerate(tokens):
                batch.add(token, 12 + i, each, True)
        b.ctx.native.abort_at(step)
        try:
            b.ctx.decode(batch)
        except UnsupportedOperation:
            assert seqs == [[0, 1]]
            return
        except DecodeAborted as caught:
            error = caught
        else:
            break
        assert isinstance(error, DecodeError)
        assert error.code == 2
        with pytest.raises(IndexError):
            b.ctx.logits()
        for seq in error.needs_removal:
            # Its state does not follow from the tokens: nothing but removal is possible.
            assert not case.info.can_remove_partial
            for use in (
                lambda seq=seq: b.ctx.decode([7], seq_id=seq),
                lambda seq=seq: next(b.ctx.generate([7], 1, seq_id=seq)),
            ):
                with pytest.raises(DecodeError, match="remove") as refused:
                    use()
                assert refused.value.needs_removal == (seq,)
            if seq in b.ctx.sequences():
                with pytest.raises(UnsupportedOperation):
                    b.ctx.copy_kv_cache_seq(seq, 3)
                assert b.ctx.clear_kv_cache_seq(seq, 11) is False
        ends = {seq: b.ctx.kv_cache_seq_pos_max(seq) + 1 for seq in b.held}
        assert all(end >= 12 for seq, end in ends.items() if seq not in error.needs_removal)
        assert error.needs_removal or sum(ends.values()) >= 36 + error.n_decoded * len(seqs[0])
        for seq in error.needs_removal:
            removed(b.ctx, seq, step % 3)
        for seq in b.held:
            end = b.ctx.kv_cache_seq_pos_max(seq) + 1
            b.held[seq] = [*b.held[seq], *new.get(seq, [])][:end]
        b.check()
        b.ctx.clear_kv_cache_seq(0)
        b.held[0] = []
        b.feed(0, 20)
        b.check()
    assert step > 17
