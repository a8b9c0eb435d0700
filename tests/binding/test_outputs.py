"""Outputs of a decode: logits, measurements, embeddings, and encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from binding.kit import differ, words
from pykvcache import LlamaBatch
from pykvcache.errors import (
    ClosedError,
    ContextCreateError,
    DecodeError,
    InvalidBatch,
    SequenceIdError,
    UnsupportedOperation,
)
from pykvcache.facts import PerfData
from support.models import RIGHT, make_model

# Logits -------------------------------------------------------------------------------


def test_logits_are_indexed_by_the_batch_and_from_the_end_of_those_asked(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(LlamaBatch.from_arrays(words(6), np.arange(6), 0, np.array([0, 1, 0, 1, 0, 0])))
    assert ctx.logits().dtype == np.float32
    assert ctx.logits().shape == (320,)
    assert (ctx.logits(-1) == ctx.logits(3)).all()
    assert (ctx.logits(-2) == ctx.logits(np.int64(1))).all()
    assert (ctx.logits(1) != ctx.logits(3)).any()
    for i in (0, 2, 4, 5, 6, -3, -6, 2**31, -(2**31) - 1, 2**63, 10**30, -(10**30)):
        with pytest.raises(IndexError):
            ctx.logits(i)
    for i in (True, 1.0, "1", None, [1], np.True_):
        with pytest.raises(TypeError, match="index"):
            ctx.logits(i)


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


# Figures ------------------------------------------------------------------------------


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


@pytest.mark.hazard("C15")
def test_threads_are_between_1_and_512(make_context: Any) -> None:
    ctx = make_context("llama")
    for n in (0, -1, 513, 2**40, True, 1.5, "2"):
        with pytest.raises((ValueError, TypeError)):
            ctx.set_n_threads(n)
        with pytest.raises((ValueError, TypeError)):
            ctx.set_n_threads(1, n)
    ctx.set_n_threads(2, 1)
    ctx.decode(words(5))


# Embeddings ---------------------------------------------------------------------------


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
    for i in (20, -21, 2**40):
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


def test_embeddings_that_llama_cpp_reads_wrongly_are_refused(make_context: Any) -> None:
    with pytest.raises(ContextCreateError, match=r"of 64 values, and llama\.cpp reads 256"):
        make_context("deepseek4", embeddings=True)


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
    for seq in (-1, 4, 256):
        with pytest.raises(SequenceIdError):
            ctx.seq_embeddings(seq)
    for seq in (True, 1.0, None, "0"):
        with pytest.raises(TypeError):
            ctx.seq_embeddings(seq)


# Encoder and decoder ------------------------------------------------------------------


@pytest.mark.hazard("D2")
def test_an_encoder_takes_all_at_once(make_context: Any) -> None:
    ctx = make_context("t5", n_batch=32, n_ubatch=32)
    ctx.encode(words(32))
    with pytest.raises(InvalidBatch, match="n_ubatch is 32"):
        ctx.encode(words(33))
    with pytest.raises(InvalidBatch):
        ctx.encode([])
    with pytest.raises(SequenceIdError):
        ctx.encode(LlamaBatch.from_arrays([5], [0], 4))
    ctx.decode([0])


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
