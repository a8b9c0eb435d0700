"""A sequence that is shifted as a whole goes on as before: attention sees distances only.

Close, not bit for bit: keys are rotated once more, by a difference of angles.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.kit import CASES, SHIFTABLE, Bench, Case
from pykvcache.errors import PositionError, UnsupportedOperation

MakeBench = Callable[..., Bench]
shiftable_case = pytest.mark.parametrize("case", SHIFTABLE, ids=str)


def shift(b: Bench, seq: int, delta: int) -> None:
    b.ctx.kv_cache_seq_add(seq, None, None, delta)
    b.start[seq] = b.start.get(seq, 0) + delta


@shiftable_case
@pytest.mark.parametrize("update", [False, True], ids=["lazy", "updated"])
def test_shifts_of_a_whole_sequence_change_no_logits(
    case: Case, bench: MakeBench, update: bool
) -> None:
    b = bench(case)
    b.feed(0, 20)  # less than the window, which drops what a shift has put outside it
    b.feed(1, 15)
    for delta in (1, 50, -51, 200, -7):
        shift(b, 0, delta)
        b.positions()
        if update:
            b.ctx.kv_cache_update()
            b.positions()
        b.check()
    for delta in (3, 4, -2):  # several before one decode
        shift(b, 0, delta)
    b.check()


@shiftable_case
def test_a_shifted_sequence_can_be_copied_cut_and_dropped(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 30)
    shift(b, 0, 9)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1], b.start[1] = b.held[0].copy(), 9
    b.check()
    if case.info.can_remove_partial:
        assert b.ctx.clear_kv_cache_seq(1, 20)
        b.held[1] = b.held[1][:11]
        b.check()
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0], b.start[0] = [], 0
    b.feed(0, 10)
    b.check()


@pytest.mark.hazard("M32")
@shiftable_case
def test_cells_that_another_sequence_shares_are_not_shifted(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    # Streams have separate cells; a state is shared in either mode until the next decode.
    if case.unified or case.info.has_recurrent_state:
        with pytest.raises(UnsupportedOperation, match="shares cells"):
            b.ctx.kv_cache_seq_add(0, None, None, 5)
        b.check()
        assert b.ctx.clear_kv_cache_seq(1)
        b.held[1] = []
    shift(b, 0, 5)
    b.check()


@pytest.mark.hazard("M30")
@shiftable_case
def test_impossible_shifts_are_refused_and_change_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    shift(b, 0, 5)
    for delta in (-6, -(2**31), 2**31 - 10, 2**31, -(2**63), 2**64):
        with pytest.raises(PositionError):
            b.ctx.kv_cache_seq_add(0, 0, None, delta)
        b.positions()
    b.check()


@pytest.mark.parametrize("case", [c for c in SHIFTABLE if c.info.can_remove_partial], ids=str)
def test_the_head_can_be_dropped_and_the_rest_moved_to_zero(case: Case, bench: MakeBench) -> None:
    # With one layer of attention over the rest this would be a fresh run; with more it is not
    # (see the ledger tests), so only positions and the shift itself are compared here.
    results = []
    for moved in (False, True):
        b = bench(case)
        b.feed(0, 40)
        assert b.ctx.clear_kv_cache_seq(0, 0, 15)
        if moved:
            b.ctx.kv_cache_seq_add(0, 15, None, -15)
        assert b.ctx.kv_cache_seq_pos_min(0) == (0 if moved else 15)
        assert b.ctx.kv_cache_seq_pos_max(0) == (24 if moved else 39)
        b.ctx.decode(b.prompt(3))
        results.append(b.ctx.logits())
    assert abs(results[0] - results[1]).max() < 1e-3


@pytest.mark.parametrize("case", [c for c in SHIFTABLE if c.info.has_recurrent_state], ids=str)
def test_a_part_of_a_state_is_not_shifted(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    for p0, p1 in [(5, None), (0, 19), (None, 3), (19, 20)]:
        with pytest.raises(UnsupportedOperation):
            b.ctx.kv_cache_seq_add(0, p0, p1, 2)
        with pytest.raises(UnsupportedOperation):
            b.ctx.kv_cache_seq_div(0, p0, p1, 2)
    b.check()


@pytest.mark.hazard("M23", "M24", "M25", "N262")
@pytest.mark.parametrize("case", [c for c in CASES if not c.info.can_shift], ids=str)
def test_keys_that_llama_cpp_cannot_rotate_are_refused(case: Case, bench: MakeBench) -> None:
    # M-RoPE aborts at once, a cache without rotary layers at the next decode.
    b = bench(case)
    b.feed(0, 20)
    assert b.ctx.kv_cache_can_shift() is False
    assert b.ctx.memory_info.can_shift is False
    for p0, p1, delta in [(None, None, 1), (0, None, 100), (5, 9, -1)]:
        with pytest.raises(UnsupportedOperation):
            b.ctx.kv_cache_seq_add(0, p0, p1, delta)
    with pytest.raises(UnsupportedOperation):
        b.ctx.kv_cache_seq_div(0, None, None, 2)
    b.ctx.kv_cache_update()
    b.check(n=2)


@shiftable_case
def test_can_shift_is_true(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    assert b.ctx.kv_cache_can_shift() is True
    assert b.ctx.memory_info.can_shift is True
