"""Placement of a restored sequence among others, and llama.cpp's sets afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart
from pykvcache import LlamaContext
from pykvcache.errors import NoKvCacheSlot
from state.kit import WORDS, next_logits
from support.builds import PLAIN, fast_only
from support.examples import examples
from support.models import RIGHT

FLASH = {"type_k": "f16", "type_v": "f16", "flash_attn": "enabled"}
SHAPES = [
    pytest.param("llama", {}, id="transposed"),
    pytest.param("llama", FLASH, id="rows"),
    pytest.param("llama_h64", FLASH | {"type_k": "q8_0", "type_v": "q4_0"}, id="quantised"),
    pytest.param("llama_h64", {"type_k": "q8_0"}, id="quantised-transposed"),
    pytest.param("llama", {"kv_unified": False, "n_ctx": 1024}, id="streams"),
    pytest.param("llama", FLASH | {"kv_unified": False, "n_ctx": 1024}, id="rows-streams"),
    pytest.param("gemma3", {}, id="window"),
    pytest.param("gemma3", {"swa_full": False, "n_ctx": 512}, id="short-window"),
    pytest.param("qwen2vl", {}, id="mrope"),
    pytest.param("jamba", {}, id="hybrid"),
]


def contents(ctx: LlamaContext) -> dict[int, bytes]:
    """Return the contents of each sequence, independent of cell numbers."""
    return {s: ctx.sequence_state(s).to_bytes() for s in range(ctx.n_seq_max)}


def alone(scratch: LlamaContext, state: Any) -> bytes:
    """Return the contents of an empty memory after restoring a raw state."""
    scratch.clear_kv_cache()
    scratch.set_state(state, 0)
    return scratch.sequence_state(0).to_bytes()


def check_books(ctx: LlamaContext) -> None:
    """Check that the sets per cell, per sequence and in total agree."""
    parts = ["attention", "window"] if ctx.memory_info.n_swa else ["attention"]
    held = ctx.sequences()
    for part in parts:
        table = ctx.cells(part)  # type: ignore[arg-type]
        assert table.members.any(axis=1).all()
        if part == "window":
            continue
        assert len(table) == ctx.n_cells_used
        for s in range(ctx.n_seq_max):
            positions = table.pos[table.members[:, s]]
            assert len(positions) == (held[s].n_cells if s in held else 0)
            if len(positions):
                assert (positions.min(), positions.max()) == (held[s].pos_min, held[s].pos_max)


def cells_of(ctx: LlamaContext, seq_id: int) -> list[int]:
    table = ctx.cells()
    return [int(cell) for cell in table.cell[table.members[:, seq_id]]]


@pytest.mark.parametrize(("name", "options"), SHAPES)
@pytest.mark.parametrize("seed", range(examples(3)))
def test_restoring_over_any_contents(
    seed: int, name: str, options: dict[str, Any], make_context: Make
) -> None:
    ctx = make_context(name, **options)
    rng = np.random.default_rng(seed)
    states: list[tuple[Any, bytes]] = []
    scratch = make_context(name, **options)
    # llama.cpp's reader may take cells that another sequence's window has passed.
    passed = PLAIN and name == "gemma3"
    for _ in range(60):
        s, t = (int(i) for i in rng.integers(0, 4, 2))
        what = rng.choice(["decode", "decode", "remove", "cut", "fork", "take", "put", "put"])
        end = ctx.kv_cache_seq_pos_max(s) + 1
        before = contents(ctx)
        try:
            if what == "decode":
                ctx.decode(rng.integers(5, 250, int(rng.integers(1, 40))), seq_id=s)
            elif what == "remove":
                ctx.clear_kv_cache_seq(s)
            elif what == "cut" and end and ctx.memory_info.can_remove_partial:
                a, b = sorted(int(p) for p in rng.integers(0, end + 1, 2))
                ctx.clear_kv_cache_seq(s, a, b)
            elif what == "fork" and s != t:
                ctx.copy_kv_cache_seq(s, t)
            elif what == "take":
                state = ctx.get_state(s)
                states.append((state, alone(scratch, state)))
                # Of a window a raw state has what llama.cpp writes, and the container has more.
                assert name == "gemma3" or states[-1][1] == before[s]
            elif what == "put" and states:
                state, content = states[int(rng.integers(len(states)))]
                ctx.set_state(state, s)
                assert passed or contents(ctx) == before | {s: content}
        except NoKvCacheSlot:
            assert passed or what == "decode" or contents(ctx) == before
        check_books(ctx)
    # What the sequences hold is what attention sees.
    other = make_context(name, **options)
    for s in range(4):
        other.set_state(ctx.get_state(s), s)
    for s in range(4):
        for one in (ctx, other):  # room for one more
            for t in range(s):
                one.clear_kv_cache_seq(t)
        assert apart(next_logits(ctx, s), next_logits(other, s)) < 30 * RIGHT
    for s in range(4):
        ctx.clear_kv_cache_seq(s)
    assert ctx.n_cells_used == 0
    assert not len(ctx.cells())
    size = ctx.memory_info.n_cells
    ctx.decode(np.resize(WORDS, size), seq_id=1)
    assert ctx.n_cells_used == size


def comb(ctx: LlamaContext) -> None:
    """Sequence 1 in every second of the first 120 cells, with free ones between."""
    for i in range(60):
        ctx.decode(WORDS[i : i + 1], seq_id=1)
        ctx.decode(WORDS[i : i + 1], seq_id=2)
    ctx.clear_kv_cache_seq(2)


@fast_only("llama.cpp's reader takes the first cells that are free")
@pytest.mark.parametrize("options", [{}, FLASH], ids=["transposed", "rows"])
def test_holes_are_filled_where_a_run_would_make_the_cache_longer(
    options: dict[str, Any], make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context("llama", n_ctx=1024, **options)
    comb(ctx)
    held = ctx.get_state(1)
    source = make_context("llama", **options)
    source.decode(WORDS[:190])
    ctx.set_state(source.get_state(0), 3)
    assert max(cells_of(ctx, 3)) == 249
    assert np.array_equal(ctx.get_state(1), held)
    check_books(ctx)
    # A short one lies in a run after them: no more cells are computed over for that.
    ctx.clear_kv_cache_seq(3)
    source.clear_kv_cache_seq(0, 50)
    ctx.set_state(source.get_state(0), 3)
    assert cells_of(ctx, 3) == list(range(119, 169))
    for n, seq in ((50, 3), (60, 1)):
        want = fresh_logits("llama", [*WORDS[:n], 9], **options)
        assert apart(next_logits(ctx, seq), want) < (30 if options else 1) * RIGHT


def test_a_sequence_is_restored_in_place(make_context: Make) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:90], seq_id=1)
    ctx.decode(WORDS[:100], seq_id=0)
    state, lies = ctx.get_state(0), cells_of(ctx, 0)
    ctx.clear_kv_cache_seq(0, 60)
    ctx.decode(WORDS[200:240], seq_id=0)
    ctx.set_state(state, 0)
    ctx.set_state(state, 0)
    assert cells_of(ctx, 0) == lies
    assert np.array_equal(ctx.get_state(0), state)
    # With the cache full of it, too, and where only its own cells make room.
    ctx.decode(np.resize(WORDS, 66), seq_id=0)
    assert ctx.n_cells_used == 256
    full = ctx.get_state(0)
    for one in (full, state, full):
        ctx.set_state(one, 0)
        assert np.array_equal(ctx.get_state(0), one)
        check_books(ctx)


def test_a_state_in_many_pieces_and_in_another_order(make_context: Make) -> None:
    """The native call takes a state in pieces of any size, cut anywhere."""
    ctx = make_context("qwen2vl")
    ctx.decode(WORDS[:70], seq_id=1)
    # The later half lies in front of the earlier one.
    ctx.clear_kv_cache_seq(1, 0, 30)
    ctx.decode(WORDS[:25], seq_id=1)
    state, content = ctx.get_state(1), ctx.sequence_state(1).to_bytes()
    for size in (1, 7, 1000, 10**9):
        pieces = [state[at : at + size].copy() for at in range(0, len(state), size)]
        for seq in (0, 1):
            ctx.clear_kv_cache_seq(0)
            ctx._native.set_state(seq, pieces, None)
            assert ctx.sequence_state(seq).to_bytes() == content
            check_books(ctx)
