"""Batches that llama.cpp would abort on, misread or get wrong: refused, with nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from binding.kit import HELD, fill, lengths, words
from pykvcache import LlamaBatch
from pykvcache.errors import (
    DecodeError,
    InvalidBatch,
    PositionError,
    SeqIdTooLarge,
    SequenceIdError,
    UnsupportedOperation,
)
from support.models import RIGHT

MAX = 2**31 - 1
DECODERS = ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "lfm2_swa", "t5"]


def one(token: int, pos: int, seq_ids: Any) -> LlamaBatch:
    batch = LlamaBatch()
    batch.add(token, pos, seq_ids, True)
    return batch


def after_good(token: int, pos: int, seq_ids: Any) -> LlamaBatch:
    """A token that could be decoded, and then one that cannot."""
    batch = LlamaBatch()
    batch.add(5, 20, 0, True)
    batch.add(token, pos, seq_ids, True)
    return batch


def arrays(tokens: Any, pos: Any, seqs: Any) -> LlamaBatch:
    return LlamaBatch.from_arrays(tokens, pos, seqs, True)


INVALID = {
    "no token": lambda: [],
    "no token in an array": lambda: np.array([], np.int64),
    "no token in a batch": LlamaBatch,
    "negative token": lambda: [5, -1, 5],
    "token past the vocabulary": lambda: [5, 5, 320],
    "largest token": lambda: np.array([MAX], np.uint32),
    "token past the vocabulary in a batch": lambda: one(320, 20, 0),
    "negative token in a batch": lambda: arrays([-1], [20], 0),
    "position taken": lambda: one(5, 19, 0),
    "first position again": lambda: one(5, 0, 0),
    "gap": lambda: one(5, 21, 0),
    "far away": lambda: one(5, 100_000, 0),
    "negative position": lambda: arrays([5], [-1], 3),
    "lowest position": lambda: arrays([5], [-(2**31)], 3),
    "gap in the batch": lambda: arrays([5, 6], [20, 22], 0),
    "the same position twice": lambda: arrays([5, 6], [20, 20], 0),
    "positions that fall": lambda: arrays([5, 6], [21, 20], 0),
    "two empty starts": lambda: arrays([5, 6], [0, 0], 2),
    "wrong second token": lambda: after_good(320, 21, 0),
    "wrong second position": lambda: after_good(5, 6, 1),
    "a sequence twice": lambda: one(5, 20, [0, 0]),
    "a sequence twice after others": lambda: one(5, 0, [2, 3, 2]),
}

TOO_FAR = {
    "last position of all": lambda: one(5, MAX, 3),
    "last but one position": lambda: arrays([5, 5], [MAX - 2, MAX - 1], 3),
}

WRONG_SEQUENCE = {
    "first that is none": lambda: one(5, 0, 4),
    "llama.cpp's own bound": lambda: one(5, 0, 255),
    "past llama.cpp's bound": lambda: one(5, 0, 256),
    "largest": lambda: one(5, 0, MAX),
    "negative": lambda: arrays([5], [0], np.array([-1])),
    "second of a token": lambda: one(5, 20, [0, 4]),
    "second token": lambda: after_good(5, 0, 4),
    "wide": lambda: one(5, 0, list(range(2, 256))),
}


@pytest.mark.hazard("D4", "D5", "D6", "D7", "D10", "D11", "D13", "D14", "D15")
@pytest.mark.parametrize("name", DECODERS)
def test_refused_batches_leave_no_trace(make_context: Any, name: str) -> None:
    ctx, twin = make_context(name), make_context(name)
    fill(ctx)
    fill(twin)
    counted = ctx.tokens_evaluated
    for what, make in INVALID.items():
        bad = make()
        with pytest.raises((InvalidBatch, UnsupportedOperation)) as error:
            ctx.decode(bad)
        # Mamba and Jamba refuse any token of several sequences as such.
        assert isinstance(error.value, InvalidBatch) or "twice" in what, what
        assert getattr(error.value, "code", None) is None, what
        assert lengths(ctx) == HELD, what
    for what, make in TOO_FAR.items():
        with pytest.raises(PositionError):
            ctx.decode(make())
        assert lengths(ctx) == HELD, what
    for what, make in WRONG_SEQUENCE.items():
        with pytest.raises(SequenceIdError):
            ctx.decode(make())
        assert lengths(ctx) == HELD, what
    assert ctx.tokens_evaluated == counted
    for seq in HELD:
        for each in (ctx, twin):
            each.decode(words(3, 9), seq_id=seq)
        assert np.abs(ctx.logits() - twin.logits()).max() < RIGHT


@pytest.mark.parametrize("seq_id", [-1, 4, 255, 256, -(2**31), MAX, -(2**70)])
def test_an_array_needs_a_sequence_of_the_context(make_context: Any, seq_id: int) -> None:
    ctx = make_context("llama")
    with pytest.raises(SequenceIdError) as error:
        ctx.decode([5], seq_id=seq_id)
    assert (error.value.seq_id, error.value.n_seq_max) == (seq_id, 4)
    assert isinstance(error.value, IndexError)
    assert lengths(ctx) == {}


@pytest.mark.parametrize("seq_id", [2**31, 2**63, 10**40])
def test_a_sequence_past_int32_is_too_large(make_context: Any, seq_id: int) -> None:
    with pytest.raises(SeqIdTooLarge) as error:
        make_context("llama").decode([5], seq_id=seq_id)
    assert error.value.value == seq_id


@pytest.mark.parametrize(
    "tokens", [None, 5, 1.5, "abc", b"abc", [1.5], [True], [[1]], ["a"], {1: 2.0}]
)
def test_objects_without_tokens_are_type_errors(make_context: Any, tokens: Any) -> None:
    ctx = make_context("llama")
    if isinstance(tokens, dict):
        tokens = {1.5: 2}
    for use in (ctx.decode, ctx.encode):
        with pytest.raises((TypeError, UnsupportedOperation)):
            use(tokens)
    with pytest.raises(TypeError):
        ctx.decode(tokens)
    assert lengths(ctx) == {}


@pytest.mark.parametrize("seq_id", [True, 1.0, "0", None, [0]])
def test_sequence_ids_of_other_types_are_type_errors(make_context: Any, seq_id: Any) -> None:
    with pytest.raises(TypeError, match="sequence id"):
        make_context("llama").decode([5], seq_id=seq_id)


@pytest.mark.hazard("D27")
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "mamba", "jamba"])
def test_a_decoder_has_nothing_to_encode(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    with pytest.raises(UnsupportedOperation) as error:
        ctx.encode([5, 6])
    assert error.value.operation == "encode"
    ctx.decode([5, 6])
    assert lengths(ctx) == {0: 2}


@pytest.mark.hazard("D28")
def test_an_encoder_decoder_is_not_decoded_before_it_encoded(model: Any) -> None:
    from pykvcache import LlamaContext

    with LlamaContext(model("t5"), n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        with pytest.raises(DecodeError, match="encode"):
            ctx.decode([5])
        ctx.encode([10, 11, 12])
        # Cross attention sees only what was encoded for the sequence itself.
        with pytest.raises(DecodeError, match="sequence 1"):
            ctx.decode([5], seq_id=1)
        ctx.decode([5])
        assert np.isfinite(ctx.logits()).all()
        assert lengths(ctx) == {0: 1}


@pytest.mark.hazard("D30")
@pytest.mark.parametrize("attention", ["unspecified", "causal"])
def test_bert_refuses_what_its_table_and_its_step_cannot_hold(model: Any, attention: str) -> None:
    from pykvcache import LlamaContext

    with LlamaContext(
        model("bert"), n_ctx=1024, n_ubatch=64, n_threads=2, attention_type=attention
    ) as ctx:
        for use in (ctx.decode, ctx.encode):
            with pytest.raises(InvalidBatch, match="n_ubatch is 64"):
                use(words(65))
            with pytest.raises(PositionError, match="table") as error:
                use(arrays([5], [512], 0))
            assert (error.value.value, error.value.limit) == (512, 511)
            with pytest.raises((InvalidBatch, PositionError)):
                use(words(600))
            use(words(64))
            use(arrays(words(64), np.arange(448, 512), 0))


def test_a_learned_table_of_positions_is_full_at_its_end(make_context: Any) -> None:
    ctx = make_context("bert", n_ctx=1024, n_batch=1024, n_ubatch=1024)
    ctx.decode(words(512))
    assert ctx.max_position == 511
    with pytest.raises(PositionError, match="past 511, the end of the model's table"):
        ctx.decode(words(513))


@pytest.mark.parametrize("name", ["llama", "mamba", "qwen2vl"])
def test_an_empty_sequence_may_begin_anywhere(make_context: Any, name: str) -> None:
    ctx, tokens = make_context(name), words(12)
    ctx.decode(arrays(tokens, np.arange(12) + 5000, 2))
    far = ctx.logits()
    assert (ctx.kv_cache_seq_pos_min(2), ctx.kv_cache_seq_pos_max(2)) in (
        (5000, 5011),
        (5011, 5011),
    )
    ctx.decode(tokens, seq_id=0)
    # Only distances count for these models. Angles of 5000 radians cost some digits.
    assert np.abs(far - ctx.logits()).max() < 10 * RIGHT
