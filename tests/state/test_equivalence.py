"""A saved and loaded sequence continues like the original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Case, Fresh, Make, apart
from memory.ledger_kit import Twin
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, SequenceState
from pykvcache.state import ContextState
from state.kit import CASES, WORDS, next_logits
from support.models import RIGHT, make_model

RECURRENT = [
    case
    for case in CASES
    if (info := case.values[0].info).has_recurrent_state and not info.bounded  # type: ignore[union-attr]
]


def build(make_context: Make, case: Case) -> LlamaContext:
    return make_context(case.name, **case.options)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_context_has_every_sequence(
    case: Case, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx, alone = build(make_context, case), build(make_context, case)
    held = {0: WORDS[:70], 2: WORDS[:74], 3: WORDS[80:90]}
    ctx.decode(held[0], seq_id=0)
    ctx.copy_kv_cache_seq(0, 2)
    ctx.decode(WORDS[70:74], seq_id=2)
    ctx.decode(held[3], seq_id=3)
    ctx.save_context(tmp_path / "all", tokens=held, metadata={"who": "all"})
    state = ContextState.load(tmp_path / "all")
    assert state.sequence_ids == [0, 2, 3]
    assert state.metadata == {"who": "all"}
    assert state.n_tokens == 154
    for seq, tokens in held.items():
        assert np.array_equal(state.tokens[seq], tokens)
        alone.restore_sequence(state.sequence(seq), 1)
        want = fresh_logits(case.name, [*tokens, 9])
        assert apart(next_logits(alone, 1), want) < case.tolerance


def test_a_sequence_whose_later_tokens_lie_before_its_first_ones(
    make_context: Make, fresh_logits: Fresh
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
    name: str, unified: bool, make_context: Make, model_folder: Path, tmp_path: Path
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
    case: Case, make_context: Make, tmp_path: Path
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


def test_an_idle_sequence_whose_window_cells_were_all_reused(
    model: Callable[..., LlamaModel], make_context: Make, tmp_path: Path
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


def test_states_outlive_their_context_and_model(model_folder: Path, make_context: Make) -> None:
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
