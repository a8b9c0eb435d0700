"""Where decodes put their cells, and compaction, which moves them and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case
from pykvcache import LlamaContext
from pykvcache.errors import UnsupportedOperation
from pykvcache.introspection import CellTable
from support.builds import fast_only

MakeBench = Callable[..., Bench]
TOKENS = np.arange(5, 25, dtype=np.int32)
MOVED = tuple(case for case in CASES if case.info.memory != "other")
compacts = fast_only("no function of llama.cpp moves cells")


def of_sequence(table: CellTable, seq: int) -> set[int]:
    return set(table.cell[table.members[:, seq]].tolist())


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_freed_cells_are_used_again_before_new_ones(
    name: str, unified: bool, make_context: Callable[..., LlamaContext]
) -> None:
    ctx = make_context(name, kv_unified=unified, swa_full=True)
    ctx.decode(TOKENS, seq_id=0)
    assert of_sequence(ctx.cells(), 0) == set(range(20))
    assert ctx.clear_kv_cache_seq(0, 4, 10)
    assert of_sequence(ctx.cells(), 0) == {*range(4), *range(10, 20)}
    ctx.decode(TOKENS[:4], seq_id=0)
    assert of_sequence(ctx.cells(), 0) == {*range(8), *range(10, 20)}


def test_a_cell_is_free_when_its_last_sequence_leaves(
    make_context: Callable[..., LlamaContext],
) -> None:
    ctx = make_context("llama", kv_unified=True, n_seq_max=4)
    ctx.decode(TOKENS, seq_id=0)
    ctx.copy_kv_cache_seq(0, 1)
    ctx.copy_kv_cache_seq(0, 2, 0, 8)
    assert ctx.n_cells_used == 20
    assert ctx.clear_kv_cache_seq(0)
    assert ctx.n_cells_used == 20
    assert of_sequence(ctx.cells(), 1) == set(range(20))
    assert ctx.clear_kv_cache_seq(1, 3)
    assert ctx.n_cells_used == 8
    assert of_sequence(ctx.cells(), 2) == set(range(8))
    assert ctx.clear_kv_cache_seq(None)
    assert ctx.n_cells_used == 0
    ctx.decode(TOKENS, seq_id=3)
    assert of_sequence(ctx.cells(), 3) == set(range(20))


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_how_many_cells_a_decode_attends_over(
    unified: bool, make_context: Callable[..., LlamaContext]
) -> None:
    ctx = make_context("llama", kv_unified=unified, n_seq_max=3)
    spans = [ctx.native.n_cells_spanned]
    for seq in range(3):
        ctx.decode(TOKENS, seq_id=seq)
        spans.append(int(ctx.cells().cell.max()) + 1)
        assert ctx.native.n_cells_spanned == spans[-1]
    assert spans == ([0, 20, 40, 60] if unified else [0, 20, 20, 20])
    ctx.clear_kv_cache_seq(0)
    assert ctx.native.n_cells_spanned == spans[-1]
    ctx.clear_kv_cache_seq(2)
    assert ctx.native.n_cells_spanned == (40 if unified else 20)


@pytest.mark.hazard("M39")
@fast_only("llama.cpp's shift begins the search for cells at 0 again: such a rewind is refused")
def test_a_shift_does_not_send_decodes_over_what_a_rewind_needs(
    make_context: Callable[..., LlamaContext],
) -> None:
    # llama.cpp's own shift begins the search for cells at 0 again, where on a window cache
    # that keeps everything the oldest cells seem free.
    ctx = make_context("gemma3", swa_full=True)
    ctx.decode(np.tile(TOKENS, 3), seq_id=0)
    ctx.kv_cache_seq_add(0, None, None, 5)
    ctx.decode(TOKENS, seq_id=0)
    assert len(ctx.cells("window")) == len(ctx.cells()) == 80
    assert ctx.can_resume(0, 20)


@compacts
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


@compacts
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


@compacts
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
