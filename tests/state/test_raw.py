"""Raw states: llama.cpp's bytes out and in, checked before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext
from pykvcache.errors import (
    NoKvCacheSlot,
    OutputNotFinite,
    PositionError,
    StateDamaged,
    StateError,
    StateFormatError,
    StateLayoutMismatch,
    StateTrailingBytes,
    StateTruncated,
)
from state.kit import WORDS, next_logits, refused
from support.raw_states import runs


@pytest.mark.parametrize("kind", [bytearray, np.zeros, memoryview])
def test_the_caller_may_pass_a_buffer(kind: Any, make_context: Make) -> None:
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
    out: Any, error: type[Exception], make_context: Make
) -> None:
    ctx = make_context("llama")
    ctx.decode(WORDS[:20])
    with pytest.raises(error, match="out"):
        ctx.get_state(0, out=out)


@pytest.mark.hazard("S8", "S9")
@pytest.mark.parametrize("is_file", [False, True], ids=["raw", "llama.cpp's file"])
@pytest.mark.parametrize("seq_id", [1, None], ids=["sequence", "context"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa"])
def test_damage_is_an_error_or_makes_another_valid_state(
    name: str, seq_id: int | None, is_file: bool, make_context: Make, tmp_path: Path
) -> None:
    """There is no checksum: other bytes may be another token, position or value."""
    ctx, path = make_context(name), tmp_path / "a"
    ctx.decode(WORDS[:12], seq_id=1)
    ctx.save_llama_file(path, seq_id, WORDS[:12])
    good = path.read_bytes() if is_file else ctx.get_state(seq_id).tobytes()
    before = ctx.get_state().tobytes()

    def put(data: bytes) -> None:
        if is_file:
            path.write_bytes(data)
            ctx.load_llama_file(path, seq_id)
        else:
            ctx.set_state(data, seq_id)

    def is_refused(data: bytes, *errors: type[Exception]) -> bool:
        try:
            put(data)
        except errors:
            assert ctx.get_state().tobytes() == before
            return True
        if ctx.kv_cache_seq_pos_max(1) < 1000:
            with suppress(OutputNotFinite):  # values may be large
                next_logits(ctx, 1, 5)
        ctx.clear_kv_cache()
        put(good)
        assert ctx.get_state().tobytes() == before
        return False

    rng = np.random.default_rng(int(os.environ.get("PYKVCACHE_FUZZ_SEED", "11")))
    for n in {0, *range(1, 400, 9), len(good) - 1, *rng.integers(0, len(good), 200).tolist()}:
        assert is_refused(good[:n], StateTruncated, *([StateFormatError] if is_file else []))
    for extra in (1, 4, 100):
        assert is_refused(good + bytes(extra), StateTrailingBytes)
    rounds = 5000 if "PYKVCACHE_FUZZ_SEED" in os.environ else 400  # `make fuzz`
    n_refused = 0
    for i in range(rounds):
        data = bytearray(good)
        end = len(data) if i % 4 == 0 else 300
        for at in rng.integers(0, end, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256) if i % 2 else data[at] ^ 1 << rng.integers(0, 8)
        n_refused += is_refused(bytes(data), StateError, NoKvCacheSlot, PositionError)
    assert n_refused > rounds / (6 if name == "mamba" else 3)  # which has no cells


def at_recurrent(ctx: LlamaContext, state: Any) -> int:
    cells = (run for run in runs(ctx, state, whole=False) if run.what == "cells")
    return next(run.offset for run in cells if run.part == "recurrent")


FORGED: dict[str, tuple[str, int | None, Callable[..., int], list[int], str]] = {
    # Magic, sequence, streams, cells; then the first cell's position.
    "negative position": ("llama", 0, lambda *_: 16, [249, 255, 255, 255], "position -7"),
    "parts that end differently": ("jamba", 0, at_recurrent, [12], "same position"),
    # llama.cpp asserts a single one.
    "two states": ("mamba", 0, lambda *_: 8, [2, 0, 0, 0], ""),
    # llama.cpp makes room for it first.
    "a name of 4 GB": ("llama", None, lambda *_: 0, [255] * 4, ""),
}


@pytest.mark.hazard("S21", "S22", "S23")
@pytest.mark.parametrize("what", FORGED)
def test_a_forged_state_is_damaged(what: str, make_context: Make) -> None:
    name, seq_id, place, values, match = FORGED[what]
    ctx = make_context(name)
    ctx.decode(WORDS[:12])
    state = ctx.get_state(seq_id)
    at = place(ctx, state)
    state[at : at + len(values)] = values
    with refused(ctx, StateDamaged, NoKvCacheSlot, match=match or None):
        ctx.set_state(state, seq_id)


MISFITS: dict[str, dict[str, Any]] = {
    "type": {"type_k": "f16"},
    "transposed": {"flash_attn": "enabled"},
    "streams": {"kv_unified": False},
}


@pytest.mark.hazard("S7", "S27")
@pytest.mark.parametrize("options", MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_state_of_another_memory_is_refused(
    options: dict[str, Any], whole: bool, make_context: Make
) -> None:
    ctx, other = make_context("llama"), make_context("llama", **options)
    ctx.decode(WORDS[:12])
    other.decode(WORDS[:5])
    with refused(other, StateLayoutMismatch):
        other.set_state(ctx.get_state(None if whole else 0), None if whole else 0)
