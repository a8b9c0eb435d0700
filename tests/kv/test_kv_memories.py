"""Every memory and every type, out and back: bit by bit, and the next logits are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache.errors import StateError, UnsupportedOperation
from pykvcache.kv import SequenceKV
from state.kit import next_logits
from support.models import MODELS, RIGHT, usual

from .kit import N, different, words

WITH_MEMORY = [name for name in usual(MODELS) if MODELS[name].has_arrays]
TYPES: dict[str, dict[str, Any]] = {
    "exact": {},
    "f16-flash": {"type_k": "f16", "type_v": "f16", "flash_attn": "enabled"},
    "bf16-transposed": {"type_k": "bf16", "type_v": "bf16"},
    "streams": {"kv_unified": False, "swa_full": False, "n_ctx": 1024},
}
every_memory = pytest.mark.parametrize("name", WITH_MEMORY)


@pytest.mark.parametrize("types", TYPES)
@every_memory
def test_written_back_it_goes_on_as_if_it_had_never_stopped(
    name: str, types: str, make_context: Make
) -> None:
    ctx = make_context(name, **TYPES[types])
    ctx.decode(words(ctx.model))
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


@every_memory
def test_each_part_is_there(name: str, make_context: Make) -> None:
    ctx = make_context(name, swa_full=False)
    ctx.decode(words(ctx.model))
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
    assert sorted(layers) == list(range(ctx.model.n_layer))
    if kind != "recurrent":
        assert arrays.positions.tolist() == list(range(N))
    for part in parts:
        for layer in part.layers:
            assert layer.keys.shape[:2] == (len(part), ctx.model.n_head_kv)
            assert np.asarray(layer.keys).any(axis=(1, 2)).all()
            assert np.asarray(layer.values).any(axis=(1, 2)).all()


@every_memory
def test_into_another_context_of_another_type(name: str, make_context: Make) -> None:
    source, goal = make_context(name), make_context(name, type_k="f16", type_v="f16")
    source.decode(words(source.model))
    goal.write_kv(source.kv(0, dtype=np.float32), 2)
    never_stopped, written = next_logits(source, 0), next_logits(goal, 2)
    assert np.abs(never_stopped - written).max() < 0.05


@pytest.mark.parametrize("name", ["gemma3", "jamba", "lfm2_swa", "mamba"])
def test_parts_that_do_not_fit_each_other_are_refused(name: str, make_context: Make) -> None:
    ctx = make_context(name)
    ctx.decode(words(ctx.model))
    arrays = ctx.kv(0)
    wrong: list[tuple[dict[str, Any], type[Exception]]] = []
    if arrays.window is not None:
        kept = (range(len(arrays.window) - 1), range(5, len(arrays.window)))
        wrong += [({"window": arrays.window.select(k)}, StateError) for k in kept]
        later = replace(arrays.window, positions=arrays.window.positions + 1)
        wrong += [({"window": later}, StateError), ({"window": None}, StateError)]
        wrong += [({"window": 5}, TypeError)]
    if arrays.recurrent is not None:
        foreign = replace(arrays.recurrent, layers=[5] * len(arrays.recurrent.layers))
        wrong += [({"recurrent": None}, StateError), ({"recurrent": foreign}, TypeError)]
        wrong += [({"recurrent": 5}, TypeError)]
    if arrays.recurrent is not None and arrays.layers:
        earlier = replace(arrays.recurrent, position=N - 2)
        wrong += [({"recurrent": earlier}, StateError)]
    else:
        wrong += [({"positions": np.arange(1, N + 1, dtype=np.int32)}, StateError)]
    for change, error in wrong:
        with pytest.raises(error):
            ctx.write_kv(replace(arrays, **change), 0)
    assert different(arrays, ctx.kv(0)) == []


def test_select_reaches_both_parts(make_context: Make) -> None:
    ctx = make_context("gemma3")
    ctx.decode(words(ctx.model))
    kept = ctx.kv(0).select(np.r_[0:4, 10:36, 40:N])
    assert kept.window is not None
    assert not np.isin(kept.window.positions, np.arange(36, 40)).any()
    ctx.write_kv(kept, 1)
    ctx.clear_kv_cache_seq(0, 4, 10)
    ctx.clear_kv_cache_seq(0, 36, 40)
    assert np.abs(next_logits(ctx, 0) - next_logits(ctx, 1)).max() < RIGHT


def test_a_recurrent_state_cannot_forget_single_tokens(make_context: Make) -> None:
    ctx = make_context("jamba")
    ctx.decode(words(ctx.model))
    with pytest.raises(UnsupportedOperation, match="select"):
        ctx.kv(0).select([0, 1])


@pytest.mark.parametrize("name", ["qwen2vl", "llama"])
def test_extended_positions_are_needed_where_the_memory_has_them(
    name: str, make_context: Make
) -> None:
    ctx = make_context(name)
    ctx.decode(words(ctx.model))
    arrays = ctx.kv(0)
    extended = None if name == "qwen2vl" else np.zeros((N, 3), np.int32)
    assert (arrays.extended is None) == (name == "llama")
    with pytest.raises(StateError, match="extended"):
        ctx.write_kv(SequenceKV(arrays.positions, arrays.layers, extended), 0)


def test_an_encoders_cache_is_read_and_not_written(make_context: Make) -> None:
    ctx = make_context("t5")
    ctx.decode([0, 9])
    arrays = ctx.kv(0)
    assert len(arrays) == 2
    with pytest.raises(UnsupportedOperation, match="encoder"):
        ctx.write_kv(arrays, 0)


@pytest.mark.parametrize("name", [n for n, i in MODELS.items() if i.memory == "other"])
def test_memories_whose_layout_is_not_known_say_so(name: str, make_context: Make) -> None:
    ctx = make_context(name, n_seq_max=1)
    ctx.decode(words(ctx.model, 4))
    for copy in (True, False):
        with pytest.raises(UnsupportedOperation, match="kv: the layout"):
            ctx.kv(0, copy=copy)
    with pytest.raises(UnsupportedOperation, match="write_kv: "):
        ctx.write_kv(SequenceKV(np.empty(0, np.int32), []), 0)


def test_a_model_without_memory_says_so(make_context: Make) -> None:
    ctx = make_context("bert")
    with pytest.raises(UnsupportedOperation, match="kv"):
        ctx.kv(0)
    with pytest.raises(UnsupportedOperation):
        ctx.write_kv(SequenceKV(np.empty(0, np.int32), []), 0)
