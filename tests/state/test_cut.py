"""Cut and join: prefixes and blocks, bit for bit, where the memory can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart
from memory.ledger_kit import Twin
from pykvcache import SequenceState
from pykvcache.errors import StateError, StateLayoutMismatch, UnsupportedOperation
from state.kit import WORDS, next_logits, refused
from support.models import RIGHT, make_model

N_SWA = 32


@pytest.mark.parametrize("flash", ["disabled", "enabled"])
@pytest.mark.parametrize("name", ["llama", "qwen2vl"])
def test_a_prefix_is_what_a_fresh_run_holds(
    name: str, flash: str, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(name, flash_attn=flash)
    ctx.decode(WORDS[:50])
    state = ctx.sequence_state(0, WORDS[:50], {"a": 1})
    for n in (0, 1, 17, 49, 50):
        cut = state[:n]
        assert np.array_equal(cut.positions, np.arange(n))
        assert np.array_equal(np.asarray(cut.tokens), WORDS[:n])
        assert cut.metadata == {"a": 1}
        assert SequenceState.from_bytes(cut.to_bytes()).to_bytes() == cut.to_bytes()
        for i, (whole, part) in enumerate(
            zip(state.parts[0].tensors, cut.parts[0].tensors, strict=True)
        ):
            axis = int(state.parts[0].is_transposed(i))
            assert np.array_equal(whole.take(range(n), axis), part)
        ctx.restore_sequence(cut, 1)
        assert ctx.kv_cache_seq_pos_max(1) == n - 1
        ctx.copy_kv_cache_seq(0, 2, 0, n) if n else ctx.clear_kv_cache_seq(2)
        assert ctx.sequence_state(2).to_bytes() == ctx.sequence_state(1).to_bytes()
        if flash == "disabled":
            want = fresh_logits(name, [*WORDS[:n], 9])
            assert apart(next_logits(ctx, 1), want) < RIGHT


@pytest.mark.parametrize("size", [1, 16, 1000])
@pytest.mark.parametrize("name", ["llama", "qwen2vl"])
def test_blocks_are_joined_again(
    name: str, size: int, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(name)
    ctx.decode(WORDS[:50])
    state = ctx.sequence_state(0, WORDS[:50], {"a": 1})
    blocks = state.blocks(size)
    assert [len(block) for block in blocks] == [min(size, 50 - at) for at in range(0, 50, size)]
    # Saved one by one, and read again.
    again = [SequenceState.from_bytes(block.to_bytes()) for block in blocks]
    joined = SequenceState.join(again)
    assert joined.to_bytes() == state.to_bytes()
    ctx.restore_sequence(joined, 1)
    want = fresh_logits(name, [*WORDS[:50], 9])
    assert apart(next_logits(ctx, 1), want) < RIGHT
    if size == 16:
        ctx.restore_sequence(SequenceState.join(again[:2]), 2)
        want = fresh_logits(name, [*WORDS[:32], 9])
        assert apart(next_logits(ctx, 2), want) < RIGHT


def test_blocks_with_gaps_are_a_sequence_with_removed_tokens(
    make_context: Make, model_folder: Path
) -> None:
    twin = Twin(make_context("llama"), make_model("llama", model_folder))
    twin.decode(0, 40)
    blocks = twin.ctx.sequence_state(0).blocks(10)
    twin.copy(0, 1)
    twin.remove(1, 10, 20)
    twin.ctx.restore_sequence(SequenceState.join([blocks[0], blocks[2], blocks[3]]), 1)
    twin.decode(1, 3)
    # A block alone, which does not begin at 0.
    twin.copy(0, 2)
    twin.remove(2, 0, 20)
    twin.remove(2, 30)
    twin.ctx.restore_sequence(blocks[2], 2)
    twin.decode(2, 3)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("pieces", [1, 13, 400])
def test_a_prefix_of_a_window_is_right_or_refused(
    full: bool, pieces: int, make_context: Make, fresh_logits: Fresh
) -> None:
    """Every prefix continues correctly or is refused, and no more are refused than necessary."""
    n = 90
    ctx = make_context("gemma3", swa_full=full, n_ctx=2048, n_ubatch=32)
    for at in range(0, n, pieces):
        ctx.decode(WORDS[at : min(at + pieces, n)])
    state = ctx.sequence_state(0, WORDS[:n])
    held = set(state.parts[1].positions.tolist())
    for m in range(n + 1):
        sees = set(range(max(0, m + 1 - N_SWA), m))
        if not sees <= held:
            with pytest.raises(UnsupportedOperation, match="would see"):
                state[:m]
            continue
        cut = state[:m]
        assert len(cut) == m
        if m % 10 == 0 or m > n - 3:
            ctx.restore_sequence(SequenceState.from_bytes(cut.to_bytes()), 1)
            want = fresh_logits("gemma3", [*WORDS[:m], 9])
            assert apart(next_logits(ctx, 1), want) < 10 * RIGHT
    with pytest.raises(UnsupportedOperation, match="prefix"):
        state[1:]
    for call in (lambda: state.blocks(16), lambda: state.blocks(1000)):
        with pytest.raises(UnsupportedOperation, match="plain attention"):
            call()


@pytest.mark.parametrize("name", ["mamba", "jamba", "lfm2_swa"])
def test_a_recurrent_state_cannot_be_cut_or_joined(name: str, make_context: Make) -> None:
    ctx = make_context(name)
    ctx.decode(WORDS[:20])
    state = ctx.sequence_state(0)
    assert state[:] is state
    assert state[:20] is state
    for cut in (slice(0, 19), slice(0, 1), slice(1, 20)):
        with pytest.raises(UnsupportedOperation, match="recurrent"):
            state[cut]
    for call in (
        lambda: state.blocks(5),
        lambda: state.blocks(20),
        lambda: SequenceState.join([state]),
        lambda: SequenceState.join([state, state]),
    ):
        with pytest.raises(UnsupportedOperation):
            call()


def test_slices_behave_as_in_python(make_context: Make) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    state = ctx.sequence_state(0, WORDS[:20])
    for cut in (slice(-5, None), slice(3, -4), slice(15, 3), slice(None, 99), slice(30, 40)):
        assert np.array_equal(state[cut].positions, np.arange(20)[cut])
        assert np.array_equal(np.asarray(state[cut].tokens), WORDS[:20][cut])
    assert state[4:12][2:5].to_bytes() == state[6:9].to_bytes()
    for bad in (3, "a", None, (1, 2), np.arange(3)):
        with pytest.raises(TypeError):
            state[bad]  # type: ignore[index]
    for step in (2, -1, 0):
        with pytest.raises(ValueError, match="step"):
            state[::step]
    sizes: Any
    for sizes in (0, -1, 2**40):
        with pytest.raises(ValueError, match="size"):
            state.blocks(sizes)
    for sizes in (1.5, "a", True, None):
        with pytest.raises(TypeError):
            state.blocks(sizes)


def test_parts_of_different_states_are_not_joined(make_context: Make) -> None:
    ctx, half = make_context("llama"), make_context("llama", type_k="f16")
    for one in (ctx, half):
        one.decode(WORDS[:20])
    state = ctx.sequence_state(0)
    a, b = state[:10], state[10:]
    for wrong in ([b, a], [a, a], [a, state], [a, b, b], [state[:11], b]):
        with pytest.raises(StateError, match="cannot follow"):
            SequenceState.join(wrong)
    with pytest.raises(StateLayoutMismatch):
        SequenceState.join([a, half.sequence_state(0)[10:]])
    with pytest.raises(ValueError, match="nothing"):
        SequenceState.join([])
    with pytest.raises(TypeError):
        SequenceState.join([a, b.to_bytes()])  # type: ignore[list-item]
    # Tokens are kept where all have them.
    known = ctx.sequence_state(0, WORDS[:20])
    assert SequenceState.join([known[:10], b]).tokens is None
    assert SequenceState.join([state[:0], a, state[10:10], b]).to_bytes() == state.to_bytes()
    with refused(half, StateLayoutMismatch):
        half.restore_sequence(a, 1)
