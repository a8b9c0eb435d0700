"""The sampler: llama.cpp's chain with checked values."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from binding.kit import with_keys, words
from pykvcache import LlamaContext, LlamaModel, Sampler
from pykvcache.errors import ClosedError, ModelLoadError, OutputNotFinite
from pykvcache.sampling import SETTINGS
from support.models import make_model

NAN, INF = float("nan"), float("inf")
RANGES = {
    "temperature": (0, 1e4),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_penalty": (1e-6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "top_k": (0, 2**31 - 1),
    "penalty_last_n": (0, 2**20),
    "seed": (-1, 2**32 - 2),
}
INTEGERS = ["top_k", "penalty_last_n", "seed"]


def test_the_signature_has_the_defaults_of_the_table() -> None:
    parameters = inspect.signature(Sampler).parameters
    assert {name: parameters[name].default for name in SETTINGS} == {
        name: one.default for name, one in SETTINGS.items()
    }


@pytest.fixture
def ctx(make_context: Any) -> LlamaContext:
    one: LlamaContext = make_context("llama")
    one.decode(words(10))
    return one


def draw(ctx: LlamaContext, n: int = 60, **options: Any) -> list[int]:
    sampler = Sampler(**options)
    return [sampler.sample(ctx) for _ in range(n)]


# Choice -------------------------------------------------------------------------------


def test_greedy_takes_the_largest_logit(ctx: LlamaContext) -> None:
    best = int(ctx.logits().argmax())
    assert draw(ctx, 3, temperature=0) == [best] * 3
    assert draw(ctx, 3, temperature=0, top_k=5, top_p=0.1, seed=3) == [best] * 3
    assert draw(ctx, 3, top_k=1, temperature=5.0) == [best] * 3
    assert draw(ctx, 3, top_p=0.0, temperature=5.0) == [best] * 3
    assert draw(ctx, 3, min_p=1.0, temperature=0.5) == [best] * 3
    assert draw(ctx, 3, temperature=1e-3, top_k=0) == [best] * 3


def test_the_same_seed_makes_the_same_choices(ctx: LlamaContext) -> None:
    hot = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert draw(ctx, **hot, seed=7) == draw(ctx, **hot, seed=7)
    assert draw(ctx, **hot, seed=7) != draw(ctx, **hot, seed=8)
    assert draw(ctx, **hot) != draw(ctx, **hot)
    assert draw(ctx, **hot, seed=0) == draw(ctx, **hot, seed=np.int64(0))


def test_top_k_keeps_that_many(ctx: LlamaContext) -> None:
    best = set(np.argsort(ctx.logits())[-4:].tolist())
    drawn = draw(ctx, 200, temperature=50.0, top_k=4, top_p=1.0, min_p=0.0, seed=1)
    assert set(drawn) == best


def test_min_p_and_top_p_cut_the_unlikely(ctx: LlamaContext) -> None:
    p = np.exp(ctx.logits() - ctx.logits().max())
    likely = set(np.flatnonzero(p >= 0.3).tolist())
    drawn = draw(ctx, 200, temperature=50.0, top_k=0, top_p=1.0, min_p=0.3, seed=1)
    assert set(drawn) == likely
    order = np.argsort(-p)
    nucleus = order[: int(np.searchsorted(np.cumsum(p[order]) / p.sum(), 0.6)) + 1]
    drawn = draw(ctx, 400, temperature=50.0, top_k=0, top_p=0.6, min_p=0.0, seed=1)
    assert set(drawn) == set(nucleus.tolist())


def test_draws_follow_the_distribution(ctx: LlamaContext) -> None:
    p = np.exp((ctx.logits() - ctx.logits().max()) / 2.0)
    p /= p.sum()
    drawn = Counter(draw(ctx, 4000, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=5))
    for token in np.argsort(p)[-5:]:
        # Four standard deviations of a binomial count.
        assert abs(drawn[int(token)] - 4000 * p[token]) < 4 * np.sqrt(4000 * p[token])


def test_penalties_count_what_was_taken_and_accepted(ctx: LlamaContext) -> None:
    order = np.argsort(-ctx.logits()).tolist()
    for penalty in ({"presence_penalty": 1e5}, {"frequency_penalty": 1e5}):
        assert draw(ctx, 5, temperature=0, **penalty) == order[:5]
        # With a memory of two tokens the best comes back third.
        short = draw(ctx, 5, temperature=0, penalty_last_n=2, **penalty)
        assert short == [*order[:3], *order[:2]]
        assert draw(ctx, 3, temperature=0, penalty_last_n=0, **penalty) == [order[0]] * 3
    sampler = Sampler(temperature=0, presence_penalty=1e5)
    for token in (order[0], np.int64(order[1])):
        sampler.accept(token, ctx.model)
    assert sampler.sample(ctx) == order[2]
    sampler.reset()
    assert sampler.sample(ctx) == order[0]


def test_a_repeat_penalty_divides_positive_logits(ctx: LlamaContext) -> None:
    logits = ctx.logits()
    best = int(logits.argmax())
    assert logits[best] > 0
    second = draw(ctx, 2, temperature=0, repeat_penalty=1e3)[1]
    logits[best] /= 1e3
    assert second == int(logits.argmax())


def test_reset_begins_the_random_numbers_again(ctx: LlamaContext) -> None:
    sampler = Sampler(temperature=3.0, seed=11, presence_penalty=1.0)
    first = [sampler.sample(ctx) for _ in range(20)]
    sampler.reset()
    assert [sampler.sample(ctx) for _ in range(20)] == first


def test_any_row_that_has_logits_can_be_sampled(make_context: Any) -> None:
    from pykvcache import LlamaBatch

    ctx = make_context("llama")
    ctx.decode(LlamaBatch.from_arrays(words(6), np.arange(6), 0, np.array([0, 1, 0, 1, 0, 0])))
    greedy = Sampler(temperature=0)
    for i in (1, 3, -1, -2):
        assert greedy.sample(ctx, i) == int(ctx.logits(i).argmax())
    for i in (0, 5, 6, -3, 10**20):
        with pytest.raises(IndexError):
            greedy.sample(ctx, i)
    for i in (True, 1.0, None, "1"):
        with pytest.raises(TypeError):
            greedy.sample(ctx, i)


def test_one_sampler_serves_models_of_different_size(ctx: LlamaContext, make_context: Any) -> None:
    other = make_context("qwen2vl")
    other.decode(words(5))
    sampler = Sampler(temperature=0)
    for _ in range(2):
        assert sampler.sample(ctx) == int(ctx.logits().argmax())
        assert sampler.sample(other) == int(other.logits().argmax())


# Refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_a_range_are_inside_and_the_rest_is_refused(
    name: str, ctx: LlamaContext
) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert 0 <= Sampler(**{"seed": 1, name: value}).sample(ctx) < 320
    step = 1 if name in INTEGERS else 1e-3
    wrong = [low - step, high * 2 + 2, -(10**40), 10**40, 10**400]
    wrong += [] if name in INTEGERS else [NAN, INF, -INF]
    for value in wrong:
        with pytest.raises(ValueError, match=name):
            Sampler(**{name: value})
    types = [True, "1", b"1", [1], 1j, object()]
    types += [1.5] if name in INTEGERS else []
    types += [] if name == "seed" else [None]
    for value in types:
        with pytest.raises(TypeError):
            Sampler(**{name: value})


@pytest.mark.parametrize("what", [None, 5, "ctx", object(), LlamaContext])
def test_only_a_context_can_be_sampled(what: Any, model: Any) -> None:
    with pytest.raises(TypeError):
        Sampler().sample(what)
    if what is not None:
        with pytest.raises(TypeError):
            Sampler().accept(1, what)


def test_accept_wants_a_token_of_the_model(ctx: LlamaContext) -> None:
    sampler = Sampler()
    for token in (-1, 320, 2**31, 10**20):
        with pytest.raises(IndexError, match=str(token)):
            sampler.accept(token, ctx.model)
    for token in (True, 1.0, None, "1"):
        with pytest.raises(TypeError):
            sampler.accept(token, ctx.model)


@pytest.mark.hazard("D37")
def test_sampling_needs_logits(make_context: Any) -> None:
    ctx = make_context("llama")
    with pytest.raises(IndexError):
        Sampler().sample(ctx)
    ctx.close()
    with pytest.raises(ClosedError):
        Sampler().sample(ctx)


def broken_logits(folder: Path, source: Path, values: dict[int, float]) -> Path:
    """A model with invalid logits for some tokens."""

    def spoil(name: str, data: Any) -> Any:
        if name == "output.weight":
            for token, value in values.items():
                data[token, :] = value
        return data

    return with_keys(source, folder / "broken.gguf", {}, spoil)


@pytest.mark.hazard("N13")
def test_nan_logits_are_refused(model_folder: Path, tmp_path: Path) -> None:
    path = broken_logits(tmp_path, make_model("llama", model_folder), {7: NAN})
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode(words(5))
        with pytest.raises(OutputNotFinite, match="place 7 is nan"):
            ctx.logits()
        for options in ({"temperature": 0}, {}, {"top_k": 1}):
            with pytest.raises(OutputNotFinite):
                Sampler(**options).sample(ctx)
        with pytest.raises(OutputNotFinite):
            list(ctx.generate([5], 3))
    with pytest.raises(ModelLoadError):
        LlamaModel(path, check_tensors=True)


@pytest.mark.hazard("N59")
def test_infinite_logits_are_refused(model_folder: Path, tmp_path: Path) -> None:
    spoiled = {token: 3e38 for token in range(0, 320, 3)}
    path = broken_logits(tmp_path, make_model("llama", model_folder), spoiled)
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode(words(5))
        with pytest.raises(OutputNotFinite):
            ctx.logits()
        for options in ({"temperature": 0}, {"seed": 1}, {"top_k": 0, "top_p": 1.0, "seed": 1}):
            with pytest.raises(OutputNotFinite):
                Sampler(**options).sample(ctx)
