"""Raw states: llama.cpp's bytes out and in, checked before anything is touched."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pykvcache import LlamaContext
from pykvcache.errors import (
    NoKvCacheSlot,
    PositionError,
    SequenceIdError,
    StateDamaged,
    StateError,
    StateLayoutMismatch,
    StateTrailingBytes,
    StateTruncated,
    UnsupportedOperation,
)
from support.models import MODELS, RIGHT, usual
from support.raw_states import runs

if TYPE_CHECKING:
    from conftest import ContextFactory, FreshLogits

WORDS = np.random.default_rng(5).integers(5, 250, 120).astype(np.int32)
CACHED = [name for name in usual(MODELS) if MODELS[name].has_states]
CASES = [
    pytest.param(name, unified, id=f"{name}-{'unified' if unified else 'streams'}")
    for name, unified in product(CACHED, (True, False))
    if (MODELS[name].can_unify if unified else MODELS[name].can_stream)
]


def next_logits(ctx: LlamaContext, seq_id: int = 0, token: int = 9) -> Any:
    ctx.decode(np.array([token], np.int32), seq_id=seq_id)
    return ctx.logits()


def held(ctx: LlamaContext) -> dict[int, tuple[int, int, int]]:
    return {s: (r.pos_min, r.pos_max, r.n_cells) for s, r in ctx.sequences().items()}


@pytest.mark.parametrize(("name", "unified"), CASES)
@pytest.mark.parametrize("n", [3, 100])
def test_a_restored_sequence_continues_unchanged(
    name: str, unified: bool, n: int, make_context: ContextFactory, fresh_logits: FreshLogits
) -> None:
    ctx = make_context(name, n_ctx=1024, kv_unified=unified)
    ctx.decode(WORDS[:n], seq_id=1)
    state = ctx.get_state(1)
    assert len(state) == ctx.state_size(1)
    ctx.decode(WORDS[50:60], seq_id=2)
    ctx.set_state(state, 2)
    want = fresh_logits(name, [*WORDS[:n], 9])
    assert np.abs(next_logits(ctx, 2) - want).max() < RIGHT
    assert np.abs(next_logits(ctx, 1) - want).max() < RIGHT
    # Elsewhere, with room for other sequences and more cells.
    other = make_context(name, n_ctx=1024, kv_unified=unified)
    other.set_state(bytes(state), 0)
    assert np.abs(next_logits(other) - want).max() < RIGHT


@pytest.mark.parametrize(("name", "unified"), CASES)
def test_a_restored_context_continues_unchanged(
    name: str, unified: bool, make_context: ContextFactory, fresh_logits: FreshLogits
) -> None:
    ctx = make_context(name, n_ctx=512, kv_unified=unified)
    ctx.decode(WORDS[:70], seq_id=0)
    ctx.copy_kv_cache_seq(0, 2)
    ctx.decode(WORDS[70:74], seq_id=2)
    ctx.decode(WORDS[80:90], seq_id=3)
    state = ctx.get_state()
    before = held(ctx)
    other = make_context(name, n_ctx=512, kv_unified=unified)
    other.decode(WORDS[:5], seq_id=1)
    other.set_state(state)
    assert held(other) == before
    if not MODELS[name].has_recurrent_state:
        assert other.n_cells_used == ctx.n_cells_used
    for seq, tokens in ((0, WORDS[:70]), (2, WORDS[:74]), (3, WORDS[80:90])):
        want = fresh_logits(name, [*tokens, 9])
        assert np.abs(next_logits(other, seq) - want).max() < RIGHT


def test_a_pending_shift_is_applied_before_bytes_are_taken(make_context: ContextFactory) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    ctx.kv_cache_seq_add(0, 0, None, 7)
    state = ctx.get_state(0)
    ctx.set_state(state, 1)
    assert np.abs(next_logits(ctx, 1) - next_logits(ctx, 0)).max() < RIGHT
    assert ctx.kv_cache_seq_pos_min(1) == 7


def test_a_pending_stream_copy_is_applied_before_bytes_are_taken(
    make_context: ContextFactory, fresh_logits: FreshLogits
) -> None:
    ctx = make_context("llama", kv_unified=False, n_ctx=512)
    ctx.decode(WORDS[:20])
    ctx.copy_kv_cache_seq(0, 1)
    state = ctx.get_state(1)
    ctx.copy_kv_cache_seq(0, 2)
    ctx.set_state(state, 2)  # a pending copy into 2 must not overwrite the restored cells
    ctx.decode(WORDS[30:32], seq_id=0)
    for seq in (1, 2):
        want = fresh_logits("llama", [*WORDS[:20], 9])
        assert np.abs(next_logits(ctx, seq) - want).max() < RIGHT


@pytest.mark.parametrize("kind", [bytearray, np.zeros, memoryview])
def test_the_caller_may_pass_a_buffer(kind: Any, make_context: ContextFactory) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    want = ctx.get_state(0)
    size = ctx.state_size(0)
    room: Any = {
        bytearray: lambda: bytearray(size + 5),
        np.zeros: lambda: np.zeros(size // 4 + 2, np.float32),
        memoryview: lambda: memoryview(bytearray(size)),
    }[kind]()
    got = ctx.get_state(0, out=room)
    assert got.nbytes == size
    assert np.array_equal(got, want)
    assert bytes(memoryview(room).cast("B")[:size]) == want.tobytes()


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (bytes(10_000_000), ValueError),
        (bytearray(10), ValueError),
        (np.zeros((4000, 4000), np.uint8)[:, ::2], ValueError),
        (np.array([None] * 10_000_000), TypeError),
        ("text", TypeError),
        (17, TypeError),
    ],
    ids=["read-only", "small", "strided", "objects", "str", "int"],
)
def test_an_unsuitable_buffer_is_refused(
    out: Any, error: type[Exception], make_context: ContextFactory
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    with pytest.raises(error, match="out"):
        ctx.get_state(0, out=out)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa"])
@pytest.mark.parametrize("whole", [False, True])
def test_every_truncation_and_every_trailing_byte_is_refused(
    name: str, whole: bool, make_context: ContextFactory
) -> None:
    ctx = make_context(name)
    ctx.decode(WORDS[:40], seq_id=1)
    target = None if whole else 1
    state = ctx.get_state(target)
    ctx.clear_kv_cache()
    ctx.decode(WORDS[:7], seq_id=1)
    before = ctx.get_state().tobytes()
    cuts = np.random.default_rng(1).integers(0, len(state), 200)
    for n in {0, 1, 7, 8, 12, len(state) - 1, *cuts.tolist()}:
        with pytest.raises(StateTruncated):
            ctx.set_state(state[:n], target)
    for extra in (1, 4, 100):
        with pytest.raises(StateTrailingBytes):
            ctx.set_state(np.append(state, np.zeros(extra, np.uint8)), target)
    assert ctx.get_state().tobytes() == before


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa"])
@pytest.mark.parametrize("whole", [False, True])
def test_damaged_structure_changes_nothing(
    name: str, whole: bool, make_context: ContextFactory
) -> None:
    """A flipped bit is refused with nothing changed, or is in data that cannot be checked."""
    ctx = make_context(name)
    ctx.decode(WORDS[:12], seq_id=1)
    target = None if whole else 1
    state = ctx.get_state(target)
    before = ctx.get_state().tobytes()
    rng = np.random.default_rng(2)
    refused = 0
    for _ in range(400):
        bad = state.copy()
        at = int(rng.integers(0, 300) if rng.random() < 0.7 else rng.integers(0, len(bad)))
        bad[at] ^= 1 << int(rng.integers(0, 8))
        try:
            ctx.set_state(bad, target)
        except (StateError, PositionError, NoKvCacheSlot):
            refused += 1
            assert ctx.get_state().tobytes() == before
        else:
            ctx.set_state(state, target)
            assert ctx.get_state().tobytes() == before
    assert refused > 20


@pytest.mark.hazard("S23")
def test_a_negative_position_is_refused(make_context: ContextFactory) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:12])
    state = ctx.get_state(0)
    at = 16  # magic, sequence, streams, cells; then the first cell's position
    state[at : at + 4] = np.frombuffer(np.int32(-7).tobytes(), np.uint8)
    with pytest.raises(StateDamaged, match="position -7"):
        ctx.set_state(state, 1)


def test_parts_that_end_differently_are_refused(make_context: ContextFactory) -> None:
    ctx = make_context("jamba")
    ctx.decode(WORDS[:12])
    state = ctx.get_state(0)
    where = {run.part: run.offset for run in runs(ctx, state, whole=False) if run.what == "cells"}
    state[where["recurrent"]] += 1
    with pytest.raises(StateDamaged, match="same position"):
        ctx.set_state(state, 1)


MISFITS: dict[str, dict[str, Any]] = {
    "type": {"type_k": "f16"},
    "transposed": {"flash_attn": "enabled"},
    "streams": {"kv_unified": False},
}


@pytest.mark.hazard("S7", "S27")
@pytest.mark.parametrize("options", MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_of_another_memory_is_refused(
    options: dict[str, Any], whole: bool, make_context: ContextFactory
) -> None:
    ctx, other = make_context("llama"), make_context("llama", **options)
    ctx.decode(WORDS[:12])
    other.decode(WORDS[:5])
    before = other.get_state().tobytes()
    with pytest.raises(StateLayoutMismatch):
        other.set_state(ctx.get_state(None if whole else 0), None if whole else 0)
    assert other.get_state().tobytes() == before


def test_a_state_of_another_model_is_refused(make_context: ContextFactory) -> None:
    state = make_context("llama")
    state.decode(WORDS[:12])
    for name in ("llama3l", "gemma3", "mamba", "jamba"):
        other = make_context(name)
        for target in (0, None):
            with pytest.raises(StateError):
                other.set_state(state.get_state(target), target)
            assert held(other) == {}


def test_sequences_that_do_not_exist_here_are_refused(make_context: ContextFactory) -> None:
    ctx, other = make_context("llama"), make_context("llama", n_seq_max=2)
    ctx.decode(WORDS[:12], seq_id=3)
    with pytest.raises(StateLayoutMismatch, match="sequence 3; this context has 2"):
        other.set_state(ctx.get_state())
    other.set_state(ctx.get_state(3), 1)
    for bad in (-1, 2, 300, 2**40):
        with pytest.raises((SequenceIdError, OverflowError)):
            other.set_state(ctx.get_state(3), bad)
        with pytest.raises((SequenceIdError, OverflowError)):
            other.get_state(bad)


def test_a_full_cache_refuses_and_stays_unchanged(make_context: ContextFactory) -> None:
    ctx = make_context("llama", n_ctx=256)
    ctx.decode(np.resize(WORDS, 200), seq_id=0)
    state = ctx.get_state(0)
    ctx.decode(WORDS[:20], seq_id=1)
    before = ctx.get_state().tobytes()
    with pytest.raises(NoKvCacheSlot, match="220 of 256 are taken"):
        ctx.set_state(state, 2)
    with pytest.raises(NoKvCacheSlot, match="200 of 256 are taken"):
        ctx.set_state(state, 1)
    assert ctx.get_state().tobytes() == before
    ctx.set_state(state, 0)  # the replaced cells make room
    small = make_context("llama", n_ctx=256, n_seq_max=1)
    big = make_context("llama", n_ctx=1024, n_seq_max=1)
    big.decode(np.resize(WORDS, 300))
    for target in (0, None):
        with pytest.raises(NoKvCacheSlot, match="300 cells"):
            small.set_state(big.get_state(target), target)


@pytest.mark.hazard("S28")
def test_restoring_an_empty_state_empties_the_target(make_context: ContextFactory) -> None:
    for name in ("llama", "gemma3", "mamba", "jamba"):
        ctx = make_context(name)
        nothing, empty = ctx.get_state(0), ctx.get_state()
        ctx.decode(WORDS[:10], seq_id=2)
        ctx.decode(WORDS[:10], seq_id=1)
        ctx.set_state(nothing, 2)
        assert list(held(ctx)) == [1]
        ctx.set_state(empty)
        assert held(ctx) == {}


@pytest.mark.hazard("S32")
def test_a_restored_sequence_has_no_logits(make_context: ContextFactory) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:10])
    row = ctx.logits()
    ctx.set_state(ctx.get_state(0), 1)
    assert (ctx.logits() == row).all()  # sequence 0 is unchanged
    ctx.set_state(ctx.get_state(0), 0)
    with pytest.raises(IndexError, match="are gone"):
        ctx.logits()


def test_memories_without_states_are_refused(make_context: ContextFactory) -> None:
    for name in ("bert", "t5"):
        ctx = make_context(name, n_seq_max=1)
        for call in (ctx.state_size, ctx.get_state, lambda c=ctx: c.set_state(b"")):
            with pytest.raises(UnsupportedOperation):
                call()
