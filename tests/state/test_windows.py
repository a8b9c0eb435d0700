"""Windows in states: a spare one makes rewinds cheap, those beside them stay, chunks are whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Case, Fresh, Logits, Make, apart
from pykvcache import CheckpointPolicy, LlamaContext, LlamaSequence
from pykvcache.errors import ArgumentError
from state.kit import LONG, WORDS, MakeBench, next_logits, parts_of
from support.models import RIGHT

WINDOWED = [c for c in CASES if c.info.n_swa and c.has_states]
CUT = [c for c in WINDOWED if not c.info.has_recurrent_state]
N = 300


@pytest.mark.parametrize("case", CUT, ids=str)
def test_a_restored_sequence_is_cut_by_up_to_a_window(case: Case, bench: MakeBench) -> None:
    b = bench(case, **LONG, n_seq_max=2)
    tokens = b.feed(0, N).tolist()
    state, n_swa = b.ctx.sequence_state(0, tokens), case.info.n_swa
    window = state.parts[-1]
    assert window.positions.tolist() == [*range(N - 2 * n_swa + 1, N)]
    for swa_full in (True, False):
        other = bench(replace(case, swa_full=swa_full), **LONG, n_seq_max=2)
        for back in (0, 1, n_swa // 2, n_swa, n_swa + 1):
            other.ctx.restore_sequence(state, 1)
            assert other.ctx.native.window_range(1) == (N - 2 * n_swa + 1, N)
            done = other.ctx.clear_kv_cache_seq(1, N - back)
            assert done == (back <= n_swa)
            other.held[1] = tokens[: N - back] if done else tokens.copy()
            other.check(1, n=2)
    # What is cut off a state itself needs the same cells.
    other.ctx.restore_sequence(state[: N - n_swa], 1)
    other.held[1] = tokens[: N - n_swa]
    other.check(1, n=2)


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_raw_states_are_those_of_llama_cpp(case: Case, bench: MakeBench) -> None:
    b = bench(case, **LONG, n_seq_max=2)
    b.feed(0, N)
    native = b.ctx.native
    raw, whole = b.ctx.get_state(0), native.get_state(0, None, spare=True)
    if case.info.has_recurrent_state:
        np.testing.assert_array_equal(raw, whole)
        return
    assert len(raw) < len(whole)
    native.set_state(1, [whole], None)
    assert native.window_range(1)[0] == native.spare_begin(0) < native.window_needed(N)
    one, other = (b.ctx.sequence_state(seq).parts for seq in (0, 1))
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.positions, theirs.positions)
        for tensor, copied in zip(mine.tensors, theirs.tensors, strict=True):
            np.testing.assert_array_equal(tensor, copied)


@pytest.mark.parametrize("flash_attn", ["disabled", "enabled"])
@pytest.mark.parametrize("case", [c for c in CUT if not c.swa_full], ids=str)
def test_spare_cells_are_dropped_if_there_is_no_room(
    case: Case, flash_attn: str, bench: MakeBench
) -> None:
    """With and without transposed values, and with any other sequences."""
    wide = bench(replace(case, swa_full=True), **LONG, n_seq_max=2, flash_attn=flash_attn)
    tokens = wide.feed(0, N).tolist()
    first = wide.ctx.native.window_range(0)[0]
    out = [np.empty(wide.ctx.native.block_bytes(p) * N, np.uint8) for p in ("attention", "window")]
    assert first == 0
    assert wide.ctx.native.get_block(0, 0, N, out[0])
    assert wide.ctx.native.get_block(0, 0, N, out[1], "window")
    b = bench(case, **LONG, n_seq_max=2, flash_attn=flash_attn)
    for others in (0, 40, 400):
        b.ctx.clear_kv_cache()
        b.held = {}
        if others:
            b.feed(0, others)
        # More cells than the whole window cache has.
        b.ctx.native.set_blocks(1, [(out[0], N, N)], [(out[1], N, N)], 0)
        first, end = b.ctx.native.window_range(1)
        assert end == N
        assert first <= b.ctx.native.window_needed(N)
        assert first >= N - 256
        state = b.ctx.sequence_state(1)
        n = len(state.parts[-1])
        for mine, theirs in zip(
            state.parts[-1].tensors, wide.ctx.sequence_state(0).parts[-1].tensors, strict=True
        ):
            axis = int(case.info.n_swa > 0 and mine.ndim == 3)
            np.testing.assert_array_equal(mine, theirs.take(range(theirs.shape[axis])[-n:], axis))
        if flash_attn == "disabled":
            b.held[1] = tokens.copy()
            b.check(n=2)


@pytest.mark.parametrize("case", CUT, ids=str)
def test_parked_and_loaded_sequences_rewind_by_evaluating_one_token(
    case: Case, bench: MakeBench, tmp_path: Path
) -> None:
    b = bench(case, **LONG, n_seq_max=2)
    tokens, back = b.prompt(N).tolist(), case.info.n_swa - 1
    none = CheckpointPolicy(max_bytes=0)

    def rewound(one: LlamaSequence) -> None:
        one.truncate(N - back)
        before = b.ctx.tokens_evaluated
        row = one.logits()
        assert b.ctx.tokens_evaluated - before == 1
        assert apart(row, b.fresh(tokens[: N - back])) < case.tolerance

    with LlamaSequence(b.ctx, tokens, checkpoints=none) as one:
        one.logits()
        one.save(tmp_path / "one.kv")
        one.park()
        # Its cells become those of others.
        for seed in range(3):
            with LlamaSequence(b.ctx, b.prompt(90 + seed)) as other:
                other.logits()
        assert one.is_parked
        rewound(one)
    with LlamaSequence.load(b.ctx, tmp_path / "one.kv", checkpoints=none) as again:
        rewound(again)


def in_window(ctx: LlamaContext, seq_id: int) -> set[int]:
    """Positions whose window cells the sequence still has."""
    cells = ctx.cells("window")
    return set(cells.pos[cells.members[:, seq_id]].tolist())


@pytest.mark.hazard("N51")
@pytest.mark.parametrize("name", ["gemma3", "lfm2_swa"])
def test_a_restore_reuses_only_window_cells_that_no_next_token_sees(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    """A full window cache gives up cells that the next token of their owner does not see."""
    ctx = make_context(name, n_ctx=1024, n_seq_max=3, n_ubatch=32, swa_full=False)
    short, long = WORDS[:40], WORDS[:300]
    ctx.decode(short, seq_id=1)
    state = ctx.get_state(1)
    ctx.decode(long, seq_id=0)
    before = in_window(ctx, 0)
    ctx.set_state(state, seq_id=2)
    left = in_window(ctx, 0)
    assert left < before, "no cell was taken: this shows nothing"
    for seq_id, tokens in ((0, long), (1, short), (2, short)):
        wanted = fresh_logits(name, [*tokens, 9])
        assert apart(next_logits(ctx, seq_id), wanted) < RIGHT, seq_id
    if name != "gemma3":
        return  # a recurrent state is not rewound
    # A rewind knows the missing cells.
    back = next(n for n in range(1, len(long) + 1) if ctx.can_resume(0, n))
    assert not ctx.clear_kv_cache_seq(0, back - 1)
    assert ctx.clear_kv_cache_seq(0, back)
    wanted = fresh_logits(name, [*long[:back], 9])
    assert apart(next_logits(ctx), wanted) < RIGHT


CHUNK, END = 8192, 8300


@pytest.mark.slow
@pytest.mark.parametrize("swa_full", [True, False])
def test_a_chunk_is_all_that_is_needed(swa_full: bool, make_context: Make) -> None:
    options = {"n_ctx": 9216, "n_seq_max": 2, "n_ubatch": 256}
    tokens = np.random.default_rng(4).integers(5, 300, END + 3, dtype=np.int32)
    first = make_context("llama4", **options, swa_full=swa_full)
    native = first.native
    assert [native.window_needed(n) for n in (0, 1, CHUNK - 1, CHUNK, END)] == [
        0,
        0,
        0,
        CHUNK,
        CHUNK,
    ]
    assert [native.least_cut(n) for n in (0, 1, CHUNK, CHUNK + 1)] == [0, CHUNK, CHUNK, 2 * CHUNK]
    first.decode(tokens[:CHUNK])
    at_end = parts_of(first, 0, CHUNK)
    assert at_end[1:3] == ([], CHUNK)
    after = {CHUNK: _rows(first, 0, tokens[CHUNK : CHUNK + 3])}
    first.decode(tokens[CHUNK + 3 : END])
    after[END] = _rows(first, 0, tokens[END:])
    parts = parts_of(first, 0, END)
    assert parts[2] == CHUNK
    begin, end = native.window_range(0)
    assert end == END + 3
    assert begin <= CHUNK
    other = make_context("llama4", **options, swa_full=not swa_full)
    for n, given in ((CHUNK, at_end), (END, parts)):
        other.native.set_blocks(1, *given)
        assert other.native.window_range(1) == (CHUNK, n)
        assert [other.can_resume(1, m) for m in (CHUNK - 1, CHUNK, n)] == [False, True, True]
        rows = _rows(other, 1, tokens[n : n + 3])
        assert max(map(apart, rows, after[n])) < RIGHT
    with pytest.raises(ArgumentError, match="108 cells"):
        other.native.set_blocks(0, parts[0], parts[1][1:], CHUNK + 8)
    # A state has what the chunk before needs, where that is there.
    state = first.sequence_state(0)
    other.restore_sequence(state, 1)
    assert other.native.window_range(1) == (begin, END + 3)
    assert other.can_resume(1, CHUNK - 1) == (begin == 0)


def _rows(ctx: LlamaContext, seq: int, tokens: Any) -> list[Logits]:
    """Logits after each of a few tokens."""
    rows = []
    for token in tokens:
        ctx.decode([int(token)], seq_id=seq)
        rows.append(ctx.logits())
    return rows
