"""Embeddings of tokens and sequences, and encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from binding.kit import differ, words
from pykvcache import LlamaBatch
from pykvcache.errors import (
    ContextCreateError,
    DecodeError,
    InvalidBatch,
    SequenceIdError,
    UnsupportedOperation,
)
from support.models import RIGHT, make_model

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
@pytest.mark.parametrize("name", ["lfm2", "lfm2_swa", "gemma3", "mamba", "jamba"])
def test_a_context_for_embeddings_gives_true_logits_or_none(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    ctx = make_context(name, embeddings=True)
    ctx.decode(words(10))
    assert np.abs(ctx.embeddings()).max() > 0
    try:
        logits = ctx.logits()
    except (UnsupportedOperation, IndexError):
        return
    assert differ(logits, fresh_logits(name, words(10))) < RIGHT


def test_embeddings_of_another_width_than_llama_cpp_reads_are_refused(make_context: Any) -> None:
    for pooling in ("none", "mean"):
        with pytest.raises(ContextCreateError, match=r"of 64 values, and llama\.cpp reads 256"):
            make_context("deepseek4", embeddings=True, pooling_type=pooling)


@pytest.mark.parametrize("name", ["lfm2", "lfm2_swa"])
def test_embeddings_of_earlier_decodes_are_not_given_as_logits(
    make_context: Any, name: str
) -> None:
    ctx = make_context(name, embeddings=True)
    # The buffer of the first is used for all; in the second the embeddings lie further ahead.
    for n in (30, 5, 30):
        ctx.clear_kv_cache()
        ctx.decode(LlamaBatch.from_arrays(words(n), np.arange(n), 0, np.ones(n, bool)))
        for i in range(n):
            with pytest.raises(UnsupportedOperation):
                ctx.logits(i)


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


@pytest.mark.hazard("N10")
@pytest.mark.parametrize("name", ["bert", "llama", "mamba"])
def test_pooled_tokens_have_no_separate_embeddings(make_context: Any, name: str) -> None:
    ctx = make_context(name, embeddings=True, pooling_type="mean")
    ctx.decode(words(5))
    assert np.abs(ctx.seq_embeddings()).max() > 0
    for i in (-1, 0, 4):
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
    for seq in (-1, 4, 256):
        with pytest.raises(SequenceIdError):
            ctx.seq_embeddings(seq)
    for seq in (True, 1.0, None, "0"):
        with pytest.raises(TypeError):
            ctx.seq_embeddings(seq)


# Encoder and decoder ------------------------------------------------------------------


def test_decoding_depends_on_the_encoded_input(make_context: Any) -> None:
    ctx, rows = make_context("t5", n_seq_max=1), []
    for seed in (1, 2, 1):
        ctx.encode(words(12, seed))
        ctx.decode([0, 5, 6])
        rows.append(ctx.logits())
        # The cells depend on this input; another one would make them wrong.
        with pytest.raises(InvalidBatch, match="another input"):
            ctx.encode(words(12, 3))
        ctx.clear_kv_cache()
    assert differ(rows[0], rows[2]) < RIGHT
    assert differ(rows[0], rows[1]) > 0.05


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
