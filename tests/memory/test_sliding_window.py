"""A window cache that has slid: what it still holds can be used, the rest is refused.

gemma3 with a window of 32 tokens in every other layer. With ``swa_full=False`` the cells of those
layers are reused, here after 256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.kit import Bench, Case, apart
from pykvcache.errors import UnsupportedOperation
from support.models import MODELS

MakeBench = Callable[..., Bench]
N_SWA = MODELS["gemma3"].n_swa

SLIDING = [Case("gemma3", True, False), Case("gemma3", False, False)]
FULL = [Case("gemma3"), Case("gemma3", False)]
HYBRID = [Case("lfm2_swa", True, False), Case("lfm2_swa", False, False)]

sliding_case = pytest.mark.parametrize("case", SLIDING, ids=str)

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
