"""Sampling from arrays, log-probabilities, bias, and the settings that a sampler shows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from binding.kit import words
from pykvcache import LlamaContext, Sampler
from pykvcache.errors import ArgumentError, DecodeError

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NAN, INF = math.nan, math.inf


@pytest.fixture
def ctx(make_context: Any) -> LlamaContext:
    one: LlamaContext = make_context("llama")
    one.decode(words(10))
    return one


def log_softmax(logits: Any) -> Any:
    x = np.asarray(logits, np.float64)
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5))


# Arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"seed": 3, "presence_penalty": 1.0}])
def test_an_array_is_sampled_as_the_context_is(ctx: LlamaContext, options: Any) -> None:
    options = {"seed": 1} | options
    a, b = Sampler(**options), Sampler(**options)
    assert [a.sample(ctx) for _ in range(20)] == [b.sample(ctx.logits()) for _ in range(20)]


def test_an_array_is_not_changed_and_may_be_of_any_strides() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    wide = np.zeros((50, 3), np.float32)
    wide[:, 1] = logits
    wide.flags.writeable = False
    before = wide.copy()
    sampler = Sampler(temperature=0, presence_penalty=10.0)
    assert sampler.sample(wide[:, 1]) == int(logits.argmax())
    assert sampler.sample(wide[::-1, 1]) == 49 - int(logits.argmax())
    np.testing.assert_array_equal(wide, before)
    assert sampler.sample(np.float32([1.0])) == 0
    assert Sampler(seed=1).sample(np.float32([-INF, 0.0, -INF])) == 1


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        (np.zeros(5), TypeError, "float32, not float64"),
        (np.zeros(5, np.float16), TypeError, "float32"),
        (np.zeros(5, np.int32), TypeError, "float32"),
        (np.zeros((1, 5), np.float32), ValueError, r"\(1, 5\)"),
        (np.zeros((), np.float32), ValueError, r"\(\)"),
        (np.zeros(0, np.float32), ValueError, r"\(0,\)"),
        (np.float32([0, NAN]), ArgumentError, "token 1 is NaN"),
        (np.float32([INF, 0]), ArgumentError, "token 0 is infinite"),
        (np.float32([-INF, -INF]), DecodeError, "no token is left"),
        ([0.0, 1.0], TypeError, "array of logits, not list"),
        (None, TypeError, "NoneType"),
    ],
)
def test_arrays_that_are_not_logits_are_refused(wrong: Any, kind: Any, said: str) -> None:
    for method in (Sampler().sample, Sampler(temperature=0).sample, Sampler().logprobs):
        with pytest.raises(kind, match=said):
            method(wrong)


def test_an_index_belongs_to_a_context() -> None:
    logits = np.zeros(5, np.float32)
    assert Sampler().sample(logits, -1) in range(5)
    with pytest.raises(ValueError, match="leave it out"):
        Sampler().sample(logits, 0)


def test_a_grammar_wants_the_logits_of_its_model(model: Any) -> None:
    sampler = Sampler(temperature=0, grammar="root ::= [0-9]+", model=model("llama"))
    token = sampler.sample(np.zeros(320, np.float32))
    assert model("llama").token_to_piece(token).isdigit()
    with pytest.raises(ValueError, match="319 logits given: the grammar's model has 320"):
        sampler.sample(np.zeros(319, np.float32))


@pytest.mark.hazard("N59")
@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-6, 0.5])
@pytest.mark.parametrize("scale", [1.0, 1e30, 3e38])
def test_any_temperature_above_0_keeps_the_order(temperature: float, scale: float) -> None:
    """If a logit divided by the temperature is infinite, llama.cpp's probabilities are NaN."""
    for sign in (1, -1):
        logits = (sign * np.float32([0.25, 0.5, 1.0, 0.75]) * np.float32(scale)).astype(np.float32)
        sampler = Sampler(temperature=temperature, seed=1, **OPEN)
        chances = np.exp(sampler.logprobs(logits).astype(np.float64))
        assert chances.sum() == pytest.approx(1, abs=1e-5)
        assert int(chances.argmax()) == int(logits.argmax())
        if scale / temperature > 1e3:
            assert [sampler.sample(logits) for _ in range(20)] == [int(logits.argmax())] * 20


# Log-probabilities --------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_with_nothing_set(ctx: LlamaContext) -> None:
    found = Sampler(temperature=1, **OPEN).logprobs(ctx)
    assert found.dtype == np.float32
    assert close(found, log_softmax(ctx.logits()))


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 3.0}, {}]
)
def test_logprobs_are_what_sample_draws_from(ctx: LlamaContext, options: Any) -> None:
    sampler = Sampler(**({"seed": 9} | options))
    chances = np.exp(sampler.logprobs(ctx).astype(np.float64))
    assert chances.sum() == pytest.approx(1, abs=1e-4)
    n = 4000
    drawn = np.bincount([sampler.sample(ctx) for _ in range(n)], minlength=320)
    assert not drawn[chances == 0].any()
    # Five standard deviations of a binomial count.
    assert (np.abs(drawn - n * chances) <= 5 * np.sqrt(n * chances) + 1).all()


def test_logprobs_accept_nothing_and_draw_nothing(ctx: LlamaContext) -> None:
    options: dict[str, Any] = {"seed": 4, "presence_penalty": 1.0, "temperature": 2.0}
    asked, not_asked = Sampler(**options), Sampler(**options)
    for _ in range(10):
        first = asked.logprobs(ctx)
        np.testing.assert_array_equal(asked.logprobs(ctx), first)
        assert asked.sample(ctx) == not_asked.sample(ctx)


def test_logprobs_at_temperature_0_know_one_token(ctx: LlamaContext) -> None:
    found = Sampler(temperature=0).logprobs(ctx)
    best = int(ctx.logits().argmax())
    assert found[best] == 0
    assert np.isneginf(np.delete(found, best)).all()


def test_logprobs_follow_penalties_and_grammar(ctx: LlamaContext) -> None:
    sampler = Sampler(temperature=1, presence_penalty=2.0, **OPEN)
    sampler.accept(7)
    wanted = ctx.logits()
    wanted[7] -= 2
    assert close(sampler.logprobs(ctx), log_softmax(wanted))
    digits = Sampler(temperature=1, grammar="root ::= [0-9]", model=ctx.model, **OPEN)
    allowed = np.flatnonzero(np.isfinite(digits.logprobs(ctx)))
    assert len(allowed)
    assert all(ctx.model.token_to_piece(t).isdigit() for t in allowed)


# Bias ---------------------------------------------------------------------------------


def test_a_bias_is_added_first(ctx: LlamaContext) -> None:
    bias = {3: 2.5, np.int64(300): -1.0, 5: -INF, 6: np.float32(1.0)}
    wanted = ctx.logits()
    wanted[[3, 300, 5, 6]] += np.float32([2.5, -1.0, -INF, 1.0])
    found = Sampler(temperature=1, logit_bias=bias, **OPEN).logprobs(ctx)
    assert close(found, log_softmax(wanted))


def test_a_bias_forces_and_bans(ctx: LlamaContext) -> None:
    order = np.argsort(-ctx.logits()).tolist()
    assert Sampler(temperature=0, logit_bias={order[-1]: 1e6}).sample(ctx) == order[-1]
    banned = dict.fromkeys(order[:3], -INF)
    assert Sampler(temperature=0, logit_bias=banned).sample(ctx) == order[3]
    hot = Sampler(temperature=1e4, seed=1, logit_bias=banned, **OPEN)
    assert not {hot.sample(ctx) for _ in range(500)} & set(order[:3])
    with pytest.raises(DecodeError, match="no token is left"):
        Sampler(logit_bias=dict.fromkeys(order, -INF)).sample(ctx)
    everything = Sampler(
        grammar="root ::= [0-9]", model=ctx.model, logit_bias=dict.fromkeys(order, -INF)
    )
    with pytest.raises(DecodeError, match="grammar allows no further token with this logit_bias"):
        everything.sample(ctx)


def test_the_callers_mapping_may_change_later(ctx: LlamaContext) -> None:
    bias = {int(ctx.logits().argmin()): 1e6}
    sampler = Sampler(temperature=0, logit_bias=bias)
    bias.clear()
    assert sampler.sample(ctx) == int(ctx.logits().argmin())


@pytest.mark.parametrize(
    ("bias", "kind", "said"),
    [
        ([1, 2], TypeError, "map tokens"),
        ({-1: 0.0}, ValueError, "-1"),
        ({2**31: 0.0}, ValueError, "2147483648"),
        ({True: 0.0}, TypeError, "True"),
        ({1.0: 0.0}, TypeError, "1.0"),
        ({1: NAN}, ValueError, "token 1 is nan"),
        ({1: INF}, ValueError, "token 1 is inf"),
        ({1: 2e6}, ValueError, "1e.06"),
        ({1: "2"}, TypeError, "token 1"),
        ({1: True}, TypeError, "token 1"),
        ({1: None}, TypeError, "token 1"),
    ],
)
def test_invalid_biases_are_refused(bias: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        Sampler(logit_bias=bias)


def test_a_bias_for_no_token_is_refused(ctx: LlamaContext) -> None:
    with pytest.raises(IndexError, match="token 320"):
        Sampler(logit_bias={320: 1.0}, model=ctx.model)
    late = Sampler(logit_bias={320: 1.0})
    for ask in (late.sample, late.logprobs):
        with pytest.raises(IndexError, match="token 320"):
            ask(ctx)


# Accepting ----------------------------------------------------------------------------


def test_accept_needs_no_model(ctx: LlamaContext) -> None:
    order = np.argsort(-ctx.logits()).tolist()
    sampler = Sampler(temperature=0, presence_penalty=1e5)
    sampler.accept(order[0])
    assert sampler.sample(ctx) == order[1]
    for token in (-1, 320, 2**40):
        with pytest.raises(IndexError, match=str(token)):
            sampler.accept(token)  # it has seen logits by now
    with pytest.raises(IndexError, match="-1"):
        Sampler().accept(-1)


def test_accept_leads_the_grammar_on_where_asked(ctx: LlamaContext) -> None:
    def piece(token: int) -> bytes:
        return ctx.model.token_to_piece(token)

    tokens = {piece(t): t for t in range(ctx.model.n_vocab)}
    sampler = Sampler(temperature=0, grammar='root ::= "a" "b" "c"', model=ctx.model)
    sampler.accept(tokens[b"z"])  # of a prompt
    assert piece(sampler.clone().sample(ctx)) == b"a"
    sampler.accept(tokens[b"a"], grammar=True)
    with pytest.raises(ValueError, match="grammar does not allow token"):
        sampler.accept(tokens[b"z"], grammar=True)
    assert piece(sampler.sample(ctx)) == b"b"
    with pytest.raises(TypeError, match="grammar must be True or False"):
        sampler.accept(1, grammar=1)  # type: ignore[arg-type]


def test_a_refused_token_is_not_counted(ctx: LlamaContext) -> None:
    sampler = Sampler(
        temperature=0, presence_penalty=1e5, grammar="root ::= [0-9]+", model=ctx.model
    )
    before = sampler.logprobs(ctx)
    letter = next(t for t in range(320) if ctx.model.token_to_piece(t) == b"z")
    with pytest.raises(ValueError, match="grammar"):
        sampler.accept(letter, grammar=True)
    np.testing.assert_array_equal(sampler.logprobs(ctx), before)


# Settings -----------------------------------------------------------------------------


def test_temperature_0_comes_after_penalties_and_bias(ctx: LlamaContext) -> None:
    """As the docstring says."""
    order = np.argsort(-ctx.logits()).tolist()
    sampler = Sampler(temperature=0, presence_penalty=1e5, top_k=1, top_p=0.0, seed=3)
    assert [sampler.sample(ctx) for _ in range(3)] == order[:3]


SETTINGS: dict[str, Any] = {
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "repeat_penalty": 1.5,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.75,
    "penalty_last_n": 9,
    "seed": 11,
    "logit_bias": {4: -2.0},
    "grammar_root": "other",
}


def test_the_repr_shows_every_setting(model: Any) -> None:
    for options in ({}, {"temperature": 0}, SETTINGS):
        sampler = Sampler(**options)
        text = repr(sampler)
        assert eval(text) is not sampler
        assert repr(eval(text)) == text
    for name, value in SETTINGS.items():
        assert f"{name}={value!r}" in text
    grammar = "root ::= [0-9]+ # " + "long " * 1000
    assert len(repr(Sampler(grammar=grammar, model=model("llama")))) < 700
