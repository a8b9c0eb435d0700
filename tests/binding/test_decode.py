"""Batches: computed in parts, or refused where llama.cpp would abort or be wrong; generate()."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.kit import differ, lengths, words
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, Sampler
from pykvcache.errors import (
    InvalidBatch,
    NoKvCacheSlot,
    PositionError,
    UnsupportedOperation,
)
from support.models import EXACT, RIGHT, make_model, with_keys


@pytest.mark.hazard("D27")
@pytest.mark.parametrize("name", ["llama", "mamba", "jamba"])
def test_a_decoder_has_nothing_to_encode(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    with pytest.raises(UnsupportedOperation) as error:
        ctx.encode([5, 6])
    assert error.value.operation == "encode"
    ctx.decode([5, 6])
    assert lengths(ctx) == {0: 2}


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
                use(LlamaBatch.from_arrays([5], [512], 0))
            assert (error.value.value, error.value.limit) == (512, 511)
            with pytest.raises((InvalidBatch, PositionError)):
                use(words(600))
            use(words(64))
            use(LlamaBatch.from_arrays(words(64), np.arange(448, 512), 0))
            assert ctx.max_position == 511


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
    for wrong in (None, 5, b"abc", [1.5], np.zeros(3), [True], [[1]], {1.5: 2}):
        for use in (ctx.decode, lambda prompt: list(ctx.generate(prompt, 3))):
            with pytest.raises(TypeError):
                use(wrong)
    for sampler in (0, "greedy", Sampler, []):
        with pytest.raises(TypeError, match="sampler"):
            list(ctx.generate(words(3), 3, sampler))
    assert lengths(ctx) == {}
    tokens = ctx.generate(words(250), 100)
    assert len(list(itertools.islice(tokens, 7))) == 7
    with pytest.raises(NoKvCacheSlot):
        next(tokens)
    assert lengths(ctx) == {0: 256}
