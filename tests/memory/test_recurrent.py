"""Recurrent and hybrid memory: whole sequences, wherever llama.cpp pretends to do parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import WHOLE_ONLY, Bench, Case
from pykvcache import LlamaBatch
from pykvcache.errors import PositionError, UnsupportedOperation

MakeBench = Callable[..., Bench]
whole_case = pytest.mark.parametrize("case", WHOLE_ONLY, ids=str)
shifting_case = pytest.mark.parametrize(
    "case", [case for case in WHOLE_ONLY if case.info.can_shift and case.swa_full], ids=str
)


@pytest.mark.hazard("M2")
@whole_case
def test_all_sequences_can_be_removed(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    for seq in range(4):
        b.feed(seq, 10)
    assert b.ctx.clear_kv_cache_seq() is True
    b.held = {}
    b.positions()
    assert b.ctx.n_cells_used == 0
    b.feed(3, 10)
    b.check()


@pytest.mark.hazard("M16", "M17", "M19")
@whole_case
def test_a_part_is_not_removed(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    for p0, p1 in [(0, 10), (5, 15), (10, None), (19, None), (19, 20), (10, 20), (1, 500)]:
        assert b.ctx.clear_kv_cache_seq(0, p0, p1) is False
        assert b.ctx.clear_kv_cache_seq(None, p0, p1) is False
        b.positions()
    for begin, end in [(5, 10), (10, None), (0, 5)]:
        with pytest.raises(UnsupportedOperation):
            b.ctx.remove(0, begin, end)
        b.positions()
    assert b.ctx.clear_kv_cache_seq(0, 20) is True  # nothing is there
    b.check()
    assert b.ctx.clear_kv_cache_seq(0, 0, 21) is True
    b.held[0] = []
    b.feed(0, 5)
    b.check()


@pytest.mark.hazard("M10", "M11")
@whole_case
def test_a_copy_replaces_both_parts(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 10)
    b.feed(1, 25)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    b.check()
    b.ctx.copy_kv_cache_seq(2, 1)
    b.held[1] = []
    b.positions()
    b.feed(1, 12)
    b.check()


@pytest.mark.hazard("M30", "M31")
@shifting_case
def test_a_shift_below_zero_is_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 10)
    for delta in (-1, -10, -11, -(2**31), 2**31 - 5, 2**31 - 1):
        with pytest.raises(PositionError):
            b.ctx.kv_cache_seq_add(0, None, None, delta)
        b.positions()
    b.ctx.kv_cache_seq_add(0, None, None, 6)
    b.start[0] = 6
    b.check()
    for delta in (-7, -16):
        with pytest.raises(PositionError):
            b.ctx.kv_cache_seq_add(0, None, None, delta)
    b.ctx.kv_cache_seq_add(0, None, None, -6)
    b.start[0] = 0
    b.check()
    # Its positions are those of an ordinary sequence: it can be removed.
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.positions()
    assert b.ctx.n_cells_used == 0


@pytest.mark.hazard("D17")
@whole_case
def test_a_token_of_several_sequences_is_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 5)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    with pytest.raises(UnsupportedOperation):
        b.ctx.decode(LlamaBatch.from_arrays([7], [5], np.array([[0, 1]])))
    with pytest.raises(UnsupportedOperation):
        b.ctx.decode(LlamaBatch.from_arrays([7], [0], np.array([[2, 3]])))
    b.check()
