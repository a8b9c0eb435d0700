"""Shifts that llama.cpp accepts and gets wrong, or does not survive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import apart
from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from pykvcache.errors import UnsupportedOperation
from state.kit import next_logits
from support.blueprint import norm
from support.models import EXACT, MODELS, RIGHT, make_model, write_gguf

WORDS = np.random.default_rng(5).integers(5, 300, 24).astype(np.int32)
BY = 7


def shifted_and_fresh(model: LlamaModel, **options: Any) -> tuple[LlamaContext, LlamaContext]:
    """A sequence that was moved by BY, and one that was computed there."""
    moved, fresh = (
        LlamaContext(model, n_ctx=256, n_threads=1, **{**EXACT, **options}) for _ in range(2)
    )
    moved.decode(WORDS)
    moved.kv_cache_seq_add(0, None, None, BY)
    fresh.decode(LlamaBatch.from_arrays(WORDS, np.arange(BY, BY + len(WORDS), dtype=np.int32), 0))
    for ctx in (moved, fresh):
        ctx.decode([9])
    return moved, fresh


@pytest.mark.hazard("N23")
@pytest.mark.parametrize("times", [1, 3])
def test_yarn_does_not_stretch_the_keys_with_each_shift(model_folder: Path, times: int) -> None:
    model = LlamaModel(make_model("llama", model_folder))
    options = {**EXACT, "rope_scaling_type": "yarn", "rope_freq_scale": 0.25}
    ctx = LlamaContext(model, n_ctx=256, n_threads=1, **options)
    ctx.decode(WORDS)
    before = [np.linalg.norm(layer.keys, axis=-1) for layer in ctx.kv(0).layers]
    for _ in range(times):
        ctx.kv_cache_seq_add(0, None, None, BY)
        ctx.kv_cache_update()
    after = [np.linalg.norm(layer.keys, axis=-1) for layer in ctx.kv(0).layers]
    assert np.allclose(before, after, rtol=1e-5)
    moved, fresh = shifted_and_fresh(model, **options)
    assert apart(moved.logits(), fresh.logits()) < RIGHT


@pytest.mark.hazard("N21")
def test_quantised_keys_without_a_hadamard_matrix_are_not_moved(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "type_k": "q8_0"}
    small = LlamaModel(make_model("llama", model_folder, n_embd=128))  # heads of 32
    contexts = [LlamaContext(small, **options)]
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    large = LlamaModel(make_model("llama_h64", model_folder))
    contexts.append(LlamaContext(large, **options))
    monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE")
    for ctx in contexts:
        ctx.decode(WORDS)
        assert not ctx.kv_cache_can_shift()
        with pytest.raises(UnsupportedOperation, match="type_k='f16'"):
            ctx.kv_cache_seq_add(0, None, None, BY)
        ctx.decode([9])  # the end of the process, had the shift been accepted
    assert LlamaContext(large, **options).kv_cache_can_shift()


def partly_rotated(folder: Path) -> Path:
    """A model of which RoPE turns the first half of each head."""
    info = MODELS["gemma3"]
    sizes = replace(info.sizes, n_embd=512, n_layer=2)
    plan = info.plan(sizes, info.n_vocab)
    plan.keys[".rope.dimension_count"] = sizes.head // 2
    plan.keys[".rope.dimension_count_swa"] = sizes.head // 2
    path = folder / "partly-rotated.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(path, plan, info.vocab(), 0)
    return path


@pytest.mark.hazard("N22")
def test_partly_rotated_keys_are_moved_rightly_or_not_at_all(tmp_path: Path) -> None:
    model = LlamaModel(partly_rotated(tmp_path))
    moved, fresh = shifted_and_fresh(model)
    assert apart(moved.logits(), fresh.logits()) < RIGHT
    # The matrix has 128 columns and mixes what is rotated with what is not.
    ctx = LlamaContext(model, n_ctx=256, n_threads=1, type_k="q8_0")
    ctx.decode(WORDS)
    assert not ctx.kv_cache_can_shift()
    with pytest.raises(UnsupportedOperation, match="type_k='f16'"):
        ctx.kv_cache_seq_add(0, None, None, BY)


def smollm3(folder: Path) -> Path:
    """A model of which every fourth layer is not rotated, which no table of llama.cpp's says."""
    info = MODELS["llama"]
    plan = info.plan(replace(info.sizes, n_layer=4), info.n_vocab)
    plan.arch = "smollm3"
    path = folder / "smollm3.gguf"
    write_gguf(path, plan, info.vocab(), 0)
    return path


@pytest.mark.hazard("N24")
def test_layers_that_the_graph_does_not_rotate_are_not_rotated_by_a_shift(tmp_path: Path) -> None:
    ctx = LlamaContext(LlamaModel(smollm3(tmp_path)), n_ctx=256, n_threads=1, **EXACT)
    assert [ctx.native.rope(layer) is None for layer in range(4)] == [False, False, False, True]
    ctx.decode(WORDS)
    assert not ctx.kv_cache_can_shift()
    before = ctx.kv(0)
    with pytest.raises(UnsupportedOperation, match="another way"):
        ctx.kv_cache_seq_add(0, None, None, BY)
    # Moved in NumPy they go on as a sequence that was computed there.
    plain = ctx.kv(0, rope=False)
    assert np.array_equal(plain.layers[3].keys, before.layers[3].keys)
    ctx.write_kv(replace(plain, positions=plain.positions + BY), 1)
    fresh = LlamaContext(ctx.model, n_ctx=256, n_threads=1, **EXACT)
    fresh.decode(LlamaBatch.from_arrays(WORDS, np.arange(BY, BY + len(WORDS), dtype=np.int32), 0))
    assert apart(next_logits(ctx, 1), next_logits(fresh)) < RIGHT


def hunyuan(folder: Path) -> Path:
    """A model that weighs its keys value by value after it has rotated them."""
    info = MODELS["llama"]
    plan = info.plan(info.sizes, info.n_vocab)
    plan.arch = "hunyuan-dense"
    for layer in range(info.sizes.n_layer):
        for name in ("attn_k_norm", "attn_q_norm"):
            plan.add(f"blk.{layer}.", **{name: norm(info.sizes.head)})
    path = folder / "hunyuan.gguf"
    write_gguf(path, plan, info.vocab(), 0)
    return path


@pytest.mark.hazard("N24")
def test_keys_that_were_weighed_after_their_rotation_are_not_moved(tmp_path: Path) -> None:
    ctx = LlamaContext(LlamaModel(hunyuan(tmp_path)), n_ctx=256, n_threads=1, **EXACT)
    ctx.decode(WORDS)
    assert not ctx.kv_cache_can_shift()
    with pytest.raises(UnsupportedOperation, match="another way"):
        ctx.kv_cache_seq_add(0, None, None, BY)
    arrays = ctx.kv(0)
    with pytest.raises(UnsupportedOperation, match="not known"):
        ctx.kv(0, rope=False)
    with pytest.raises(UnsupportedOperation, match="not known"):
        ctx.write_kv(replace(arrays, rope=False), 1)
    ctx.write_kv(arrays, 1)
    assert apart(next_logits(ctx, 0), next_logits(ctx, 1)) < RIGHT
