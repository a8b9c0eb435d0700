"""Raw states: llama.cpp's bytes out and in, checked before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pykvcache.errors import (
    NoKvCacheSlot,
    PositionError,
    StateDamaged,
    StateError,
    StateLayoutMismatch,
    StateTrailingBytes,
    StateTruncated,
)
from state.kit import WORDS, refused
from support.raw_states import runs

if TYPE_CHECKING:
    from conftest import ContextFactory


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
    with refused(other, StateLayoutMismatch):
        other.set_state(ctx.get_state(None if whole else 0), None if whole else 0)
