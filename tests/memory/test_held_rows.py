"""Logits are readable as long as a sequence holds their token, after what came before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, PARTIAL, SHIFTABLE, Bench, Case
from pykvcache import LlamaBatch, LlamaContext, Sampler

MakeBench = Callable[..., Bench]
Row = tuple[int, Any]

STATES = tuple(case for case in CASES if case.has_states)


def two_rows(b: Bench) -> tuple[Row, Row]:
    """Decode one token into each of two sequences of 20 and 12; their rows."""
    b.with_two()
    b.ctx.decode(LlamaBatch.from_arrays([7, 8], [20, 12], np.array([0, 1]), True))
    b.held[0].append(7)
    b.held[1].append(8)
    return (0, b.ctx.logits(0)), (1, b.ctx.logits(1))


def is_there(ctx: LlamaContext, row: Row) -> None:
    np.testing.assert_array_equal(ctx.logits(row[0]), row[1])


def is_gone(ctx: LlamaContext, row: Row) -> None:
    for read in (ctx.logits, lambda i: Sampler(temperature=0).sample(ctx, i)):
        with pytest.raises(IndexError, match="are gone"):
            read(row[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_go_with_the_last_sequence_that_holds_them(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    ctx, (zero, one) = b.ctx, two_rows(b)
    # A fork holds the row too, and so does a fork of the fork.
    ctx.copy_kv_cache_seq(0, 2)
    ctx.copy_kv_cache_seq(2, 3)
    for seq in (0, 2):
        ctx.clear_kv_cache_seq(seq)
        is_there(ctx, zero)
    is_there(ctx, one)
    # The row is right: it equals that of a fresh run over the held tokens.
    assert np.abs(zero[1] - b.fresh(b.held[0])).max() < case.tolerance
    ctx.copy_kv_cache_seq(1, 3)  # in its place
    is_gone(ctx, zero)
    ctx.kv_cache_seq_keep(3)
    is_there(ctx, one)
    ctx.clear_kv_cache()
    is_gone(ctx, one)
    with pytest.raises(IndexError):
        ctx.logits()
    if case.name == "t5":
        return  # nothing was encoded for what follows
    ctx.decode([5, 6], seq_id=1)
    ctx.logits()


@pytest.mark.hazard("N44")
@pytest.mark.parametrize("case", PARTIAL, ids=str)
def test_a_rewind_takes_the_rows_above_it(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    tokens = b.prompt(20)
    b.ctx.decode(LlamaBatch.from_arrays(tokens, np.arange(20), 0, True))
    rows = [(i, b.ctx.logits(i)) for i in range(20)]
    assert b.ctx.clear_kv_cache_seq(0, 15, None)
    is_there(b.ctx, rows[14])
    is_gone(b.ctx, rows[15])
    b.ctx.copy_kv_cache_seq(0, 1)
    # The middle: later tokens saw the removed ones.
    assert b.ctx.clear_kv_cache_seq(0, 5, 10)
    is_there(b.ctx, rows[14])
    if case.unified:
        b.ctx.copy_kv_cache_seq(1, 2, 0, 8)
        b.ctx.copy_kv_cache_seq(1, 3, 2, 12)
    assert b.ctx.clear_kv_cache_seq(1)
    for i in (0, 4):
        is_there(b.ctx, rows[i])
    for i in (5, 7):
        (is_there if case.unified else is_gone)(b.ctx, rows[i])
    for i in (8, 11, 14):
        is_gone(b.ctx, rows[i])


@pytest.mark.parametrize("case", SHIFTABLE, ids=str)
def test_rows_of_tokens_that_moved_are_gone(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    zero, one = two_rows(b)
    b.ctx.kv_cache_seq_add(0, 0, None, 3)
    is_gone(b.ctx, zero)
    b.ctx.kv_cache_update()
    is_there(b.ctx, one)
    b.ctx.kv_cache_seq_div(1, 0, None, 2)
    is_gone(b.ctx, one)


@pytest.mark.hazard("N44")
@pytest.mark.parametrize("case", STATES, ids=str)
def test_rows_of_what_a_state_replaced_are_gone(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    zero, one = two_rows(b)
    b.ctx.set_state(b.ctx.get_state(1), 2)
    is_there(b.ctx, zero)
    b.ctx.set_state(b.ctx.get_state(0), 1)
    is_gone(b.ctx, one)
    is_there(b.ctx, zero)
    b.ctx.set_state(b.ctx.get_state())
    is_gone(b.ctx, zero)


@pytest.mark.parametrize(
    "case", [c for c in STATES if c.info.n_swa or c.info.has_recurrent_state], ids=str
)
def test_a_partial_state_takes_the_rows_above_it(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 12)
    before = b.ctx.get_partial_state(0)
    b.ctx.decode([7], seq_id=0)
    row = 0, b.ctx.logits()
    is_there(b.ctx, row)
    b.ctx.set_partial_state(before)
    is_gone(b.ctx, row)
    b.check(0)


def test_embeddings_go_with_their_sequence(make_context: Any) -> None:
    ctx = make_context("llama", embeddings=True, pooling_type="none")
    ctx.decode([5, 6, 7])
    ctx.embeddings()
    ctx.clear_kv_cache_seq(0, 2, None)
    with pytest.raises(IndexError, match="are gone"):
        ctx.embeddings()
    ctx.embeddings(1)
    pooled = make_context("llama", embeddings=True, pooling_type="mean")
    pooled.decode([5, 6, 7], seq_id=1)
    pooled.seq_embeddings(1)
    pooled.clear_kv_cache_seq(1, 2, None)
    with pytest.raises(IndexError, match="no longer holds"):
        pooled.seq_embeddings(1)


def test_a_refused_decode_leaves_the_rows(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode([5, 6])
    row = 1, ctx.logits()
    for bad in ([10**6], []):
        with pytest.raises(ValueError, match="token"):
            ctx.decode(bad)
    is_there(ctx, row)
