"""The next logits equal those of a fresh run, however tokens reach a sequence.

Closely, not bit for bit: other batch shapes, cells and rotations add in another order. The
difference is near 1e-5 (2e-4 on gemma3, whose GELU is a table), far below `RIGHT`. Random programs
check this too: here is what they do not draw.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, PARTIAL, SHIFTABLE, Bench, Case, apart
from pykvcache import LlamaBatch
from pykvcache.errors import PositionError

MakeBench = Callable[..., Bench]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
partial_case = pytest.mark.parametrize("case", PARTIAL, ids=str)
shiftable_case = pytest.mark.parametrize("case", SHIFTABLE, ids=str)


@every_case
@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(16, 5), (4, 1)])
def test_small_batches_change_nothing(
    case: Case, bench: MakeBench, n_batch: int, n_ubatch: int
) -> None:
    if case.info.has_encoder and n_ubatch < 20:
        n_batch, n_ubatch = 20, 20  # the encoder takes its input at once
    b = bench(case, n_batch=n_batch, n_ubatch=n_ubatch)
    tokens = b.feed(0, 45)
    assert apart(b.ctx.logits(), b.fresh(tokens)) < b.case.tolerance
    b.check(n=2)


@every_case
@pytest.mark.parametrize("n_batch", [512, 24])
def test_every_requested_row_is_that_of_its_prefix(
    case: Case, bench: MakeBench, n_batch: int
) -> None:
    b = bench(case, n_batch=n_batch)
    tokens = b.prompt(40)
    wanted = [0, 3, 22, 23, 24, 39]
    b.ctx.decode(LlamaBatch.from_arrays(tokens, np.arange(40), 0, np.isin(np.arange(40), wanted)))
    for i in wanted:
        assert apart(b.ctx.logits(i), b.fresh(tokens[: i + 1])) < b.case.tolerance, f"row {i}"
    for back, i in enumerate(reversed(wanted), start=1):
        np.testing.assert_array_equal(b.ctx.logits(-back), b.ctx.logits(i))
    with pytest.raises(IndexError):
        b.ctx.logits(1)


@pytest.mark.hazard("D12")
@pytest.mark.parametrize("case", [case for case in CASES if not case.info.bounded], ids=str)
def test_a_sequence_may_begin_anywhere(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    tokens = b.prompt(30)
    b.ctx.decode(LlamaBatch.from_arrays(tokens, np.arange(70, 100), 1, False))
    b.held[1], b.start[1] = tokens.tolist(), 70
    # Only distances count, in every architecture here.
    b.check(n=2)


@every_case
def test_clear_and_redo_gives_the_same_bits(case: Case, bench: MakeBench) -> None:
    # An empty cache is filled from its first cell again, by the same graph.
    b = bench(case)
    tokens = b.prompt(40)
    b.ctx.decode(tokens)
    first = b.ctx.logits()
    b.ctx.copy_kv_cache_seq(0, 1)
    b.ctx.clear_kv_cache()
    b.positions()
    b.ctx.decode(tokens)
    np.testing.assert_array_equal(b.ctx.logits(), first)
    b.held[0] = tokens.tolist()
    b.check()


@pytest.mark.hazard("N26")
@every_case
def test_forks_that_diverge_stay_apart(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 20)
    for dst in (1, 2, 3):
        b.ctx.copy_kv_cache_seq(dst - 1, dst)
        b.held[dst] = b.held[dst - 1].copy()
        b.feed(dst, 3)
        b.feed(dst - 1, 2)
    b.check()
    # Forks outlive their source.
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.check(n=2)
    b.feed(0, 30)
    b.check()


@partial_case
def test_a_removed_tail_that_is_replayed_gives_the_same_bits(case: Case, bench: MakeBench) -> None:
    # The freed cells are the ones that the same tokens are put into again.
    b = bench(case)
    tokens = b.prompt(40)
    b.ctx.decode(tokens[:25])
    b.ctx.decode(tokens[25:])
    first = b.ctx.logits()
    assert b.ctx.clear_kv_cache_seq(0, 25)
    b.held[0] = tokens[:25].tolist()
    b.positions()
    b.ctx.decode(tokens[25:])
    np.testing.assert_array_equal(b.ctx.logits(), first)


def shift(b: Bench, seq: int, delta: int) -> None:
    b.ctx.kv_cache_seq_add(seq, None, None, delta)
    b.start[seq] = b.start.get(seq, 0) + delta


@shiftable_case
@pytest.mark.parametrize("update", [False, True], ids=["lazy", "updated"])
def test_shifts_of_a_whole_sequence_change_no_logits(
    case: Case, bench: MakeBench, update: bool
) -> None:
    b = bench(case)
    assert b.ctx.kv_cache_can_shift() is b.ctx.memory_info.can_shift is True
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
