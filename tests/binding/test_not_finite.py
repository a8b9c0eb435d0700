"""Logits and embeddings that are not finite are never handed out: one error says where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from pykvcache import BatchGenerator, LlamaBatch, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache._native import lib
from pykvcache.errors import OutputNotFinite
from pykvcache.kv import LayerState
from support.models import make_model

from .kit import differ, with_keys, words

# For mamba: far below the limit, but the resulting state is more than its cube.
LARGE = 1e15


def spoil(
    folder: Path,
    source: Path,
    tensor: str,
    place: int,
    value: float,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A copy of a model with other weights."""

    def change(name: str, data: Any) -> Any:
        if name == tensor:
            data = data.copy()
            data[place] = value
        return data

    return with_keys(source, folder / "spoilt.gguf", keys, change)


def spoilt_mamba(model_folder: Path, folder: Path) -> Path:
    """A model on which token 9 makes its sequence, and no other, NaN."""
    source = make_model("mamba", model_folder)
    keys = {"general.architecture": "mamba"}
    return spoil(folder, source, "token_embd.weight", 9, math.nan, keys)


def overflow(ctx: LlamaContext, seq: int) -> None:
    """Give a sequence a recurrent state that is accepted and whose next logits are not finite."""
    arrays = ctx.kv(0)
    assert arrays.recurrent is not None
    layers = [
        LayerState(np.full_like(layer.r, LARGE), layer.s, layer.layer)
        for layer in arrays.recurrent.layers
    ]
    ctx.write_kv(replace(arrays, recurrent=replace(arrays.recurrent, layers=layers)), seq)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("how", ["remove", "keep", "copy"])
def test_a_new_sequence_in_its_place_is_right(make_context: Any, name: str, how: str) -> None:
    # A new recurrent state is 0 times what lay there, and that was NaN.
    ctx, twin = make_context(name), make_context(name)
    ctx.decode(words(12))
    overflow(ctx, 1)
    ctx.decode([5], seq_id=1)
    with pytest.raises(OutputNotFinite):
        ctx.logits()
    if how == "remove":
        ctx.clear_kv_cache_seq(1)
    elif how == "keep":
        ctx.kv_cache_seq_keep(0)
    else:
        ctx.copy_kv_cache_seq(0, 1)
        ctx.clear_kv_cache_seq(1)
    twin.decode(words(12))
    for seq in (0, 1):
        for one in (ctx, twin):
            one.decode([5, 6], seq_id=seq)
        assert differ(ctx.logits(), twin.logits()) == 0


def test_a_new_sequence_after_nan_in_a_convolution_is_right(
    model_folder: Path, tmp_path: Path
) -> None:
    source = make_model("qwen4exp", model_folder)
    keys = {"general.architecture": "qwen4exp"}
    path = spoil(tmp_path, source, "token_embd.weight", 9, math.nan, keys)
    with LlamaModel(path) as model:
        ctx, twin = (LlamaContext(model, n_seq_max=2, kv_unified=False) for _ in range(2))
        ctx.decode([5, 6, 9], seq_id=1)
        with pytest.raises(OutputNotFinite):
            ctx.logits()
        ctx.clear_kv_cache_seq(1)
        for one in (ctx, twin):
            one.decode([5, 6], seq_id=1)
        assert differ(ctx.logits(), twin.logits()) == 0


@pytest.mark.hazard("N13", "N77")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_are_handed_out_as_numbers_or_not_at_all(
    model_folder: Path, tmp_path: Path, value: float
) -> None:
    path = spoil(tmp_path, make_model("llama", model_folder), "output.weight", 7, value)
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode(words(5))
        for read in (ctx.logits, lambda: Sampler().sample(ctx), lambda: Sampler().logprobs(ctx)):
            with pytest.raises(OutputNotFinite, match="place 7 is nan") as caught:
                read()
            error = caught.value
            assert (error.what, error.index, error.place) == ("logits", 4, 7)
            assert math.isnan(error.value)
            assert isinstance(error, ArithmeticError)
        with pytest.raises(
            OutputNotFinite, match="what this call decoded stays, tokens: 2"
        ) as caught:
            next(ctx.generate([5, 6], 3))
        assert caught.value.n_decoded == 2
        assert ctx.kv_cache_seq_pos_max(0) == 6


def test_embeddings_are_looked_at_too(model_folder: Path, tmp_path: Path) -> None:
    path = spoilt_mamba(model_folder, tmp_path)
    options: dict[str, Any] = {"n_ctx": 64, "embeddings": True, "n_seq_max": 2}
    with LlamaModel(path) as model:
        with LlamaContext(model, **options) as ctx:
            ctx.decode([5, 9])
            assert np.isfinite(ctx.embeddings(0)).all()
            with pytest.raises(OutputNotFinite) as caught:
                ctx.embeddings(1)
            assert (caught.value.what, caught.value.index) == ("embeddings", 1)
        with LlamaContext(model, pooling_type="mean", **options) as ctx:
            ctx.decode(LlamaBatch.from_arrays([5, 9], [0, 0], np.array([0, 1]), True))
            assert np.isfinite(ctx.seq_embeddings(0)).all()
            with pytest.raises(OutputNotFinite, match="sequence 1"):
                ctx.seq_embeddings(1)


def test_every_place_of_a_row_is_looked_at() -> None:
    bits = (0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF)
    bad = np.array(bits, np.uint32).view(np.float32)
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 100):
        row = np.full(n, 3.4e38, np.float32)  # the largest exponent that is finite
        assert lib.first_not_finite(row, True) == -1
        for place in range(n):
            row[place] = bad[(n + place) % len(bad)]
            assert lib.first_not_finite(row, True) == place
            row[place] = -np.inf  # a token that cannot come
            assert lib.first_not_finite(row, True) == -1
            assert lib.first_not_finite(row, False) == place
            row[place] = -3.4e38


@pytest.mark.hazard("N77")
def test_a_request_with_nan_logits_ends_alone(model_folder: Path, tmp_path: Path) -> None:
    path = spoilt_mamba(model_folder, tmp_path)
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_seq_max=4) as ctx:
        generator = BatchGenerator(ctx)
        bad = generator.submit([5, 6, 9], max_tokens=4)
        good = generator.submit([5, 6, 7], max_tokens=4)
        generator.run()
        assert len(good.tokens) == 4
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, OutputNotFinite)
        sequence = LlamaSequence(ctx)
        sequence.append([5, 9])
        for _ in range(2):
            with pytest.raises(OutputNotFinite):
                sequence.logits()
        sequence.truncate(1)
        assert np.isfinite(sequence.logits()).all()
