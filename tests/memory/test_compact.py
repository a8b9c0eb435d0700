"""Compaction moves cells and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case
from pykvcache.errors import UnsupportedOperation
from support.builds import fast_only

pytestmark = fast_only("no function of llama.cpp moves cells")

MakeBench = Callable[..., Bench]
MOVED = tuple(case for case in CASES if case.info.memory != "other")


def highest(bench: Bench) -> int:
    return int(bench.ctx.cells("attention").cell.max())


@pytest.mark.parametrize("case", MOVED, ids=str)
def test_cells_move_down_and_logits_stay(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_seq_max=4)
    for seq, n in ((0, 30), (1, 12), (2, 9)):
        b.feed(seq, n)
    b.ctx.copy_kv_cache_seq(2, 3)  # shared, or copied when it is asked for
    b.held[3] = list(b.held[2])
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    try:
        moved = b.ctx.kv_cache_compact()
    except UnsupportedOperation:
        assert not case.info.has_arrays or case.info.memory == "recurrent"
        return
    if case.info.memory != "recurrent":
        assert moved > 0 or not case.unified
        for part in ("attention", "window"):
            try:
                table = b.ctx.cells(part)
            except (ValueError, UnsupportedOperation):
                continue
            for stream in np.unique(table.stream):
                cells = np.sort(table.cell[table.stream == stream])
                np.testing.assert_array_equal(cells, np.arange(len(cells)))
    assert b.ctx.kv_cache_compact() == 0
    b.check(1, 2, 3, n=3)


@pytest.mark.parametrize("case", [c for c in MOVED if c.info.has_arrays], ids=str)
def test_partial_states_and_outputs_stay_good(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_seq_max=3)
    b.feed(0, 20)
    b.feed(1, 10)
    row = b.ctx.logits()
    partial = None
    if b.ctx.memory_kind != "attention":
        partial = b.ctx.get_partial_state(1)
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.ctx.kv_cache_compact()
    np.testing.assert_array_equal(b.ctx.logits(), row)
    kept = list(b.held[1])
    b.feed(1, 5)
    if partial is not None:
        assert partial.is_valid
        b.ctx.set_partial_state(partial)
        b.held[1] = kept
    b.check(1, n=2)


def test_every_value_moves_with_its_cell(bench: MakeBench) -> None:
    case = next(c for c in CASES if c.name == "llama" and c.unified)
    for flash_attn in ("disabled", "enabled"):  # transposed values, or not
        for type_k in ("f32", "f16"):
            b = bench(case, n_seq_max=3, flash_attn=flash_attn, type_k=type_k)
            b.feed(0, 40)
            b.feed(1, 17)
            before = b.ctx.get_state(1)
            b.ctx.clear_kv_cache_seq(0)
            assert b.ctx.kv_cache_compact() == 17
            np.testing.assert_array_equal(b.ctx.get_state(1), before)
