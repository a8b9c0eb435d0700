"""A window cache that has slid: what it still holds can be used, the rest is refused.

gemma3 with a window of 32 tokens in every other layer. With ``swa_full=False`` the cells of those
layers are reused, here after 256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.kit import Bench, Case, apart
from pykvcache.errors import NoKvCacheSlot, UnsupportedOperation
from support.models import MODELS

MakeBench = Callable[..., Bench]
N_SWA = MODELS["gemma3"].n_swa

SLIDING = [Case("gemma3", True, False), Case("gemma3", False, False)]
FULL = [Case("gemma3"), Case("gemma3", False)]
HYBRID = [Case("lfm2_swa", True, False), Case("lfm2_swa", False, False)]

sliding_case = pytest.mark.parametrize("case", SLIDING, ids=str)

LONG = {"n_ctx": 2048, "n_ubatch": 32}


@sliding_case
def test_the_window_drops_cells_and_reports_it(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 400)
    lowest = b.ctx.kv_cache_seq_pos_min(0)
    assert 0 < lowest <= 400 - N_SWA
    window = b.ctx.cells("window")
    assert sorted(window.pos[window.members[:, 0]]) == [*range(lowest, 400)]
    base = b.ctx.cells("attention")
    assert sorted(base.pos[base.members[:, 0]]) == [*range(400)]


@pytest.mark.hazard("M20", "M39")
@pytest.mark.parametrize(
    ("case", "shifted"),
    [*((c, False) for c in [*SLIDING, *FULL]), *((c, True) for c in FULL)],
    ids=lambda value: str(value) if isinstance(value, Case) else ("shifted" if value else ""),
)
def test_a_rewind_is_right_or_refused_wherever_it_goes(
    case: Case, shifted: bool, bench: MakeBench
) -> None:
    refused = []
    for back in (1, 31, 100, 223, 224, 225, 300, 399, 400):
        b = bench(case, **LONG)
        b.feed(0, 200)
        if shifted:
            # After a shift new cells are looked for from the start again: with a full-size
            # cache, too, cells outside the window are then reused.
            b.ctx.kv_cache_seq_add(0, None, None, 3)
            b.start[0] = 3
        b.feed(0, 200)
        left = 400 - back
        end = b.start.get(0, 0) + left
        answer = b.ctx.can_resume(0, end)
        done = b.ctx.clear_kv_cache_seq(0, end)
        assert done == answer or left == 0, f"{back} back"
        if done:
            b.held[0] = b.held[0][:left]
            if left == 0:
                b.start[0] = 0
        else:
            refused.append(back)
        b.positions()
        b.feed(0, 1)
        assert apart(b.ctx.logits(), b.fresh(b.held[0])) < b.case.tolerance, f"{back} back, {done}"
        b.check()
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


@pytest.mark.hazard("M27")
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


# Forks: cells that several sequences hold are not reused by the window ---------------------


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


@pytest.mark.parametrize("from_lowest", [-60, 0, N_SWA - 2, N_SWA - 1, N_SWA, None])
def test_a_prefix_of_a_slid_window_is_right_or_refused(
    from_lowest: int | None, bench: MakeBench
) -> None:
    b = bench(SLIDING[0])
    b.feed(0, 400)
    b.feed(1, 5)
    # Position n sees n - 31 and later, so that cell must exist.
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


@pytest.mark.hazard("M34")
def test_forks_of_a_long_prefix_fill_the_window_and_nothing_else(bench: MakeBench) -> None:
    # Cells that several sequences hold are not reused by the window.
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
    # The limit is reported, and dropping forks makes room again.
    b.positions()
    for seq in (1, 2, 3):
        assert b.ctx.clear_kv_cache_seq(seq)
        b.held[seq] = []
    b.check(0)
    b.feed(0, 300)
    b.feed(1, 100)
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
