"""Outputs of a decode: logits, embeddings, measurements, encoders; values that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from binding.kit import differ, words
from pykvcache import BatchGenerator, LlamaBatch, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache._native import lib
from pykvcache.errors import (
    ClosedError,
    DecodeError,
    InvalidBatch,
    OutputNotFinite,
    SequenceIdError,
    UnsupportedOperation,
)
from pykvcache.introspection import PerfData
from pykvcache.kv import LayerState
from support.models import RIGHT, make_model, with_keys


def test_logits_are_indexed_by_the_batch_and_from_the_end_of_those_asked(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(LlamaBatch.from_arrays(words(6), np.arange(6), 0, np.array([0, 1, 0, 1, 0, 0])))
    assert ctx.logits().dtype == np.float32
    assert ctx.logits().shape == (320,)
    assert (ctx.logits(-1) == ctx.logits(3)).all()
    assert (ctx.logits(-2) == ctx.logits(np.int64(1))).all()
    assert (ctx.logits(1) != ctx.logits(3)).any()
    for i in (0, 2, 4, 5, 6, -3, -6):
        with pytest.raises(IndexError):
            ctx.logits(i)
    greedy = Sampler(temperature=0)
    for i in (1, 3, -1, -2):
        assert greedy.sample(ctx, i) == int(ctx.logits(i).argmax())


@pytest.mark.hazard("D33", "D34", "D36")
def test_logits_are_copies_that_outlive_the_context(make_context: Any) -> None:
    ctx = make_context("llama")
    with pytest.raises(IndexError):
        ctx.logits(0)
    ctx.decode(words(5))
    for i in (0, 3, 5, -2):  # an array asks for its last token alone
        with pytest.raises(IndexError):
            ctx.logits(i)
    assert (ctx.logits(4) == ctx.logits(-1)).all()
    first = ctx.logits()
    kept = first.copy()
    first[:] = 0
    assert (ctx.logits() == kept).all()
    other = ctx.logits()
    ctx.decode(words(5, 1))
    assert (other == kept).all()
    ctx.close()
    assert (other == kept).all()
    with pytest.raises(ClosedError):
        ctx.logits()


@pytest.mark.hazard("D35")
def test_a_model_of_embeddings_has_no_logits(make_context: Any) -> None:
    for options in ({}, {"embeddings": False}, {"pooling_type": "none"}):
        ctx = make_context("bert", **options)
        ctx.decode(words(5))
        with pytest.raises(UnsupportedOperation):
            ctx.logits()


def test_tokens_that_were_computed_are_counted(make_context: Any) -> None:
    ctx = make_context("llama")
    assert ctx.tokens_evaluated == 0
    ctx.decode(words(10))
    ctx.copy_kv_cache_seq(0, 1)
    ctx.decode([5], seq_id=1)
    with pytest.raises(InvalidBatch):
        ctx.decode([-1])
    assert ctx.tokens_evaluated == 11
    bert = make_context("bert")
    bert.encode(words(7))
    assert bert.tokens_evaluated == 7


def test_llama_cpp_s_own_figures(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(10))
    ctx.decode([5])
    ctx.decode([6])
    perf = ctx.perf()
    assert isinstance(perf, PerfData)
    assert (perf.n_p_eval, perf.n_eval) == (10, 2)
    assert perf.t_p_eval_ms > 0
    with pytest.raises(AttributeError):
        perf.n_eval = 5  # type: ignore[misc]
    ctx.perf_reset()
    # llama.cpp reports at least 1 of each, to avoid divisions by zero.
    assert ctx.perf().n_p_eval <= 1
    assert ctx.tokens_evaluated == 12


POOLINGS = ["mean", "cls", "last"]


@pytest.mark.parametrize("n_batch", [64, 8])
def test_embeddings_are_what_the_logits_are_made_of(
    make_context: Any, model_folder: Path, n_batch: int
) -> None:
    ctx = make_context("llama", embeddings=True, n_batch=n_batch)
    ctx.decode(words(20))
    tensors = gguf.GGUFReader(make_model("llama", model_folder)).tensors
    output = next(t.data for t in tensors if t.name == "output.weight")
    for i in range(-20, 20):
        row = ctx.embeddings(i)
        assert (row.shape, row.dtype) == ((64,), np.float32)
        assert differ(output @ row, ctx.logits(i)) < RIGHT
    for i in (20, -21):
        with pytest.raises(IndexError):
            ctx.embeddings(i)


def test_embeddings_need_to_be_asked_for(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    with pytest.raises(UnsupportedOperation, match="embeddings=True"):
        ctx.embeddings()
    with pytest.raises(UnsupportedOperation, match="embeddings=True"):
        ctx.seq_embeddings()
    ctx = make_context("llama", embeddings=True)
    with pytest.raises(IndexError):
        ctx.embeddings()
    ctx.decode(words(5))
    with pytest.raises(UnsupportedOperation, match="pooling"):
        ctx.seq_embeddings()


@pytest.mark.hazard("N10")
@pytest.mark.parametrize("name", ["lfm2_swa", "gemma3", "mamba", "jamba"])
def test_a_context_for_embeddings_gives_true_logits_or_none(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    ctx = make_context(name, embeddings=True)
    ctx.decode(words(10))
    assert np.abs(ctx.embeddings()).max() > 0
    for n in (10, 3, 10):  # in a buffer that an earlier decode has filled
        ctx.clear_kv_cache()
        ctx.decode(words(n))
        try:
            logits = ctx.logits()
        except (UnsupportedOperation, IndexError):
            continue
        assert differ(logits, fresh_logits(name, words(n))) < RIGHT


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("use", ["decode", "encode"])
def test_pooled_embeddings_are_pooled_from_those_of_the_tokens(
    make_context: Any, pooling: str, use: str
) -> None:
    tokens = words(15)
    apart = make_context("bert", pooling_type="none")
    apart.decode(tokens)
    each = np.array([apart.embeddings(i) for i in range(15)])
    pooled = {"mean": each.mean(0), "cls": each[0], "last": each[-1]}[pooling]
    ctx = make_context("bert", pooling_type=pooling)
    getattr(ctx, use)(tokens)
    assert ctx.seq_embeddings().shape == (64,)
    assert differ(ctx.seq_embeddings(0), pooled) < RIGHT
    for i in (-1, 0, 4):  # pooled tokens have none of their own
        with pytest.raises((IndexError, UnsupportedOperation)):
            ctx.embeddings(i)


def test_each_sequence_of_a_batch_has_its_embedding(make_context: Any) -> None:
    texts = {0: words(9, 1), 2: words(17, 2), 3: words(1, 3)}
    alone = {}
    for seq, tokens in texts.items():
        ctx = make_context("bert")
        ctx.decode(tokens)
        alone[seq] = ctx.seq_embeddings(0)
    ctx, batch = make_context("bert"), LlamaBatch()
    for seq, tokens in texts.items():
        batch.add_sequence(tokens, seq, True)
    ctx.decode(batch)
    for seq, row in alone.items():
        assert differ(ctx.seq_embeddings(seq), row) < RIGHT
    with pytest.raises(IndexError, match="sequence 1"):
        ctx.seq_embeddings(1)


@pytest.mark.hazard("D2", "D28")
def test_an_encoder_takes_all_at_once_and_comes_first(model: Any) -> None:
    with LlamaContext(model("t5"), n_ctx=256, n_ubatch=32, n_threads=1) as ctx:
        with pytest.raises(DecodeError, match="encode"):
            ctx.decode([0])
        ctx.encode(words(32))
        with pytest.raises(InvalidBatch, match="n_ubatch is 32"):
            ctx.encode(words(33))
        with pytest.raises(InvalidBatch):
            ctx.encode([])
        with pytest.raises(SequenceIdError):
            ctx.encode(LlamaBatch.from_arrays([5], [0], ctx.n_seq_max))
        ctx.decode([0])
        assert np.isfinite(ctx.logits()).all()


def test_only_sequences_that_were_encoded_together_can_be_decoded(make_context: Any) -> None:
    def one(seqs: list[int]) -> LlamaBatch:
        rows = np.tile(np.array(seqs, np.int32), (12, 1))
        return LlamaBatch.from_arrays(words(12), np.arange(12), rows)

    ctx = make_context("t5")
    ctx.encode(one([0, 1]))
    for seq in (0, 1):
        ctx.decode([0, 5, 6], seq_id=seq)
    together = ctx.logits()
    ctx.copy_kv_cache_seq(0, 2)
    for seq in (2, 3):
        with pytest.raises(DecodeError, match=f"sequence {seq}"):
            ctx.decode([7], seq_id=seq)
    # Another input replaces the encoder's output, so what was decoded for the old must go.
    with pytest.raises(InvalidBatch):
        ctx.encode(one([2]))
    ctx.clear_kv_cache()
    ctx.encode(one([2]))
    with pytest.raises(DecodeError, match="sequence 0"):
        ctx.decode([0, 5, 6], seq_id=0)
    ctx.decode([0, 5, 6], seq_id=2)
    assert differ(ctx.logits(), together) < RIGHT


# For mamba: far below the limit, but the resulting state is more than its cube.
LARGE = 1e15


def spoil(folder: Path, source: Path, tensor: str, place: int, value: float) -> Path:
    def change(name: str, data: Any) -> Any:
        if name == tensor:
            data[place] = value
        return data

    return with_keys(source, folder / "spoilt.gguf", {}, change)


def spoilt(name: str, model_folder: Path, folder: Path) -> Path:
    """A recurrent model on which token 9 makes its sequence, and no other, NaN."""
    return spoil(folder, make_model(name, model_folder), "token_embd.weight", 9, math.nan)


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
    with LlamaModel(spoilt("qwen4exp", model_folder, tmp_path)) as model:
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
    path = spoilt("mamba", model_folder, tmp_path)
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
    path = spoilt("mamba", model_folder, tmp_path)
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
