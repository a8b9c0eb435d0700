"""Batches: computed in parts, or refused where llama.cpp would abort or be wrong; generate()."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.kit import HELD, differ, fill, lengths, with_keys, words
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, Sampler
from pykvcache.errors import (
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    PositionError,
    SeqIdTooLarge,
    SequenceIdError,
    UnsupportedOperation,
)
from support.models import EXACT, RIGHT, make_model

MAX = 2**31 - 1
DECODERS = ["llama", "gemma3", "qwen2vl", "mamba", "lfm2_swa", "t5"]


def one(token: int, pos: int, seq_ids: Any) -> LlamaBatch:
    batch = LlamaBatch()
    batch.add(token, pos, seq_ids, True)
    return batch


def after_good(token: int, pos: int, seq_ids: Any) -> LlamaBatch:
    batch = LlamaBatch()
    batch.add(5, 20, 0, True)
    batch.add(token, pos, seq_ids, True)
    return batch


def arrays(tokens: Any, pos: Any, seqs: Any) -> LlamaBatch:
    return LlamaBatch.from_arrays(tokens, pos, seqs, True)


INVALID = {
    "no token": lambda: [],
    "no token in a batch": LlamaBatch,
    "negative token": lambda: [5, -1, 5],
    "token past the vocabulary": lambda: [5, 5, 320],
    "token past the vocabulary in a batch": lambda: one(320, 20, 0),
    "negative token in a batch": lambda: arrays([-1], [20], 0),
    "position taken": lambda: one(5, 19, 0),
    "gap": lambda: one(5, 21, 0),
    "far away": lambda: one(5, 100_000, 0),
    "negative position": lambda: arrays([5], [-1], 3),
    "gap in the batch": lambda: arrays([5, 6], [20, 22], 0),
    "the same position twice": lambda: arrays([5, 6], [20, 20], 0),
    "positions that fall": lambda: arrays([5, 6], [21, 20], 0),
    "wrong second token": lambda: after_good(320, 21, 0),
    "wrong second position": lambda: after_good(5, 6, 1),
    "a sequence twice": lambda: one(5, 20, [0, 0]),
}

TOO_FAR = {"last position of all": lambda: one(5, MAX, 3)}

WRONG_SEQUENCE = {
    "first that is none": lambda: one(5, 0, 4),
    "llama.cpp's own bound": lambda: one(5, 0, 255),
    "negative": lambda: arrays([5], [0], np.array([-1])),
    "second of a token": lambda: one(5, 20, [0, 4]),
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


def test_arrays_and_sequence_ids_are_checked(make_context: Any) -> None:
    ctx = make_context("llama")
    for seq_id in (-1, 4, 255, -(2**70)):
        with pytest.raises(SequenceIdError) as error:
            ctx.decode([5], seq_id=seq_id)
        assert (error.value.seq_id, error.value.n_seq_max) == (seq_id, 4)
        assert isinstance(error.value, IndexError)
    for seq_id in (2**31, 10**40):
        with pytest.raises(SeqIdTooLarge) as large:
            ctx.decode([5], seq_id=seq_id)
        assert large.value.value == seq_id
    for seq_id in (True, 1.0, "0", None):
        with pytest.raises(TypeError, match="sequence id"):
            ctx.decode([5], seq_id=seq_id)
    for tokens in (None, 5, "abc", b"abc", [1.5], [True], [[1]], {1.5: 2}):
        with pytest.raises(TypeError):
            ctx.decode(tokens)
        with pytest.raises((TypeError, UnsupportedOperation)):
            ctx.encode(tokens)
    assert lengths(ctx) == {}


@pytest.mark.hazard("D27")
@pytest.mark.parametrize("name", ["llama", "mamba", "jamba"])
def test_a_decoder_has_nothing_to_encode(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    with pytest.raises(UnsupportedOperation) as error:
        ctx.encode([5, 6])
    assert error.value.operation == "encode"
    ctx.decode([5, 6])
    assert lengths(ctx) == {0: 2}


@pytest.mark.hazard("D28")
def test_an_encoder_decoder_is_not_decoded_before_it_encoded(model: Any) -> None:
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
            assert ctx.max_position == 511


def test_diverged_sequences_cannot_share_a_token(make_context: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(20))
    ctx.copy_kv_cache_seq(0, 1)
    both = arrays([6, 7, 8], [20, 21, 22], np.array([[0, 1]] * 3))
    ctx.decode(both)
    for seq, token in ((0, 6), (1, 7)):
        ctx.decode([token], seq_id=seq)
    with pytest.raises(InvalidBatch, match="diverged"):
        ctx.decode(one(5, 24, [0, 1]))
    assert lengths(ctx) == {0: 24, 1: 24}


@pytest.mark.hazard("D1", "D3")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_a_batch_in_parts_gives_the_logits_of_one_whole(make_context: Any, name: str) -> None:
    asked = [0, 3, 15, 16, 31, 32, 33, 63, 99]
    tokens = words(100)
    flags = np.isin(np.arange(100), asked)
    batch = LlamaBatch.from_arrays(tokens, np.arange(100), 0, flags)
    parts, whole = make_context(name, n_batch=32, n_ubatch=16), make_context(name)
    parts.decode(batch)
    whole.decode(batch)
    for k, i in enumerate(asked):
        assert differ(parts.logits(i), whole.logits(i)) < RIGHT, i
        row = parts.logits(i)
        row[:] = 0  # rows of earlier parts are copies too
        assert (parts.logits(i) == parts.logits(k - len(asked))).all()
    for i in (1, 14, 34, 98, 100):
        with pytest.raises(IndexError):
            parts.logits(i)


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_a_full_cache_refuses_what_does_not_fit_and_takes_what_does(
    make_context: Any, fresh_logits: Any, name: str
) -> None:
    ctx, tokens = make_context(name), words(256)
    ctx.decode(tokens[:250])
    with pytest.raises(NoKvCacheSlot) as error:
        ctx.decode(words(10))
    assert error.value.code == 1
    assert isinstance(error.value, RuntimeError)
    facts = error.value.n_tokens, error.value.n_free, error.value.n_cells, error.value.n_decoded
    assert facts == (10, 6, 256, 0)
    assert lengths(ctx) == {0: 250}
    ctx.logits()  # nothing was changed
    ctx.decode(tokens[250:])
    assert lengths(ctx) == {0: 256}
    if name != "t5":
        assert differ(ctx.logits(), fresh_logits(name, tokens)) < RIGHT


@pytest.mark.hazard("D21", "N45")
@pytest.mark.parametrize("as_batch", [False, True])
def test_a_long_call_that_does_not_fit_is_refused_before_any_of_it(
    make_context: Any, fresh_logits: Any, as_batch: bool
) -> None:
    ctx, tokens = make_context("llama", n_batch=32), words(300)
    batch = LlamaBatch.from_arrays(tokens, np.arange(300), 0, True)
    ctx.decode([5, 6], seq_id=1)
    row = ctx.logits()
    with pytest.raises(NoKvCacheSlot, match="300 more tokens: 254 of 256") as error:
        ctx.decode(batch if as_batch else tokens)
    assert error.value.n_decoded == 0
    assert lengths(ctx) == {1: 2}
    assert ctx.tokens_evaluated == 2
    assert (ctx.logits() == row).all()
    ctx.decode(tokens[:254])
    assert differ(ctx.logits(), fresh_logits("llama", tokens[:254])) < RIGHT


def test_each_stream_is_counted_by_itself(make_context: Any) -> None:
    ctx = make_context("llama", kv_unified=False, n_seq_max=2, n_ctx=512, n_batch=32)
    ctx.decode(words(200), seq_id=0)
    both = LlamaBatch.from_arrays(
        words(120), np.r_[np.arange(60), np.arange(200, 260)], np.repeat([1, 0], 60), True
    )
    with pytest.raises(NoKvCacheSlot, match="60 more tokens of sequence 0: 56 of 256"):
        ctx.decode(both)
    assert lengths(ctx) == {0: 200}
    ctx.decode(words(256), seq_id=1)
    assert lengths(ctx) == {0: 200, 1: 256}


def by_hand(ctx: LlamaContext, prompt: Any, n: int, seq_id: int = 0) -> list[int]:
    tokens = []
    for _ in range(n):
        ctx.decode(prompt, seq_id=seq_id)
        prompt = [int(ctx.logits().argmax())]
        tokens += prompt
    return tokens


@pytest.mark.parametrize("name", ["llama_none", "gemma3", "mamba", "jamba", "t5"])
def test_greedy_generation_is_decode_and_argmax(make_context: Any, name: str) -> None:
    ctx, prompt = make_context(name), words(10)
    generated = list(ctx.generate(prompt, 12, seq_id=1))
    assert generated == by_hand(make_context(name), prompt, 12)
    assert all(type(t) is int for t in generated)
    # The last token was yielded and not decoded yet.
    assert lengths(ctx) == {1: 10 + 11}
    assert ctx.tokens_evaluated == 21 + (20 if name == "t5" else 0)


def test_a_text_gets_its_special_tokens_only_at_the_start(make_context: Any, model: Any) -> None:
    llama, ctx = model("llama"), make_context("llama")
    first = list(ctx.generate("Hello world", 3))
    held = len(llama.tokenize("Hello world")) + 2
    assert lengths(ctx) == {0: held}
    list(ctx.generate(" the", 1))
    assert lengths(ctx) == {0: held + len(llama.tokenize(" the", add_special=False))}
    assert first == by_hand(make_context("llama"), llama.tokenize("Hello world"), 3)


def test_it_ends_before_a_token_that_ends_the_text(model_folder: Path, tmp_path: Path) -> None:
    source = make_model("llama", model_folder)
    options = {"n_ctx": 256, "n_threads": 1, **EXACT}
    with LlamaModel(source) as model, LlamaContext(model, **options) as ctx:
        whole = list(ctx.generate(words(10), 20))
    place = next(i for i in range(3, 20) if whole[i] not in whole[:i])
    path = with_keys(source, tmp_path / "eos.gguf", {"tokenizer.ggml.eos_token_id": whole[place]})
    with LlamaModel(path) as model, LlamaContext(model, **options) as ctx:
        assert model.is_eog(whole[place])
        assert list(ctx.generate(words(10), 20)) == whole[:place]
        # What was yielded is in the memory, and what ended the text is not.
        assert lengths(ctx) == {0: 10 + place}


def test_nothing_happens_before_the_first_token_is_asked_for(make_context: Any) -> None:
    ctx = make_context("llama")
    tokens = ctx.generate(words(5), 10)
    assert lengths(ctx) == {}
    assert list(ctx.generate(words(5), 0)) == []
    assert lengths(ctx) == {}
    next(tokens)
    assert lengths(ctx) == {0: 5}
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert lengths(ctx) == {0: 6}


def test_a_sampler_is_used_and_keeps_its_history(make_context: Any) -> None:
    def run(**options: Any) -> list[int]:
        ctx = make_context("llama")
        return list(ctx.generate(words(10), 30, Sampler(**options)))

    assert run(temperature=2.0, seed=1) == run(temperature=2.0, seed=1)
    assert run(temperature=2.0, seed=1) != run(temperature=2.0, seed=2)
    greedy, penalized = run(temperature=0), run(temperature=0, presence_penalty=1e4)
    assert len(set(greedy)) < 30
    assert len(set(penalized)) == 30


def test_refusals_change_nothing(make_context: Any) -> None:
    ctx = make_context("llama")
    for prompt in ([], [320], [-1], np.array([], np.int32)):
        with pytest.raises(InvalidBatch):
            list(ctx.generate(prompt, 3))
    for seq_id in (-1, 4, 256):
        for prompt in ("Hello", words(3)):
            with pytest.raises(SequenceIdError):
                list(ctx.generate(prompt, 3, seq_id=seq_id))
    for prompt in (None, 5, b"abc", [1.5], np.zeros(3), [True]):
        with pytest.raises(TypeError):
            list(ctx.generate(prompt, 3))
    for n in (-1, 2**31, True, 1.5, "3", None):
        with pytest.raises((ValueError, TypeError), match="max_tokens"):
            ctx.generate(words(3), n)  # before a token is asked for
    for sampler in (0, "greedy", Sampler, []):
        with pytest.raises(TypeError, match="sampler"):
            list(ctx.generate(words(3), 3, sampler))
    assert lengths(ctx) == {}
    tokens = ctx.generate(words(250), 100)
    assert len(list(itertools.islice(tokens, 7))) == 7
    with pytest.raises(NoKvCacheSlot):
        next(tokens)
    assert lengths(ctx) == {0: 256}
