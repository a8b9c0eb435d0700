"""Copies of samplers continue independently with the sampler's history."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from binding.kit import words
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache.errors import ReentryError

COPIES: dict[str, Callable[[Sampler], Sampler]] = {
    "clone": Sampler.clone,
    "copy": copy.copy,
    "deepcopy in a list": lambda sampler: copy.deepcopy([sampler])[0],
}
HOT: dict[str, Any] = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
NUMBER = 'root ::= "a" [0-9]{4} "b"+'


@pytest.fixture(params=COPIES)
def duplicate(request: Any) -> Callable[[Sampler], Sampler]:
    return COPIES[request.param]


@pytest.fixture
def ctx(make_context: Any) -> LlamaContext:
    one: LlamaContext = make_context("llama")
    one.decode(words(10))
    return one


def draw(sampler: Sampler, ctx: LlamaContext, n: int) -> list[int]:
    return [sampler.sample(ctx) for _ in range(n)]


@pytest.mark.hazard("N58")
def test_a_copy_draws_what_the_original_draws(
    duplicate: Callable[[Sampler], Sampler], ctx: LlamaContext
) -> None:
    for seed in (7, None):
        sampler = Sampler(**HOT, seed=seed)
        draw(sampler, ctx, 5)
        twin = duplicate(sampler)
        assert draw(twin, ctx, 20) == draw(sampler, ctx, 20)
        # One does not take the other's random numbers.
        ahead = duplicate(sampler)
        draw(sampler, ctx, 7)
        again = duplicate(ahead)
        assert draw(ahead, ctx, 20) == draw(again, ctx, 20)


def test_a_new_seed_restarts_every_random_stage(ctx: LlamaContext) -> None:
    options: dict[str, Any] = HOT | {"xtc_probability": 0.5, "xtc_threshold": 0.0}
    for more in ({}, {"mirostat": 2}, {"stages": ["xtc", "temperature"]}):
        one = Sampler(**options, **more, seed=1)
        draw(one, ctx, 5)
        for seed in (1, 7):
            fresh = Sampler(**options, **more, seed=seed)
            assert draw(one.clone(seed=seed), ctx, 20) == draw(fresh, ctx, 20)
    one = Sampler(**HOT)
    assert draw(one.clone(seed=-1), ctx, 20) != draw(one.clone(seed=-1), ctx, 20)


def test_a_new_seed_keeps_the_history(ctx: LlamaContext) -> None:
    order = np.argsort(-ctx.logits()).tolist()
    for stages in (None, ["top_k", "penalties", "xtc", "temperature"]):
        one = Sampler(temperature=1e-3, presence_penalty=1e5, seed=1, stages=stages, top_k=20)
        assert draw(one, ctx, 3) == order[:3]
        assert draw(one.clone(seed=2), ctx, 2) == order[3:5]


@pytest.mark.hazard("N58")
def test_a_copy_is_where_the_grammar_is(
    duplicate: Callable[[Sampler], Sampler], ctx: LlamaContext
) -> None:
    sampler = Sampler(**HOT, seed=3, grammar=NUMBER, model=ctx.model)
    text = draw(sampler, ctx, 3)
    twin = duplicate(sampler)
    for one in (twin, sampler):
        rest = draw(one, ctx, 4)
        written = b"".join(ctx.model.token_to_piece(t) for t in text + rest)
        assert written[:1] == b"a"
        assert written[1:5].isdigit()
        assert set(written[5:]) == {ord("b")}
    twin.reset()
    assert ctx.model.token_to_piece(twin.sample(ctx)) == b"a"
    del sampler, twin  # each frees its own


def test_a_copy_of_a_subclass_has_its_own_history(
    duplicate: Callable[[Sampler], Sampler], ctx: LlamaContext
) -> None:
    class Named(Sampler):
        name = "n"

    order = np.argsort(-ctx.logits()).tolist()
    sampler = Named(temperature=0, presence_penalty=1e5)
    sampler.name = "other"
    assert draw(sampler, ctx, 3) == order[:3]
    twin = duplicate(sampler)
    assert (type(twin), twin.name, repr(twin)) == (Named, "other", repr(sampler))  # type: ignore[attr-defined]
    assert draw(twin, ctx, 2) == order[3:5]
    twin.reset()
    assert draw(twin, ctx, 1) == order[:1]
    assert draw(sampler, ctx, 2) == order[3:5]


def test_a_copy_outlives_the_original_and_the_model(make_context: Any, model: Any) -> None:
    ctx = make_context("llama")
    ctx.decode(words(5))
    twin = Sampler(temperature=0, grammar=NUMBER, model=ctx.model).clone().clone()
    assert ctx.model.token_to_piece(twin.sample(ctx)) == b"a"
    other = LlamaModel(model("llama").path)
    last = Sampler(temperature=0, grammar=NUMBER, model=other)
    other.close()
    assert last.logprobs(np.zeros(320, np.float32)).max() == 0
    assert last.clone().sample(np.zeros(320, np.float32)) == last.sample(np.zeros(320, np.float32))


@pytest.mark.parametrize("name", ["native", "sample", "accept", "logprobs", "reset", "clone"])
def test_a_subclass_cannot_replace_compiled_methods(name: str, make_context: Any) -> None:
    """generate() would not call an override, and would silently choose other tokens."""
    ctx = make_context("llama")
    mixin = type("Mixin", (), {name: lambda self, *args: 7})
    mine = [
        type("Mine", (Sampler,), {name: lambda self, *args: 7})(),
        type("Mine", (mixin, Sampler), {})(),
    ]
    if name != "native":  # a property
        mine.append(type("Mine", (Sampler,), {})())
        setattr(mine[-1], name, lambda *args: 7)
    with LlamaSequence(ctx, words(5)) as sequence, BatchGenerator(ctx) as generator:
        for one in mine:
            for call in (
                lambda one=one: sequence.generate(3, sampler=one),
                lambda one=one: sequence.stream(3, sampler=one),
                lambda one=one: ctx.generate(words(5), 3, one),
                lambda one=one: generator.submit(words(5), 3, sampler=one),
                lambda one=one: generator.submit(words(5), 3, sampler=one, n=2),
            ):
                with pytest.raises(TypeError, match=rf"Mine replaces {name}: .*logits"):
                    call()
        with pytest.raises(TypeError, match="must be a Sampler, not Mock"):
            sequence.generate(3, sampler=Mock(spec=Sampler))
        empty = type("Empty", (Sampler,), {"__init__": lambda self: None})()
        with pytest.raises(TypeError, match=r"Empty\.__init__ does not call Sampler"):
            ctx.generate(words(5), 3, empty)
        plain = type("Mine", (Sampler,), {"name": 7})(temperature=0)
        assert list(sequence.generate(3, sampler=plain))


def test_a_sampler_for_another_vocabulary_is_refused_before_anything_is_decoded(
    make_context: Any,
) -> None:
    ctx = make_context("llama")
    with pytest.raises(IndexError, match="logit_bias"):
        ctx.generate(words(5), 3, Sampler(logit_bias={10**6: 1.0}))
    assert ctx.kv_cache_seq_pos_max(0) == -1


def test_a_sampler_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="Sampler cannot be pickled"):
        pickle.dumps(Sampler())


def test_a_stage_may_not_call_its_own_sampler() -> None:
    row = np.zeros(50, np.float32)
    for call in ("sample", "logprobs", "reset"):
        found: list[Sampler] = []

        def stage(ids: Any, logits: Any, call: str = call, found: list[Sampler] = found) -> None:
            getattr(found[0], call)(*([] if call == "reset" else [row]))

        sampler = Sampler(temperature=1.0, seed=1, stages=[stage])
        found.append(sampler)
        for outer in (sampler.sample, sampler.logprobs):
            with pytest.raises(ReentryError, match="in use"):
                outer(row)
