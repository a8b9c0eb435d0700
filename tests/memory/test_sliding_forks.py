"""Forks of a window cache that has slid: right, or full, and nothing else.

Cells that several sequences hold are not reused by the window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Bench, Case, apart
from pykvcache import LlamaBatch
from pykvcache.errors import NoKvCacheSlot, UnsupportedOperation
from support.models import MODELS

MakeBench = Callable[..., Bench]
N_SWA = MODELS["gemma3"].n_swa

SLIDING = [Case("gemma3", True, False), Case("gemma3", False, False)]
sliding_case = pytest.mark.parametrize("case", SLIDING, ids=str)


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


@sliding_case
def test_whole_copies_of_a_slid_window_continue(case: Case, bench: MakeBench) -> None:
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
