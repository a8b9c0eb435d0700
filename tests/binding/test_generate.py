"""generate(): decode and sample in turn."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.kit import lengths, with_keys, words
from pykvcache import LlamaContext, LlamaModel, Sampler
from pykvcache.errors import InvalidBatch, NoKvCacheSlot, SequenceIdError
from support.models import EXACT, make_model


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


def test_it_continues_from_the_last_token(make_context: Any) -> None:
    prompt = words(10)
    whole = list(make_context("llama").generate(prompt, 20))
    ctx = make_context("llama")
    some = list(ctx.generate(prompt, 8))
    more = list(ctx.generate(some[-1:], 12))
    assert some + more == whole


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
