"""The sampler: llama.cpp's chain with checked values, log-probabilities and bias."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from binding.kit import words
from pykvcache import LlamaContext, Sampler
from pykvcache.errors import ArgumentError, ClosedError, DecodeError
from pykvcache.sampling import SETTINGS

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


def test_what_leaves_one_token_takes_the_likeliest(ctx: LlamaContext) -> None:
    best = int(ctx.logits().argmax())
    for options in (
        {"temperature": 0, "top_k": 5, "top_p": 0.1, "seed": 3},
        {"top_k": 1, "temperature": 5.0},
        {"top_p": 0.0, "temperature": 5.0},
        {"min_p": 1.0, "temperature": 0.5},
    ):
        assert draw(ctx, 3, **options) == [best] * 3


def test_seeds_repeat_and_differ(ctx: LlamaContext) -> None:
    hot = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert draw(ctx, **hot, seed=7) == draw(ctx, **hot, seed=np.int64(7))
    assert draw(ctx, **hot, seed=7) != draw(ctx, **hot, seed=8)
    assert draw(ctx, **hot) != draw(ctx, **hot)
    sampler = Sampler(**hot, seed=7, presence_penalty=1.0)
    first = [sampler.sample(ctx) for _ in range(20)]
    sampler.reset()
    assert [sampler.sample(ctx) for _ in range(20)] == first


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


def test_penalties_count_what_was_taken_and_accepted(ctx: LlamaContext) -> None:
    order = np.argsort(-ctx.logits()).tolist()
    for penalty in ({"presence_penalty": 1e5}, {"frequency_penalty": 1e5}):
        assert draw(ctx, 5, temperature=0, **penalty) == order[:5]
        # With a memory of two tokens the best comes back third.
        short = draw(ctx, 5, temperature=0, penalty_last_n=2, **penalty)
        assert short == [*order[:3], *order[:2]]
        assert draw(ctx, 3, temperature=0, penalty_last_n=0, **penalty) == [order[0]] * 3
    logits = ctx.logits()
    assert logits[order[0]] > 0
    logits[order[0]] /= 1e3
    assert draw(ctx, 2, temperature=0, repeat_penalty=1e3)[1] == int(logits.argmax())
    sampler = Sampler(temperature=0, presence_penalty=1e5)
    for token in (order[0], np.int64(order[1])):
        sampler.accept(token, ctx.model)
    assert sampler.sample(ctx) == order[2]
    sampler.reset()
    assert sampler.sample(ctx) == order[0]


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


def test_only_a_context_and_its_tokens_are_taken(ctx: LlamaContext) -> None:
    sampler = Sampler()
    for what in (None, 5, "ctx", LlamaContext):
        with pytest.raises(TypeError):
            sampler.sample(what)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sampler.accept(1, "ctx")  # type: ignore[arg-type]
    for token in (-1, 320, 10**20):
        with pytest.raises(IndexError, match=str(token)):
            sampler.accept(token, ctx.model)
    for wrong in (True, 1.0, None, "1"):
        with pytest.raises(TypeError):
            sampler.accept(wrong, ctx.model)  # type: ignore[arg-type]


@pytest.mark.hazard("D37")
def test_sampling_needs_logits(make_context: Any) -> None:
    ctx = make_context("llama")
    with pytest.raises(IndexError):
        Sampler().sample(ctx)
    ctx.close()
    with pytest.raises(ClosedError):
        Sampler().sample(ctx)


OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def log_softmax(logits: Any) -> Any:
    x = np.asarray(logits, np.float64)
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5))


# Arrays -------------------------------------------------------------------------------


def test_an_array_is_sampled_as_the_context_is(ctx: LlamaContext) -> None:
    a, b = (Sampler(seed=3, presence_penalty=1.0) for _ in range(2))
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
        (np.zeros(5, np.int32), TypeError, "float32"),
        (np.zeros((1, 5), np.float32), ValueError, r"\(1, 5\)"),
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
    with pytest.raises(ValueError, match="leave it out"):
        Sampler().sample(np.zeros(5, np.float32), 0)


@pytest.mark.hazard("N59")
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 0.5])
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


def test_a_bias_is_added_and_bans(ctx: LlamaContext) -> None:
    bias = {3: 2.5, np.int64(300): -1.0, 5: -INF, 6: np.float32(1.0)}
    wanted = ctx.logits()
    wanted[[3, 300, 5, 6]] += np.float32([2.5, -1.0, -INF, 1.0])
    sampler = Sampler(temperature=1, logit_bias=bias, **OPEN)
    bias.clear()  # the mapping was copied
    assert close(sampler.logprobs(ctx), log_softmax(wanted))
    order = np.argsort(-ctx.logits()).tolist()
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


@pytest.mark.parametrize(
    ("bias", "kind", "said"),
    [
        ([1, 2], TypeError, "map tokens"),
        ({-1: 0.0}, ValueError, "-1"),
        ({2**31: 0.0}, ValueError, "2147483648"),
        ({True: 0.0}, TypeError, "True"),
        ({1: NAN}, ValueError, "token 1 is nan"),
        ({1: INF}, ValueError, "token 1 is inf"),
        ({1: 2e6}, ValueError, "1e.06"),
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


def test_accept_leads_the_grammar_on_where_asked(ctx: LlamaContext) -> None:
    def piece(token: int) -> bytes:
        return ctx.model.token_to_piece(token)

    tokens = {piece(t): t for t in range(ctx.model.n_vocab)}
    sampler = Sampler(temperature=0, grammar='root ::= "a" "b" "c"', model=ctx.model)
    sampler.accept(tokens[b"z"])  # of a prompt
    assert piece(sampler.clone().sample(ctx)) == b"a"
    sampler.accept(tokens[b"a"], grammar=True)
    before = sampler.logprobs(ctx)
    with pytest.raises(ValueError, match="grammar does not allow token"):
        sampler.accept(tokens[b"z"], grammar=True)
    np.testing.assert_array_equal(sampler.logprobs(ctx), before)
    with pytest.raises(ValueError, match="319 logits given: the grammar's model has 320"):
        sampler.sample(np.zeros(319, np.float32))
    assert piece(sampler.sample(ctx)) == b"b"
    with pytest.raises(TypeError, match="grammar must be True or False"):
        sampler.accept(1, grammar=1)  # type: ignore[arg-type]


# Settings -----------------------------------------------------------------------------


def test_the_repr_makes_the_same_sampler() -> None:
    one = Sampler(temperature=0.25, top_k=7, penalty_last_n=9, seed=11, logit_bias={4: -2.0})
    assert repr(eval(repr(one))) == repr(one)
    for part in ("temperature=0.25", "top_k=7", "penalty_last_n=9", "seed=11", "{4: -2.0}"):
        assert part in repr(one)


# The likeliest token, in rows of every length ------------------------------------------------

LENGTHS = [*range(1, 40), 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1540]
WARM = {"temperature": 1e-3, "top_k": 5, "seed": 1}


@pytest.mark.parametrize("settings", [{"temperature": 0}, WARM], ids=["greedy", "warm"])
def test_the_largest_is_found_wherever_it_is(settings: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    sampler = Sampler(**settings)  # type: ignore[arg-type]
    for n in LENGTHS:
        row = rng.normal(size=n).astype(np.float32)
        for at in {0, n - 1, n // 2, *rng.integers(0, n, 4).tolist()}:
            peaked = row.copy()
            peaked[at] = 9
            assert sampler.sample(peaked) == at, (n, at)
            assert sampler.sample(peaked - 1000) == at, (n, at)
            for wrong in (NAN, INF):
                peaked[at] = wrong
                with pytest.raises(ValueError, match=f"token {at} is"):
                    sampler.sample(peaked)
        if "seed" not in settings:
            assert sampler.sample(np.round(row)) == int(np.round(row).argmax())
        nothing = np.full(n, -INF, np.float32)
        with pytest.raises(DecodeError, match="no token is left"):
            sampler.sample(nothing)
        nothing[n // 2] = -3
        assert sampler.sample(nothing) == n // 2
