"""A saved and loaded sequence continues like the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from memory.kit import Case, apart
from memory.ledger_kit import Twin
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, SequenceState
from pykvcache.state import ContextState
from state.kit import CASES, WORDS, cells_of, next_logits
from support.builds import PLAIN
from support.models import RIGHT, make_model

if TYPE_CHECKING:
    from conftest import ContextFactory, FreshLogits

RECURRENT = [
    case
    for case in CASES
    if (info := case.values[0].info).has_recurrent_state and not info.bounded  # type: ignore[union-attr]
]


def build(make_context: ContextFactory, case: Case) -> LlamaContext:
    return make_context(case.name, **case.options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [3, 110])
def test_a_saved_sequence_continues(
    case: Case, n: int, make_context: ContextFactory, fresh_logits: FreshLogits, tmp_path: Path
) -> None:
    ctx, other = build(make_context, case), build(make_context, case)
    ctx.decode(WORDS[:n], seq_id=1)
    raw = ctx.get_state(1)
    assert len(raw) == ctx.state_size(1)
    size = ctx.save_sequence(tmp_path / "a", 1, tokens=WORDS[:n], metadata={"n": n})
    assert (tmp_path / "a").stat().st_size == size
    other.decode(WORDS[200:220], seq_id=1)
    other.decode(WORDS[200:207], seq_id=2)
    for seq in (1, 2):
        state = other.load_sequence(tmp_path / "a", seq)
        assert state.tokens is not None
        assert np.array_equal(state.tokens, WORDS[:n])
        assert np.array_equal(state.positions, np.arange(n))
        assert state.metadata == {"n": n}
        assert seq == 2 or cells_of(other, 1) == cells_of(ctx, 1)
    # llama.cpp's own loading reuses window cells that no next token sees.
    assert PLAIN or cells_of(other, 1) == cells_of(ctx, 1)
    want = fresh_logits(case.name, [*WORDS[:n], 9])
    assert apart(next_logits(other, 2), want) < case.tolerance
    assert apart(next_logits(other, 1), want) < case.tolerance
    assert apart(next_logits(ctx, 1), want) < case.tolerance
    more = [*WORDS[:n], 9, 11]
    assert apart(next_logits(other, 2, 11), fresh_logits(case.name, more)) < case.tolerance
    other.clear_kv_cache_seq(2)
    other.set_state(bytes(raw), 2)  # over nothing, next to another sequence
    assert apart(next_logits(other, 2), want) < case.tolerance


@pytest.mark.parametrize("case", CASES)
def test_a_saved_context_continues_and_cells_stay_shared(
    case: Case, make_context: ContextFactory, fresh_logits: FreshLogits, tmp_path: Path
) -> None:
    ctx, other = build(make_context, case), build(make_context, case)
    held = {0: WORDS[:70], 2: WORDS[:74], 3: WORDS[80:90]}
    ctx.decode(held[0], seq_id=0)
    ctx.copy_kv_cache_seq(0, 2)
    ctx.decode(WORDS[70:74], seq_id=2)
    ctx.decode(held[3], seq_id=3)
    ctx.save_context(tmp_path / "all", tokens=held, metadata={"who": "all"})
    other.decode(WORDS[:5], seq_id=1)
    state = other.load_context(tmp_path / "all")
    assert state.sequence_ids == [0, 2, 3]
    assert state.metadata == {"who": "all"}
    assert state.n_tokens == 154
    assert other.get_state().tobytes() == ctx.get_state().tobytes()
    assert other.sequences() == ctx.sequences()
    assert other.n_cells_used == ctx.n_cells_used
    for seq, tokens in held.items():
        assert np.array_equal(state.tokens[seq], tokens)
        # One sequence of it, next to itself.
        alone = build(make_context, case)
        alone.restore_sequence(state.sequence(seq), 1)
        want = fresh_logits(case.name, [*tokens, 9])
        assert apart(next_logits(alone, 1), want) < case.tolerance
        assert apart(next_logits(other, seq), want) < case.tolerance
        alone.set_state(ctx.get_state())
        assert alone.sequences() == ctx.sequences()
        assert alone.n_cells_used == ctx.n_cells_used
        assert apart(next_logits(alone, seq), want) < case.tolerance
        alone.close()


def test_a_sequence_whose_later_tokens_lie_before_its_first_ones(
    make_context: ContextFactory, fresh_logits: FreshLogits
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:120], seq_id=0)
    ctx.decode(WORDS[120:240], seq_id=1)
    ctx.clear_kv_cache_seq(0)
    ctx.decode(WORDS[240:270], seq_id=1)
    tokens = WORDS[120:270]
    state = ContextState.from_bytes(ctx.context_state({1: tokens}).to_bytes())
    # The cells come as they lie in the cache, and the sequence as it is read.
    assert (np.diff(state.parts[0][0].positions) < 0).any()
    one = state.sequence(1)
    assert one.positions.tolist() == list(range(150))
    assert one.tokens is not None
    assert np.array_equal(one.tokens, tokens)
    other = make_context("llama")
    other.restore_context(state)
    alone = make_context("llama")
    alone.restore_sequence(one, 3)
    for restored, seq_id in ((other, 1), (alone, 3)):
        assert apart(next_logits(restored, seq_id), fresh_logits("llama", [*tokens, 9])) < RIGHT


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_after_removals_shifts_and_forks(
    name: str, unified: bool, make_context: ContextFactory, model_folder: Path, tmp_path: Path
) -> None:
    """The ledger keeps account of every cell; after the load it must still be right."""
    tolerance = RIGHT if name == "llama" else 10 * RIGHT
    ctx = make_context(name, n_ctx=1024, kv_unified=unified)
    twin = Twin(ctx, make_model(name, model_folder), tolerance)
    twin.decode(0, 26)
    twin.copy(0, 1)
    twin.decode(1, 4)
    twin.remove(1, 5, 9)
    twin.copy(1, 2)
    twin.remove(0)
    twin.remove(1)
    twin.add(2, 9, None, -4)  # the shift is still pending when the state is taken
    twin.decode(2, 2)
    twin.add(2, None, None, 3)
    ctx.save_sequence(tmp_path / "a", 2)
    twin.decode(2, 3)
    ctx.load_sequence(tmp_path / "a", 2)
    assert ctx.sequence_state(2).to_bytes() == (tmp_path / "a").read_bytes()
    ctx.load_sequence(tmp_path / "a", 3)
    twin.ledger.remove(2, int(twin.ledger.pos_max(2)) - 2)
    twin.ledger.copy(2, 3)
    twin.decode(3, 3)
    twin.decode(2, 2)
    if name == "llama":
        twin.div(3, None, None, 2)
        ctx.save_context(tmp_path / "all")
        ctx.clear_kv_cache()
        ctx.load_context(tmp_path / "all")
        twin.decode(3, 3)


@pytest.mark.parametrize("case", RECURRENT)
def test_the_first_position_of_a_recurrent_sequence_is_kept(
    case: Case, make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx, other = build(make_context, case), build(make_context, case)
    batch = LlamaBatch.from_arrays(WORDS[:9], np.arange(30, 39), np.full(9, 1))
    ctx.decode(batch)
    ctx.save_sequence(tmp_path / "a", 1, tokens=WORDS[:9])
    state = other.load_sequence(tmp_path / "a", 2)
    assert np.array_equal(state.positions, np.arange(30, 39))
    again = other.sequence_state(2, tokens=WORDS[:9])
    assert again.to_bytes() == (tmp_path / "a").read_bytes()
    ctx.save_context(tmp_path / "all")
    assert other.load_context(tmp_path / "all").firsts == {1: 30}
    assert other.context_state().to_bytes() == (tmp_path / "all").read_bytes()
    assert apart(next_logits(ctx, 1), next_logits(other, 1)) < case.tolerance


@pytest.mark.hazard("S28")
@pytest.mark.parametrize("case", CASES)
def test_restoring_an_empty_sequence_empties_the_target(
    case: Case, make_context: ContextFactory, tmp_path: Path
) -> None:
    ctx = build(make_context, case)
    ctx.save_sequence(tmp_path / "none", 0)
    nothing = tmp_path / "nothing"
    ctx.save_context(nothing)
    raw, whole = ctx.get_state(0), ctx.get_state()
    for restore, clear in (
        (lambda: ctx.load_sequence(tmp_path / "none", 2), lambda: ctx.load_context(nothing)),
        (lambda: ctx.set_state(raw, 2), lambda: ctx.set_state(whole)),
    ):
        ctx.decode(WORDS[:10], seq_id=2)
        ctx.decode(WORDS[:10], seq_id=1)
        state: Any = restore()
        assert state is None or (len(state), state.positions.tolist()) == (0, [])
        assert list(ctx.sequences()) == [1]
        clear()
        assert ctx.sequences() == {}


def test_an_idle_sequence_whose_window_cells_were_all_reused(
    model: Callable[..., LlamaModel], make_context: ContextFactory, tmp_path: Path
) -> None:
    """The two parts end differently, which is valid: the next token sees no window cells."""
    tiny = model("gemma3", n_swa=1)
    options = {"swa_full": False, "n_ctx": 1024, "n_ubatch": 32}
    ctx, other = make_context(tiny, **options), make_context(tiny, **options)
    ctx.decode(WORDS[:10], seq_id=1)
    for at in range(0, 400, 40):
        ctx.decode(WORDS[at : at + 40], seq_id=0)
    assert len(ctx.sequence_state(1).parts[1]) == 0
    ctx.save_sequence(tmp_path / "a", 1)
    ctx.save_context(tmp_path / "all")
    other.load_context(tmp_path / "all")
    assert other.get_state().tobytes() == ctx.get_state().tobytes()
    other.load_sequence(tmp_path / "a", 2)
    other.set_state(ctx.get_state(1), 3)
    want = next_logits(ctx, 1)
    for seq in (1, 2, 3):
        assert apart(next_logits(other, seq), want) < 10 * RIGHT


def test_states_outlive_their_context_and_model(
    model_folder: Path, make_context: ContextFactory
) -> None:
    path = make_model("llama", model_folder)
    source = LlamaModel(path)
    with LlamaContext(source, n_ctx=256, n_seq_max=1, n_threads=1) as ctx:
        ctx.decode(WORDS[:30])
        source.close()
        state = ctx.sequence_state(0)
        whole = ctx.context_state()
    data = state.to_bytes()
    del source, ctx
    other = make_context("llama", type_k="f16", type_v="f16", flash_attn="auto", n_seq_max=1)
    other.restore_sequence(SequenceState.from_bytes(data), 0)
    other.restore_sequence(whole.sequence(0), 0)
    other.restore_sequence(state[:20], 0)
    assert other.kv_cache_seq_pos_max(0) == 19
