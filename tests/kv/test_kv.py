"""Keys and values out of a live context, and back: bit for bit, or refused with nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache.errors import StateError
from pykvcache.kv import LayerKV, SequenceKV
from support.models import EXACT

from .kit import different

WORDS = np.random.default_rng(3).integers(5, 300, 60).astype(np.int32)
TYPES: dict[str, dict[str, Any]] = {
    "f32": dict(EXACT),
    "mixed-flash": {"type_k": "f32", "type_v": "f16", "flash_attn": "enabled"},
}


@pytest.mark.hazard("S1")
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("types", TYPES)
def test_removed_and_shifted_cells_are_read_as_they_are_now(
    types: str, unified: bool, make_context: Make
) -> None:
    ctx = make_context("llama_h64", n_ctx=1024, kv_unified=unified, **TYPES[types])
    ctx.decode(WORDS[:30])
    before = ctx.kv(0)
    ctx.clear_kv_cache_seq(0, 4, 10)
    ctx.kv_cache_seq_add(0, 10, None, -6)  # pending: kv() applies it first
    after = ctx.kv(0)
    assert after.positions.tolist() == list(range(24))
    rest = np.r_[0:4, 10:30]
    for was, now in zip(before.layers, after.layers, strict=True):
        assert np.array_equal(was.keys[:4], now.keys[:4])
        assert not np.allclose(was.keys[rest][4:], now.keys[4:], atol=1e-3)
        assert np.array_equal(was.values[rest], now.values)


def test_a_fork_is_read_without_the_rest_of_the_cache(make_context: Make) -> None:
    ctx = make_context("llama_h64", n_ctx=512)
    ctx.decode(WORDS[:20])
    ctx.copy_kv_cache_seq(0, 1)
    ctx.decode(WORDS[20:25], seq_id=1)
    ctx.decode(WORDS[25:30], seq_id=0)
    assert len(ctx.kv(0)) == len(ctx.kv(1)) == 25
    ctx.write_kv(ctx.kv(0), 1)  # cells that another sequence shares are left alone
    assert different(ctx.kv(0), ctx.kv(1)) == []
    assert ctx.n_cells_used == 50


def broken(arrays: SequenceKV) -> dict[str, SequenceKV]:
    first = arrays.layers[0]
    rest = list(arrays.layers[1:])
    nan = first.keys.copy()
    nan[0, 0, 0] = np.nan
    return {
        "a layer less": SequenceKV(arrays.positions, rest),
        "a layer more": SequenceKV(arrays.positions, [first, *rest, first]),
        "other heads": SequenceKV(
            arrays.positions, [LayerKV(first.keys[:, :1], first.values), *rest]
        ),
        "fewer tokens": SequenceKV(arrays.positions[:-1], arrays.layers),
        "integers": SequenceKV(
            arrays.positions, [LayerKV(first.keys.astype(int), first.values), *rest]
        ),
        "NaN": SequenceKV(arrays.positions, [LayerKV(nan, first.values), *rest]),
        "negative positions": SequenceKV(arrays.positions - 1, arrays.layers),
        "huge positions": SequenceKV(arrays.positions + np.int64(2**32), arrays.layers),
        "float positions": SequenceKV(arrays.positions * 1.0, arrays.layers),  # type: ignore[arg-type]
    }


def test_what_does_not_fit_is_refused_with_nothing_changed(make_context: Make) -> None:
    ctx = make_context("llama_h64", n_ctx=512)
    ctx.decode(WORDS[:10])
    before = ctx.kv(0)
    for arrays in broken(before).values():
        with pytest.raises(StateError):
            ctx.write_kv(arrays, 0)
    for other in (None, 0, SequenceKV(np.zeros(1, np.int32), None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            ctx.write_kv(other, 0)  # type: ignore[arg-type]
    for flag in ("copy", "rope"):
        with pytest.raises(TypeError, match=f"{flag} must be True or False"):
            ctx.kv(0, **{flag: 1})  # type: ignore[arg-type]
    assert different(before, ctx.kv(0)) == []


@pytest.mark.hazard("N15")
@pytest.mark.filterwarnings("error")
def test_values_too_large_for_the_stored_type_are_refused(make_context: Make) -> None:
    ctx = make_context("llama_h64", type_k="f16", type_v="f16")
    ctx.decode(WORDS[:5])
    arrays = ctx.kv(0)
    first, *rest = arrays.layers
    huge = LayerKV(np.full(first.keys.shape, 1e6, np.float32), first.values)
    with pytest.raises(StateError, match="too large"):
        ctx.write_kv(SequenceKV(arrays.positions, [huge, *rest]), 0)
    assert different(arrays, ctx.kv(0)) == []
