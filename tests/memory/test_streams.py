"""With ``kv_unified=False`` each sequence has a stream; the calls mean what they always mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.kit import CASES, Bench, Case
from pykvcache import LlamaBatch, LlamaContext
from pykvcache.errors import DecodeAborted, NoKvCacheSlot, SequenceIdError, UnsupportedOperation

MakeBench = Callable[..., Bench]
STREAMS = [case for case in CASES if not case.unified]
stream_case = pytest.mark.parametrize("case", STREAMS, ids=str)
stream_partial_case = pytest.mark.parametrize(
    "case", [case for case in STREAMS if case.info.can_remove_partial], ids=str
)


@pytest.mark.hazard("M8", "M9")
@stream_case
def test_ranges_near_the_cache_size_are_right(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    size = b.ctx.n_ctx_seq
    b.feed(0, 20)
    b.feed(1, 9)
    # Nothing of the source lies there, where llama.cpp takes everything, or stops the process.
    for p0, p1 in [(0, 0), (size - 1, size), (size - 1, None), (size, None)]:
        b.ctx.copy_kv_cache_seq(0, 1, p0, p1)
        b.held[1] = b.held[1][:0]
        b.check()
        b.feed(1, 2)
    for p0, p1 in [(1, size), (1, size - 1)]:
        with pytest.raises(UnsupportedOperation):
            b.ctx.copy_kv_cache_seq(0, 1, p0, p1)
        b.positions()
    for p1 in (size - 1, size, size + 1, 2**31 - 1):
        b.feed(1, 2) if b.held[1] else None
        b.ctx.copy_kv_cache_seq(0, 1, 0, p1)
        b.held[1] = b.held[0].copy()
        b.check()


@stream_partial_case
def test_each_stream_has_its_own_room(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_ctx=1024, n_batch=64, n_ubatch=64)
    assert b.ctx.n_ctx == 1024
    assert b.ctx.n_ctx_seq == 256
    b.feed(0, 200)
    b.feed(1, 200)
    with pytest.raises(NoKvCacheSlot):
        b.ctx.decode(b.prompt(57), seq_id=0)
    b.positions()
    b.feed(0, 55)
    b.check(0)
    with pytest.raises(NoKvCacheSlot):
        b.ctx.decode([7], seq_id=0)
    b.check(1)


@stream_partial_case
def test_cells_stay_in_the_stream_of_their_sequence(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    for seq in range(3):
        b.feed(seq, 10 + seq)
    b.ctx.copy_kv_cache_seq(1, 3)
    table = b.ctx.cells()
    assert b.ctx.memory_info.n_streams == 4
    for seq, n in enumerate([10, 11, 12, 11]):
        assert (table.stream[table.members[:, seq]] == seq).all()
        assert table.members[:, seq].sum() == n
    assert (table.members.sum(axis=1) == 1).all()


@pytest.mark.hazard("N244")
@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.parametrize("n", [1, 2, 7])
@stream_case
def test_a_sequence_begins_at_the_first_cell_after_a_decode_that_was_stopped(
    case: Case, n: int, bench: MakeBench
) -> None:
    b = bench(case)
    batch = LlamaBatch()
    for seq in (0, 2):
        for pos in range(n):
            batch.add(5 + pos, pos, seq, True)
    b.ctx.native.abort_at(5)
    with pytest.raises(DecodeAborted):
        b.ctx.decode(batch)
    b.ctx.native.abort_at(0)
    for seq in (2, 0):
        b.ctx.clear_kv_cache_seq(seq)
    # Where an index picks few of equal cells, logits tell in which of them the tokens lie.
    for _ in range(30):
        b.feed(2, 1)
    b.check(2)
    if case.info.memory != "recurrent":
        cells = b.ctx.cells("attention")
        assert cells.cell[cells.members[:, 2]].min() == 0


@pytest.mark.hazard("M6")
def test_ids_end_at_n_seq_max_also_with_one_sequence(
    make_context: Callable[..., LlamaContext],
) -> None:
    # llama.cpp takes ids up to 255 here, and leaks the cells of such ghosts.
    for unified in (True, False):
        ctx = make_context("llama", n_seq_max=1, kv_unified=unified)
        ctx.decode([5, 6, 7])
        for seq in (1, 2, 255):
            with pytest.raises(SequenceIdError):
                ctx.copy_kv_cache_seq(0, seq)
            with pytest.raises(SequenceIdError):
                ctx.kv_cache_seq_keep(seq)
        assert ctx.clear_kv_cache_seq(0)
        assert ctx.n_cells_used == 0
