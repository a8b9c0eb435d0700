"""A window cache that has slid: what it still holds can be used, the rest is refused.

gemma3 with a window of 32 tokens in every other layer. With ``swa_full=False`` the cells of those
layers are reused, here after 256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Bench, Case, apart
from pykvcache import LlamaBatch, NoKvCacheSlot, UnsupportedOperation
from support.models import MODELS

MakeBench = Callable[..., Bench]
N_SWA = MODELS["gemma3"].n_swa

SLIDING = [Case("gemma3", True, False), Case("gemma3", False, False)]
FULL = [Case("gemma3"), Case("gemma3", False)]
HYBRID = [Case("lfm2_swa", True, False), Case("lfm2_swa", False, False)]

sliding_case = pytest.mark.parametrize("case", SLIDING, ids=str)
every_case = pytest.mark.parametrize("case", [*SLIDING, *FULL], ids=str)

LONG = {"n_ctx": 2048, "n_ubatch": 32}


@pytest.mark.parametrize("case", [*SLIDING, *FULL, *HYBRID], ids=str)
def test_far_past_the_window_logits_stay_right(case: Case, bench: MakeBench) -> None:
    b = bench(case, **LONG)
    for n in (300, 7, 1, 90):
        b.feed(0, n)
        b.check(0)
    b.feed(1, 40)
    b.feed(2, 300)
    b.check()


@sliding_case
def test_the_window_drops_what_it_may_and_says_so(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 400)
    lowest = b.ctx.kv_cache_seq_pos_min(0)
    assert 0 < lowest <= 400 - N_SWA
    window = b.ctx.cells("window")
    assert sorted(window.pos[window.members[:, 0]]) == [*range(lowest, 400)]
    base = b.ctx.cells("attention")
    assert sorted(base.pos[base.members[:, 0]]) == [*range(400)]


@every_case
@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
def test_a_rewind_is_right_or_refused_wherever_it_goes(
    case: Case, shifted: bool, bench: MakeBench
) -> None:
    refused = []
    for back in (1, 5, 30, 31, 60, 100, 150, 222, 223, 224, 225, 226, 230, 299, 300, 399, 400):
        b = bench(case, **LONG)
        b.feed(0, 200)
        if shifted and case.swa_full:
            # After a shift new cells are looked for from the start again: with a full-size
            # cache, too, cells outside the window are then reused.
            b.ctx.kv_cache_seq_add(0, None, None, 3)
            b.start[0] = 3
        b.feed(0, 200)
        left = 400 - back
        end = b.start.get(0, 0) + left
        told = b.ctx.can_resume(0, end)
        done = b.ctx.clear_kv_cache_seq(0, end)
        assert done == told or left == 0, f"{back} back"
        if done:
            b.held[0] = b.held[0][:left]
            if left == 0:
                b.start[0] = 0
        else:
            refused.append(back)
        b.positions()
        b.feed(0, 1)
        assert apart(b.ctx.logits(), b.fresh(b.held[0])) < b.case.tolerance, f"{back} back, {done}"
        b.check(n=3)
    assert 1 not in refused, "the last token can always go: the window before it is there"
    if case.swa_full and not shifted:
        assert refused == []
    elif not case.swa_full:
        assert 300 in refused
    assert 400 not in refused


@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_a_hybrid_with_a_window_is_dropped_whole(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 400)
    for p0 in (399, 300, 1):
        assert b.ctx.clear_kv_cache_seq(0, p0) is False
        assert not b.ctx.can_resume(0, p0)
    assert b.ctx.can_resume(0, 400)
    b.check()
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    b.positions()
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.check()
    b.feed(0, 20)
    b.check()


@sliding_case
def test_a_rewound_window_can_slide_on(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 400)
    for _ in range(2):
        left = len(b.held[0]) - 25
        assert b.ctx.clear_kv_cache_seq(0, left)
        b.held[0] = b.held[0][:left]
        b.feed(0, 70)
        b.check()


@sliding_case
def test_whole_copies_of_a_slid_window_go_on(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 400)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    if case.unified:
        # Every cell of the window is shared, so a decode may find none to reuse.
        for seq in (0, 1, 0, 1):
            full_or_right(b, seq, 1)
    else:
        b.check(n=3)
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.feed(1, 100)
    b.feed(0, 100)
    b.check()


@pytest.mark.parametrize("from_lowest", [-60, 0, N_SWA - 2, N_SWA - 1, N_SWA, None])
def test_a_prefix_of_a_slid_window_is_right_or_refused(
    from_lowest: int | None, bench: MakeBench
) -> None:
    b = bench(SLIDING[0])
    b.feed(0, 400)
    b.feed(1, 5)
    # Position n sees from n - 31 on, so that cell must be held.
    n = 400 if from_lowest is None else b.ctx.kv_cache_seq_pos_min(0) + from_lowest
    if from_lowest is None or from_lowest >= N_SWA - 1:
        b.ctx.copy_kv_cache_seq(0, 1, 0, n)
        b.held[1] = b.held[0][:n]
    else:
        with pytest.raises(UnsupportedOperation, match="dropped"):
            b.ctx.copy_kv_cache_seq(0, 1, 0, n)
    b.positions()
    b.check(1)
    b.check(0)


@sliding_case
def test_shifts_of_a_window_that_dropped_cells_are_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 400)
    for p0, p1 in [(None, None), (380, None), (0, 10)]:
        with pytest.raises(UnsupportedOperation):
            b.ctx.kv_cache_seq_add(0, p0, p1, 50)
        with pytest.raises(UnsupportedOperation):
            b.ctx.kv_cache_seq_div(0, p0, p1, 2)
    b.check()


@pytest.mark.parametrize("case", FULL, ids=str)
def test_a_full_size_window_that_dropped_cells_is_not_shifted_again(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case, n_ctx=1024)
    b.feed(0, 200)
    b.ctx.kv_cache_seq_add(0, None, None, 1)
    b.start[0] = 1
    b.feed(0, 20)
    window, base = b.ctx.cells("window"), b.ctx.cells("attention")
    if len(window) == len(base):
        b.ctx.kv_cache_seq_add(0, None, None, 1)
        b.start[0] = 2
    else:
        with pytest.raises(UnsupportedOperation, match="dropped"):
            b.ctx.kv_cache_seq_add(0, None, None, 1)
    b.check(n=2)


def full_or_right(b: Bench, seq: int, n: int) -> bool:
    """Decode n tokens; True if they fitted, otherwise only `NoKvCacheSlot` has happened."""
    tokens = b.prompt(n)
    before = b.ctx.kv_cache_seq_pos_max(seq)
    try:
        b.ctx.decode(tokens, seq_id=seq)
    except NoKvCacheSlot:
        with pytest.raises(IndexError):
            b.ctx.logits()
        assert b.ctx.kv_cache_seq_pos_max(seq) == before
        return False
    b.held[seq] += tokens.tolist()
    assert apart(b.ctx.logits(), b.fresh(b.held[seq])) < b.case.tolerance
    return True


def test_forks_of_a_long_prefix_fill_the_window_and_nothing_else(bench: MakeBench) -> None:
    # Cells that several sequences hold are not reused by the window (hazard M34).
    b = bench(SLIDING[0])
    b.feed(0, 200)
    for seq in (1, 2, 3):
        b.ctx.copy_kv_cache_seq(0, seq)
        b.held[seq] = b.held[0].copy()
    full = False
    for _ in range(40):
        for seq in range(4):
            full = full or not full_or_right(b, seq, 1)
        if full:
            break
    assert full, "256 cells cannot hold 200 shared ones and 4 x 40 more"
    # The truth is told, and dropping forks makes room again.
    b.positions()
    for seq in (1, 2, 3):
        assert b.ctx.clear_kv_cache_seq(seq)
        b.held[seq] = []
    b.check(0)
    b.feed(0, 300)
    b.feed(1, 100)
    b.check()


def test_a_fork_of_a_slid_window_is_right_or_full(bench: MakeBench) -> None:
    b = bench(SLIDING[0])
    b.feed(0, 400)
    for seq in (1, 2, 3):
        b.ctx.copy_kv_cache_seq(0, seq)
        b.held[seq] = b.held[0].copy()
    for _ in range(10):
        for seq in range(4):
            full_or_right(b, seq, 1)
    b.positions()
    for seq in (0, 1, 2):
        assert b.ctx.clear_kv_cache_seq(seq)
        b.held[seq] = []
    b.check(3)
    b.feed(0, 50)
    b.check()


@sliding_case
def test_a_batch_that_does_not_fit_loses_nothing_of_the_window(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case, n_ctx=512 if case.unified else 4 * 512)
    b.feed(0, 400)
    tokens = b.prompt(300)
    with pytest.raises(NoKvCacheSlot):
        b.ctx.decode(tokens, seq_id=0)
    held = b.ctx.kv_cache_seq_pos_max(0) + 1
    assert 400 <= held < 700
    b.held[0] += tokens[: held - 400].tolist()
    b.positions()
    if held < 512:
        b.check()
    assert b.ctx.clear_kv_cache_seq(0, held - 5)
    b.held[0] = b.held[0][: held - 5]
    b.check()


@pytest.mark.parametrize("case", [c for c in SLIDING if c.unified], ids=str)
def test_coupled_tokens_far_past_the_window(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.held = {0: [], 1: []}
    full = False
    for start in range(0, 320, 16):
        tokens = b.prompt(16)
        pos = np.arange(start, start + 16)
        try:
            b.ctx.decode(
                LlamaBatch.from_arrays(tokens, pos, np.tile([0, 1], (16, 1)), pos == pos[-1])
            )
        except NoKvCacheSlot:
            full = True
            break
        for seq in (0, 1):
            b.held[seq] += tokens.tolist()
        assert apart(b.ctx.logits(), b.fresh(b.held[0])) < b.case.tolerance
    assert full, "shared cells are never reused, and there are 256"
    b.positions()
    assert b.ctx.clear_kv_cache_seq(1)
    b.held[1] = []
    b.feed(0, 200)
    b.check()
