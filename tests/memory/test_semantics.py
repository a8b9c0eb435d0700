"""Arguments mean the same to every memory, unlike in llama.cpp; ranges are in test_ranges.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import KINDS, Bench, Case
from pykvcache import LlamaContext
from pykvcache.errors import (
    P0TooLarge,
    P1TooLarge,
    PositionError,
    SeqIdTooLarge,
    SequenceIdError,
    UnsupportedOperation,
)

MakeBench = Callable[..., Bench]
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)
INT32_MAX = 2**31 - 1


RANGED: dict[str, Callable[[LlamaContext, int | None, int | None], object]] = {
    "copy": lambda ctx, p0, p1: ctx.copy_kv_cache_seq(0, 1, p0, p1),
    "copy to itself": lambda ctx, p0, p1: ctx.copy_kv_cache_seq(0, 0, p0, p1),
    "clear": lambda ctx, p0, p1: ctx.clear_kv_cache_seq(0, p0, p1),
    "clear all": lambda ctx, p0, p1: ctx.clear_kv_cache_seq(None, p0, p1),
    "add": lambda ctx, p0, p1: ctx.kv_cache_seq_add(0, p0, p1, 1),
    "add 0": lambda ctx, p0, p1: ctx.kv_cache_seq_add(0, p0, p1, 0),
    "div": lambda ctx, p0, p1: ctx.kv_cache_seq_div(0, p0, p1, 2),
    "div by 1": lambda ctx, p0, p1: ctx.kv_cache_seq_div(0, p0, p1, 1),
}

BY_SEQUENCE: dict[str, Callable[[LlamaContext, int], object]] = {
    "copy_cache from": lambda ctx, s: ctx.copy_cache(s, 0, 5),
    "copy_cache to": lambda ctx, s: ctx.copy_cache(0, s, 5),
    "copy from": lambda ctx, s: ctx.copy_kv_cache_seq(s, 0),
    "copy to": lambda ctx, s: ctx.copy_kv_cache_seq(0, s),
    "copy between": lambda ctx, s: ctx.copy_kv_cache_seq(s, s),
    "copy nothing to": lambda ctx, s: ctx.copy_kv_cache_seq(0, s, 5, 5),
    "clear": lambda ctx, s: ctx.clear_kv_cache_seq(s),
    "clear nothing": lambda ctx, s: ctx.clear_kv_cache_seq(s, 3, 3),
    "keep": lambda ctx, s: ctx.kv_cache_seq_keep(s),
    "add": lambda ctx, s: ctx.kv_cache_seq_add(s, None, None, 1),
    "add 0": lambda ctx, s: ctx.kv_cache_seq_add(s, None, None, 0),
    "div": lambda ctx, s: ctx.kv_cache_seq_div(s, None, None, 2),
    "div by 1": lambda ctx, s: ctx.kv_cache_seq_div(s, None, None, 1),
    "decode": lambda ctx, s: ctx.decode([7], seq_id=s),
}


@pytest.mark.hazard("M37")
@every_kind
def test_positions_outside_of_int32_have_their_own_errors(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    for name, call in RANGED.items():
        for p0, p1, said in [(-1, None, "p0 is -1"), (None, -1, "p1 is -1"), (-5, -7, "p0 is -5")]:
            with pytest.raises(PositionError, match=said) as caught:
                call(b.ctx, p0, p1)
            assert isinstance(caught.value, ValueError), name
        for value in (2**31, 2**64):
            with pytest.raises(P0TooLarge, match="start position") as p0_error:
                call(b.ctx, value, None)
            with pytest.raises(P1TooLarge, match="end position") as p1_error:
                call(b.ctx, 0, value)
            assert p0_error.value.value == p1_error.value.value == value
    with pytest.raises(PositionError):
        b.ctx.copy_cache(0, 1, -1)
    with pytest.raises(P1TooLarge):
        b.ctx.copy_cache(0, 1, 2**31)
    b.check()


@pytest.mark.hazard("M1", "M3", "M4", "M5")
@every_kind
def test_sequence_ids_out_of_range_are_errors_save_for_queries(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case).with_two()
    for name, call in BY_SEQUENCE.items():
        for seq in (-1, 4, 255, 256, INT32_MAX, -(2**31)):
            with pytest.raises(SequenceIdError) as caught:
                call(b.ctx, seq)
            assert caught.value.seq_id == seq, name
            assert caught.value.n_seq_max == 4
            assert isinstance(caught.value, IndexError)
        with pytest.raises(SeqIdTooLarge):
            call(b.ctx, 2**31)
    for seq in (-1, 4, 999, 2**31, 2**80, -(2**80)):
        assert b.ctx.kv_cache_seq_pos_min(seq) == -1
        assert b.ctx.kv_cache_seq_pos_max(seq) == -1
    b.check()


@pytest.mark.hazard("M28", "M29")
@every_kind
def test_divisors_outside_1_to_255_are_value_errors(case: Case, bench: MakeBench) -> None:
    b = bench(case).with_two()
    for d in (0, -1, 256, -(2**31), 2**31, 2**63, 2**64):
        for seq in (0, 3):
            with pytest.raises(ValueError, match=r"\b1\b.*255|M-RoPE"):
                b.ctx.kv_cache_seq_div(seq, None, None, d)
    b.check()


@every_kind
def test_bools_and_floats_are_not_integers_and_numpy_integers_are(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case).with_two()
    for bad in (True, 1.0, "1", np.float32(1), np.array([1, 2])):
        for call in BY_SEQUENCE.values():
            with pytest.raises(TypeError):
                call(b.ctx, bad)  # type: ignore[arg-type]
        for ranged in RANGED.values():
            with pytest.raises(TypeError):
                ranged(b.ctx, bad, None)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                ranged(b.ctx, None, bad)  # type: ignore[arg-type]
        for query in (b.ctx.kv_cache_seq_pos_max, b.ctx.kv_cache_seq_pos_min):
            with pytest.raises(TypeError):
                query(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            b.ctx.kv_cache_seq_add(0, None, None, bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            b.ctx.kv_cache_seq_div(0, None, None, bad)  # type: ignore[arg-type]
    b.positions()
    assert b.ctx.kv_cache_seq_pos_max(np.uint8(0)) == 19
    b.ctx.copy_kv_cache_seq(np.int64(0), np.int16(2), np.uint64(0), np.int32(20))
    b.held[2] = b.held[0].copy()
    b.check()


@pytest.mark.hazard("M36")
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_a_model_without_memory_refuses_and_answers_minus_one(
    unified: bool, make_context: Callable[..., LlamaContext]
) -> None:
    ctx = make_context("bert", kv_unified=unified)
    ctx.decode(np.arange(10, dtype=np.int32))
    before = ctx.seq_embeddings(0)
    for call in (*RANGED.values(),):
        for p0, p1 in [(None, None), (0, 0), (2, 5)]:
            with pytest.raises(UnsupportedOperation):
                call(ctx, p0, p1)
    for by_sequence in (ctx.kv_cache_seq_keep, ctx.clear_kv_cache_seq):
        with pytest.raises(UnsupportedOperation):
            by_sequence(0)
    with pytest.raises(UnsupportedOperation):
        ctx.copy_cache(0, 1, 5)
    for seq in (-1, 0, 1, 4, 999):
        assert ctx.kv_cache_seq_pos_min(seq) == -1
        assert ctx.kv_cache_seq_pos_max(seq) == -1
    assert not ctx.kv_cache_can_shift()
    ctx.kv_cache_update()
    ctx.clear_kv_cache()
    ctx.decode(np.arange(10, dtype=np.int32))
    np.testing.assert_allclose(ctx.seq_embeddings(0), before, atol=1e-6)
