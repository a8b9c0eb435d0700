"""Every memory and every type, out and back: bit by bit, and the next logits are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import StateError, UnsupportedOperation
from pykvcache.kv import SequenceKV
from support.models import EXACT, MODELS, RIGHT, make_model, usual

from .kit import N, different, next_logits, words

WITH_MEMORY = [name for name in usual(MODELS) if MODELS[name].has_arrays]
TYPES: dict[str, dict[str, Any]] = {
    "exact": dict(EXACT),
    "f16-flash": {"flash_attn": "enabled"},
    "bf16-transposed": {"type_k": "bf16", "type_v": "bf16", "flash_attn": "disabled"},
    "streams": {"kv_unified": False, "swa_full": False, **EXACT},
}


def context(model: LlamaModel, **options: Any) -> LlamaContext:
    streams = 1 if options.get("kv_unified", True) else 3
    return LlamaContext(model, n_ctx=256 * streams, n_seq_max=3, n_threads=1, **options)


@pytest.fixture(scope="module", params=WITH_MEMORY)
def model(request: pytest.FixtureRequest, model_folder: Path) -> LlamaModel:
    return LlamaModel(make_model(request.param, model_folder))


@pytest.mark.parametrize("types", TYPES)
def test_written_back_it_goes_on_as_if_it_had_never_stopped(model: LlamaModel, types: str) -> None:
    ctx = context(model, **TYPES[types])
    ctx.decode(words(model))
    for dtype in (None, "stored", np.float32):
        arrays = ctx.kv(0, dtype=dtype)
        ctx.write_kv(arrays, 1)
        assert different(arrays, ctx.kv(1, dtype=dtype)) == []
    ctx.write_kv(ctx.kv(0), 0)
    assert different(arrays, ctx.kv(0, dtype=dtype)) == []
    never_stopped, written = next_logits(ctx, 0), next_logits(ctx, 1)
    # In other cells sums are added up in another order, and flash attention rounds them to f16.
    tolerance = 0.05 if ctx.flash_attn else RIGHT
    assert np.abs(never_stopped - written).max() < tolerance


def test_each_part_is_there(model: LlamaModel) -> None:
    ctx = context(model, swa_full=False)
    ctx.decode(words(model))
    arrays = ctx.kv(0)
    kind = ctx.memory_kind
    assert (arrays.window is not None) == ("sliding-window" in kind)
    assert (arrays.recurrent is not None) == (kind == "recurrent" or "hybrid" in kind)
    parts = [arrays, *([arrays.window] if arrays.window else [])]
    layers = [layer.layer for part in parts for layer in part.layers]
    if arrays.window is not None:
        n_swa = ctx.memory_info.n_swa
        assert arrays.window.positions.tolist() == list(range(max(N - n_swa, 0), N))
    if arrays.recurrent is not None:
        assert arrays.recurrent.position == N - 1
        assert arrays.recurrent.first == 0
        layers += [state.layer for state in arrays.recurrent.layers]
        assert all(np.asarray(state.r).any() for state in arrays.recurrent.layers)
    assert sorted(layers) == list(range(model.n_layer))
    if kind != "recurrent":
        assert arrays.positions.tolist() == list(range(N))
    for part in parts:
        for layer in part.layers:
            assert layer.keys.shape[:2] == (len(part), model.n_head_kv)
            assert np.asarray(layer.keys).any(axis=(1, 2)).all()
            assert np.asarray(layer.values).any(axis=(1, 2)).all()


def test_into_another_context_of_another_type(model: LlamaModel) -> None:
    source, goal = context(model, **EXACT), context(model, type_k="f16", type_v="f16")
    source.decode(words(model))
    goal.write_kv(source.kv(0, dtype=np.float32), 2)
    never_stopped, written = next_logits(source, 0), next_logits(goal, 2)
    assert np.abs(never_stopped - written).max() < 0.05


@pytest.mark.parametrize("name", ["gemma3", "jamba", "lfm2_swa"])
def test_parts_that_do_not_fit_each_other_are_refused(name: str, model_folder: Path) -> None:
    model = LlamaModel(make_model(name, model_folder))
    ctx = context(model, **EXACT)
    ctx.decode(words(model))
    arrays = ctx.kv(0)
    wrong: list[dict[str, Any]] = []
    if arrays.window is not None:
        wrong += [
            {"window": None},
            {"window": arrays.window.select(np.arange(len(arrays.window) - 1))},
        ]
        wrong += [{"window": arrays.window.select(np.arange(5, len(arrays.window)))}]
    if arrays.recurrent is not None:
        earlier = type(arrays.recurrent)(N - 2, arrays.recurrent.layers)
        wrong += [{"recurrent": None}, {"recurrent": earlier}]
    else:
        wrong += [{"positions": arrays.positions + 1}]
    for change in wrong:
        with pytest.raises(StateError):
            ctx.write_kv(SequenceKV(**{**vars(arrays), **change}), 0)
    assert different(arrays, ctx.kv(0)) == []


def test_select_reaches_both_parts(model_folder: Path) -> None:
    model = LlamaModel(make_model("gemma3", model_folder))
    ctx = context(model, **EXACT)
    tokens = words(model)
    ctx.decode(tokens)
    kept = ctx.kv(0).select(np.r_[0:4, 10:36, 40:N])
    assert kept.window is not None
    assert not np.isin(kept.window.positions, np.arange(36, 40)).any()
    ctx.write_kv(kept, 1)
    ctx.clear_kv_cache_seq(0, 4, 10)
    ctx.clear_kv_cache_seq(0, 36, 40)
    assert np.abs(next_logits(ctx, 0) - next_logits(ctx, 1)).max() < RIGHT


def test_a_recurrent_state_cannot_forget_single_tokens(model_folder: Path) -> None:
    ctx = context(LlamaModel(make_model("jamba", model_folder)))
    ctx.decode(words(ctx.model))
    with pytest.raises(UnsupportedOperation, match="select"):
        ctx.kv(0).select([0, 1])


@pytest.mark.parametrize("name", ["qwen2vl", "llama"])
def test_extended_positions_are_needed_where_the_memory_has_them(
    name: str, model_folder: Path
) -> None:
    ctx = context(LlamaModel(make_model(name, model_folder)))
    ctx.decode(words(ctx.model))
    arrays = ctx.kv(0)
    extended = None if name == "qwen2vl" else np.zeros((N, 3), np.int32)
    assert (arrays.extended is None) == (name == "llama")
    with pytest.raises(StateError, match="extended"):
        ctx.write_kv(SequenceKV(arrays.positions, arrays.layers, extended), 0)


def test_an_encoders_cache_is_read_and_not_written(model_folder: Path) -> None:
    ctx = context(LlamaModel(make_model("t5", model_folder)))
    ctx.encode([5, 6, 7])
    ctx.decode([0, 9])
    arrays = ctx.kv(0)
    assert len(arrays) == 2
    with pytest.raises(UnsupportedOperation, match="encoder"):
        ctx.write_kv(arrays, 0)


@pytest.mark.parametrize("name", [n for n, i in MODELS.items() if i.memory == "other"])
def test_memories_whose_layout_is_not_known_say_so(name: str, model_folder: Path) -> None:
    model = LlamaModel(make_model(name, model_folder))
    ctx = LlamaContext(model, n_ctx=256, n_seq_max=1, n_threads=1)
    ctx.decode(words(model, 4))
    for copy in (True, False):
        with pytest.raises(UnsupportedOperation, match="kv: the layout"):
            ctx.kv(0, copy=copy)
    with pytest.raises(UnsupportedOperation, match="write_kv: "):
        ctx.write_kv(SequenceKV(np.empty(0, np.int32), []), 0)


def test_a_model_without_memory_says_so(model_folder: Path) -> None:
    ctx = LlamaContext(
        LlamaModel(make_model("bert", model_folder)), n_ctx=256, n_threads=1, embeddings=True
    )
    with pytest.raises(UnsupportedOperation, match="kv"):
        ctx.kv(0)
    with pytest.raises(UnsupportedOperation):
        ctx.write_kv(SequenceKV(np.empty(0, np.int32), []), 0)
