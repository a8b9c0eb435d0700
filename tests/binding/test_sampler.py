"""The sampler: llama.cpp's stages with checked values, log-probabilities, bias, copies."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from binding.kit import words
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache.errors import ArgumentError, DecodeError, ReentryError
from pykvcache.sampling import SETTINGS
from support.examples import examples

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
    "typical_p": (1e-6, 1),
    "top_n_sigma": (0, 1e6),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dry_multiplier": (0, 1e6),
    "dry_base": (1, 1e6),
    "dry_allowed_length": (0, 2**20),
    "dry_last_n": (0, 2**20),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 1e4),
    "mirostat_eta": (0, 1e4),
    "adaptive_target": (0, 1),
    "adaptive_decay": (0, 0.99),
}
INTEGERS = ["top_k", "penalty_last_n", "seed", "dry_allowed_length", "dry_last_n", "mirostat"]
#: The model's own chances.
OPEN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
HOT = OPEN | {"temperature": 3.0}
DIGITS = "root ::= [0-9]"
NUMBER = 'root ::= "a" [0-9]{4} "b"+'


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


def test_seeds_differ(ctx: LlamaContext) -> None:
    assert draw(ctx, **HOT, seed=7) == draw(ctx, **HOT, seed=np.int64(7))
    assert draw(ctx, **HOT, seed=7) != draw(ctx, **HOT, seed=8)
    assert draw(ctx, **HOT) != draw(ctx, **HOT)


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


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_a_range_are_inside_and_the_rest_is_refused(
    name: str, ctx: LlamaContext
) -> None:
    low, high = RANGES[name]
    for value in (low, high):
        assert 0 <= Sampler(**{"seed": 1, name: value}, model=ctx.model).sample(ctx) < 320
    step = 1 if name in INTEGERS else 1e-3
    wrong = [low - step, high * 2 + 2, -(10**40), 10**40, 10**400]
    wrong += [] if name in INTEGERS else [NAN, INF, -INF]
    for value in wrong:
        with pytest.raises(ValueError, match=name):
            Sampler(**{name: value})
    types = [True, "1", b"1", [1], 1j, object()]
    types += [1.5] if name in INTEGERS else []
    types += [] if name in ("seed", "adaptive_target") else [None]
    for value in types:
        with pytest.raises(TypeError):
            Sampler(**{name: value})


def log_softmax(logits: Any) -> Any:
    x = np.asarray(logits, np.float64)
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5))


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
        (LlamaContext, TypeError, "array of logits, not type"),
    ],
)
def test_arrays_that_are_not_logits_are_refused(wrong: Any, kind: Any, said: str) -> None:
    for method in (Sampler().sample, Sampler(temperature=0).sample, Sampler().logprobs):
        with pytest.raises(kind, match=said):
            method(wrong)
    with pytest.raises(ValueError, match="leave it out"):
        Sampler().sample(np.zeros(5, np.float32), 0)
    with pytest.raises(TypeError, match="must be a LlamaModel"):
        Sampler().accept(1, "ctx")  # type: ignore[arg-type]


@pytest.mark.hazard("N59")
@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 0.5])
@pytest.mark.parametrize("scale", [1.0, 1e30, 3e38])
def test_any_temperature_above_0_keeps_the_order(temperature: float, scale: float) -> None:
    """If a logit divided by the temperature is infinite, llama.cpp's probabilities are NaN."""
    for sign in (1, -1):
        logits = (sign * np.float32([0.25, 0.5, 1.0, 0.75]) * np.float32(scale)).astype(np.float32)
        sampler = Sampler(**(OPEN | {"temperature": temperature}), seed=1)
        chances = np.exp(sampler.logprobs(logits).astype(np.float64))
        assert chances.sum() == pytest.approx(1, abs=1e-5)
        assert int(chances.argmax()) == int(logits.argmax())
        if scale / temperature > 1e3:
            assert [sampler.sample(logits) for _ in range(20)] == [int(logits.argmax())] * 20


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


def test_logprobs_follow_penalties_and_grammar(ctx: LlamaContext) -> None:
    sampler = Sampler(**OPEN, presence_penalty=2.0)
    sampler.accept(7)
    wanted = ctx.logits()
    wanted[7] -= 2
    assert close(sampler.logprobs(ctx), log_softmax(wanted))
    digits = Sampler(**OPEN, grammar=DIGITS, model=ctx.model)
    allowed = np.flatnonzero(np.isfinite(digits.logprobs(ctx)))
    assert len(allowed)
    assert all(ctx.model.token_to_piece(t).isdigit() for t in allowed)


def test_a_bias_is_added_and_bans(ctx: LlamaContext) -> None:
    bias = {3: 2.5, np.int64(300): -1.0, 5: -INF, 6: np.float32(1.0)}
    wanted = ctx.logits()
    wanted[[3, 300, 5, 6]] += np.float32([2.5, -1.0, -INF, 1.0])
    sampler = Sampler(**OPEN, logit_bias=bias)
    bias.clear()  # the mapping was copied
    assert close(sampler.logprobs(ctx), log_softmax(wanted))
    order = np.argsort(-ctx.logits()).tolist()
    banned = dict.fromkeys(order[:3], -INF)
    assert Sampler(temperature=0, logit_bias=banned).sample(ctx) == order[3]
    hot = Sampler(**(OPEN | {"temperature": 1e4}), seed=1, logit_bias=banned)
    assert not {hot.sample(ctx) for _ in range(500)} & set(order[:3])
    with pytest.raises(DecodeError, match="no token is left"):
        Sampler(logit_bias=dict.fromkeys(order, -INF)).sample(ctx)
    everything = Sampler(grammar=DIGITS, model=ctx.model, logit_bias=dict.fromkeys(order, -INF))
    with pytest.raises(DecodeError, match="grammar allows no further token with this logit_bias"):
        everything.sample(ctx)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"logit_bias": [1, 2]}, TypeError, "map tokens"),
        ({"logit_bias": {-1: 0.0}}, ValueError, "-1"),
        ({"logit_bias": {2**31: 0.0}}, ValueError, "2147483648"),
        ({"logit_bias": {True: 0.0}}, TypeError, "True"),
        ({"logit_bias": {1: NAN}}, ValueError, "token 1 is nan"),
        ({"logit_bias": {1: INF}}, ValueError, "token 1 is inf"),
        ({"logit_bias": {1: 2e6}}, ValueError, "1e.06"),
        ({"logit_bias": {1: None}}, TypeError, "token 1"),
        ({"dry_multiplier": 1.0}, ValueError, "dry_multiplier needs model="),
        ({"mirostat": 1}, ValueError, "mirostat needs model="),
        ({"dry_sequence_breakers": [""]}, ValueError, "1 to 40 bytes"),
        ({"dry_sequence_breakers": ["x" * 41]}, ValueError, "1 to 40 bytes"),
        ({"grammar": DIGITS}, ValueError, "needs model="),
        ({"grammar": DIGITS, "model": "model"}, TypeError, "must be a LlamaModel"),
        ({"stages": "top_k"}, TypeError, "not a str"),
        ({"stages": 3}, TypeError, "names and calls, not int"),
        ({"stages": ["topk"]}, ValueError, "'topk' is not a stage"),
        ({"stages": ["top_k", "top_k"]}, ValueError, "'top_k' twice"),
    ],
)
def test_wrong_settings_are_refused(options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        Sampler(**options)


def test_a_bias_for_no_token_is_refused(ctx: LlamaContext) -> None:
    with pytest.raises(IndexError, match="token 320"):
        Sampler(logit_bias={320: 1.0}, model=ctx.model)
    late = Sampler(logit_bias={320: 1.0})
    for ask in (late.sample, late.logprobs, lambda ctx: ctx.generate(words(5), 3, late)):
        with pytest.raises(IndexError, match="token 320"):
            ask(ctx)
    assert ctx.kv_cache_seq_pos_max(0) == 9


def test_accept_leads_the_grammar_on_where_asked(ctx: LlamaContext) -> None:
    def piece(token: int) -> bytes:
        return ctx.model.token_to_piece(token)

    tokens = {piece(t): t for t in range(ctx.model.n_vocab)}
    sampler = Sampler(temperature=0, grammar='root ::= "a" "b" "c"', model=ctx.model)
    sampler.accept(tokens[b"z"])  # of a prompt
    sampler.clone().accept(319)  # the last token of the same vocabulary
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


def test_the_repr_makes_the_same_sampler() -> None:
    one = Sampler(temperature=0.25, top_k=7, penalty_last_n=9, seed=11, logit_bias={4: -2.0})
    assert repr(eval(repr(one))) == repr(one)
    for part in ("temperature=0.25", "top_k=7", "penalty_last_n=9", "seed=11", "{4: -2.0}"):
        assert part in repr(one)


LENGTHS = [*range(1, 40), 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1540]
WARM = {"temperature": 1e-3, "top_k": 5, "seed": 1}
NO_CHOICE = {"temperature": 0, "top_k": 5, "top_p": 0.1, "seed": 3}


@pytest.mark.parametrize("settings", [{"temperature": 0}, NO_CHOICE, WARM], ids=str)
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
        if settings["temperature"] == 0:
            assert sampler.sample(np.round(row)) == int(np.round(row).argmax())
        nothing = np.full(n, -INF, np.float32)
        with pytest.raises(DecodeError, match="no token is left"):
            sampler.sample(nothing)
        nothing[n // 2] = -3
        assert sampler.sample(nothing) == n // 2


COPIES: dict[str, Callable[[Sampler], Sampler]] = {
    "clone": Sampler.clone,
    "copy": copy.copy,
    "deepcopy in a list": lambda sampler: copy.deepcopy([sampler])[0],
}


@pytest.fixture(params=COPIES)
def duplicate(request: Any) -> Callable[[Sampler], Sampler]:
    return COPIES[request.param]


def drawn(sampler: Sampler, ctx: LlamaContext, n: int) -> list[int]:
    return [sampler.sample(ctx) for _ in range(n)]


@pytest.mark.hazard("N58")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grammar": NUMBER},
        {"xtc_probability": 0.5},
        {"typical_p": 0.5},
        {"mirostat": 1},
        {"mirostat": 2},
        {"adaptive_target": 0.3},
        {"dry_multiplier": 2.0},
        {"stages": ["temperature", "penalties", "top_k"], "repeat_penalty": 1.5},
        {"presence_penalty": 1e5},
    ],
    ids=str,
)
def test_a_copy_draws_what_the_original_draws(
    duplicate: Callable[[Sampler], Sampler], ctx: LlamaContext, options: dict[str, Any]
) -> None:
    for seed in (7, None):
        sampler = Sampler(**HOT, **options, seed=seed, model=ctx.model)
        begin = drawn(sampler, ctx, 5)
        twin = duplicate(sampler)
        twin.logprobs(ctx)  # changes nothing
        assert drawn(twin, ctx, 20) == drawn(sampler, ctx, 20)
        # One does not take the other's random numbers.
        ahead = duplicate(sampler)
        drawn(sampler, ctx, 7)
        again = duplicate(ahead)
        assert drawn(ahead, ctx, 20) == drawn(again, ctx, 20)
        twin.reset()
        if seed is not None:
            assert drawn(twin, ctx, 5) == begin
            assert drawn(Sampler(**HOT, **options, seed=seed, model=ctx.model), ctx, 5) == begin


def test_a_new_seed_restarts_every_random_stage(ctx: LlamaContext) -> None:
    options: dict[str, Any] = HOT | {"xtc_probability": 0.5, "xtc_threshold": 0.0}
    for more in ({}, {"mirostat": 2}, {"stages": ["xtc", "temperature"]}):
        one = Sampler(**options, **more, seed=1)
        drawn(one, ctx, 5)
        for seed in (1, 7):
            fresh = Sampler(**options, **more, seed=seed)
            assert drawn(one.clone(seed=seed), ctx, 20) == drawn(fresh, ctx, 20)
    one = Sampler(**HOT)
    assert drawn(one.clone(seed=-1), ctx, 20) != drawn(one.clone(seed=-1), ctx, 20)


def test_a_new_seed_keeps_the_history(ctx: LlamaContext) -> None:
    order = np.argsort(-ctx.logits()).tolist()
    for stages in (None, ["top_k", "penalties", "xtc", "temperature"]):
        one = Sampler(temperature=1e-3, presence_penalty=1e5, seed=1, stages=stages, top_k=20)
        assert drawn(one, ctx, 3) == order[:3]
        assert drawn(one.clone(seed=2), ctx, 2) == order[3:5]


def test_a_copy_of_a_subclass_is_one(duplicate: Callable[[Sampler], Sampler]) -> None:
    sampler = type("Named", (Sampler,), {"name": "n"})(temperature=0)
    sampler.name = "other"
    twin = duplicate(sampler)
    assert (type(twin), twin.name, repr(twin)) == (type(sampler), "other", repr(sampler))  # type: ignore[attr-defined]


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


Floats = NDArray[np.float32]
N = 64


def logits(seed: int, scale: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(N) * scale).astype(np.float32)


def chances(row: Floats) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    p = np.exp(wide - wide.max())
    return np.asarray(p / p.sum())


def kept(sampler: Sampler, row: Floats) -> set[int]:
    return set(np.flatnonzero(sampler.logprobs(row) > -np.inf).tolist())


def nucleus(order: Any, p: Any, limit: float) -> Any:
    return order[: int(np.searchsorted(np.cumsum(p[order]), limit)) + 1]


def typical(row: Floats, p: NDArray[np.float64], limit: float) -> Any:
    unusual = np.abs(-np.log(p) + (p * np.log(p)).sum())
    return nucleus(np.argsort(unusual, kind="stable"), p, limit)


#: Values of a setting, and the tokens that are kept of logits with their chances.
CUTS: dict[str, tuple[Any, Callable[[Floats, Any, Any], Any]]] = {
    "top_k": (st.integers(1, N), lambda row, p, k: np.argsort(-row)[:k]),
    "top_p": (st.floats(0, 0.95), lambda row, p, limit: nucleus(np.argsort(-row), p, limit)),
    "min_p": (st.floats(0.01, 1), lambda row, p, least: np.flatnonzero(p >= least * p.max())),
    "typical_p": (st.floats(0.1, 0.95), typical),
    "top_n_sigma": (
        st.floats(0.1, 4),
        lambda row, p, n: np.flatnonzero(row >= row.max() - np.float32(n) * row.std()),
    ),
}


@pytest.mark.parametrize("name", CUTS)
@settings(max_examples=examples(50))
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_cut_keeps_what_its_definition_keeps(name: str, data: Any, seed: int) -> None:
    values, cut = CUTS[name]
    row, value = logits(seed), data.draw(values)
    found = Sampler(**(OPEN | {name: value})).logprobs(row)
    chosen = np.flatnonzero(found > -np.inf)
    wanted = cut(row, chances(row), value).tolist()
    at_the_limit = name in ("typical_p", "top_n_sigma")
    assert len(set(chosen.tolist()).symmetric_difference(wanted)) <= at_the_limit
    assert found.dtype == np.float32
    assert close(found[chosen], log_softmax(row[chosen]))


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1000), threshold=st.floats(0.0, 0.5))
def test_xtc_leaves_the_least_likely_of_the_likely(seed: int, threshold: float) -> None:
    row = logits(seed)
    row[5] = -np.inf
    probability = chances(row)
    likely = np.flatnonzero(probability >= threshold)
    wanted = set(np.flatnonzero((probability > 0) & (probability < threshold)).tolist())
    if len(likely):
        wanted.add(
            int(likely[np.argmin(np.where(probability[likely] > 0, probability[likely], 2))])
        )
    found = kept(Sampler(**OPEN, xtc_probability=1.0, xtc_threshold=threshold, seed=1), row)
    assert 5 not in found
    if threshold <= 0.5 and threshold > 1e-6:
        assert len(found.symmetric_difference(wanted)) <= 2
    always = kept(Sampler(**OPEN, xtc_probability=0.0, xtc_threshold=threshold), row)
    assert always == set(range(N)) - {5}


def test_no_stage_restores_excluded_tokens() -> None:
    banned = {t: -math.inf for t in range(0, N, 2)}
    for options in (
        {"typical_p": 0.2},
        {"typical_p": 0.999},
        {"top_n_sigma": 3.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"mirostat": 2},
        {"adaptive_target": 0.0},
        {"adaptive_target": 0.9},
    ):
        sampler = Sampler(**OPEN, **options, logit_bias=banned, seed=3)  # type: ignore[arg-type]
        assert {sampler.sample(logits(i)) % 2 for i in range(200)} == {1}, options


def test_dry_ends_repetitions(stories: LlamaModel) -> None:
    n = stories.n_vocab
    sampler = Sampler(temperature=0, dry_multiplier=4.0, dry_base=2.0, model=stories)
    pattern = [200, 201, 202, 203]
    for token in pattern * 2:
        sampler.accept(token, stories)
    row = np.zeros(n, np.float32)
    row[200], row[300] = 5, 1
    # 200 would continue a repetition of 4: it loses 4 * 2 ** (4 - 2) = 16.
    assert sampler.clone().sample(row) == 300
    row[200] = 18
    assert sampler.clone().sample(row) == 200
    assert copy.copy(sampler).sample(row) == 200
    sampler.reset()
    row[200] = 5
    assert sampler.sample(row) == 200


@pytest.mark.parametrize(
    ("options", "target", "low", "high"),
    [
        ({"mirostat": 1}, "mirostat_tau", 2.0, 5.0),
        ({"mirostat": 2}, "mirostat_tau", 2.0, 5.0),
        ({}, "adaptive_target", 0.05, 0.4),
    ],
)
def test_choices_come_near_their_target(
    stories: LlamaModel, options: dict[str, Any], target: str, low: float, high: float
) -> None:
    """A surprise in bits for Mirostat, a probability for adaptive-p."""
    rng = np.random.default_rng(1)
    rows = [(rng.standard_normal(500) * 2.5).astype(np.float32) for _ in range(600)]
    means = []
    for value in (low, high):
        sampler = Sampler(**(OPEN | options | {target: value}), seed=1, model=stories)
        found = np.array([chances(row)[sampler.sample(row)] for row in rows])[100:]
        means.append(float(np.mean(-np.log2(found) if options else found)))
    assert means[0] < means[1]
    assert options or means[0] == pytest.approx(low, abs=0.08)


def test_stages_that_are_not_named_do_nothing() -> None:
    row = logits(4)
    assert kept(Sampler(temperature=1, top_k=3, top_p=0.1, stages=["temperature"]), row) == set(
        range(N)
    )
    only = Sampler(temperature=0.1, top_k=3, stages=["top_k"])
    three = row[sorted(kept(only, row))]
    expected = np.log(chances(three))
    assert np.allclose(sorted(only.logprobs(row))[-3:], sorted(expected), atol=1e-5)


def test_the_named_default_order_is_the_default() -> None:
    order = ["penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p"]
    order += ["xtc", "temperature"]
    rows = [logits(i) for i in range(50)]
    one, two = Sampler(seed=9), Sampler(seed=9, stages=order)
    assert [one.sample(row) for row in rows] == [two.sample(row) for row in rows]


def test_a_call_changes_logits() -> None:
    seen: list[tuple[NDArray[np.int32], Floats]] = []

    def only_odd(ids: NDArray[np.int32], values: Floats) -> Floats:
        seen.append((ids.copy(), values.copy()))
        return np.where(ids % 2 == 1, values, -np.inf).astype(np.float32)

    row = logits(5)
    greedy = Sampler(temperature=0, stages=[only_odd])
    assert greedy.sample(row) == max(range(1, N, 2), key=lambda t: row[t])
    assert seen[0][0].tolist() == list(range(N))
    assert np.array_equal(seen[0][1], row)
    narrow = Sampler(temperature=1, top_k=5, stages=["top_k", only_odd, "temperature"], seed=1)
    assert {narrow.sample(row) % 2 for _ in range(20)} == {1}
    assert len(seen[-1][0]) == 5

    def in_place(ids: NDArray[np.int32], values: Floats) -> None:
        values[ids == 7] = 100

    assert Sampler(temperature=0, stages=[in_place]).clone().sample(row) == 7


def test_exceptions_of_a_stage_are_raised() -> None:
    class Mine(Exception):
        pass

    def fails(ids: Any, values: Any) -> None:
        raise Mine("here")

    sampler = Sampler(temperature=0, stages=[fails])
    with pytest.raises(Mine, match="here"):
        sampler.sample(logits(1))
    with pytest.raises(Mine):
        sampler.logprobs(logits(1))
    for result in (np.zeros(3), "x", np.full(N, np.nan), np.full(N, np.inf), [1], object()):
        bad = Sampler(temperature=0, stages=[lambda ids, values, r=result: r])  # type: ignore[misc]
        with pytest.raises((ArgumentError, TypeError, ValueError)):
            bad.sample(logits(1))
    nothing = Sampler(temperature=1, stages=[lambda ids, values: np.full(len(ids), -np.inf)])
    with pytest.raises(DecodeError, match="no token is left"):
        nothing.sample(logits(1))


def test_requests_use_calls(stories: LlamaModel) -> None:
    def no_e(ids: NDArray[np.int32], values: Floats) -> Floats:
        return np.where(np.isin(ids, with_e), -np.inf, values)

    with_e = [t for t in range(stories.n_vocab) if b"e" in stories.token_to_piece(t)]
    sampler = Sampler(temperature=0, stages=[no_e])
    with LlamaContext(stories, n_ctx=1024, n_seq_max=8) as ctx:
        with LlamaSequence(ctx, "Once upon a time") as sequence:
            alone = "".join(sequence.stream(20, sampler.clone()))
        assert "e" not in alone
        with BatchGenerator(ctx) as generator:
            handles = [generator.submit("Once upon a time", 20, sampler) for _ in range(8)]
            generator.run()
            assert {handle.text for handle in handles} == {alone}
            fails = Sampler(temperature=0, stages=[lambda ids, values: 1 / 0])  # type: ignore[arg-type, return-value]
            wrong, right = generator.submit("Once", 5, fails), generator.submit("Once", 5)
            generator.run()
            assert (wrong.finish_reason, right.finish_reason) == ("error", "length")
            assert isinstance(wrong.error, ZeroDivisionError)
