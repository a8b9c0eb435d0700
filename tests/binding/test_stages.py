"""The stages of a sampler: each does what its paper says, in the order that is named."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache.errors import ArgumentError, DecodeError
from support.examples import examples

Floats = NDArray[np.float32]
N = 64
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def logits(seed: int, scale: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(N) * scale).astype(np.float32)


def chances(row: Floats) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    p = np.exp(wide - wide.max())
    return np.asarray(p / p.sum())


def kept(sampler: Sampler, row: Floats) -> set[int]:
    """The tokens that may be chosen."""
    return set(np.flatnonzero(sampler.logprobs(row) > -np.inf).tolist())


# Cuts ---------------------------------------------------------------------------------------------


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1000), n=st.floats(0.1, 4))
def test_top_n_sigma_keeps_logits_near_the_largest(seed: int, n: float) -> None:
    row = logits(seed)
    found = kept(Sampler(**OFF, top_n_sigma=n), row)
    wanted = np.flatnonzero(row >= row.max() - np.float32(n) * row.std())
    assert len(found.symmetric_difference(wanted.tolist())) <= 1  # at the limit


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 1000), p=st.floats(0.1, 0.95))
def test_typical_p_keeps_tokens_of_typical_surprise(seed: int, p: float) -> None:
    row = logits(seed)
    probability = chances(row)
    surprise = -np.log(probability)
    entropy = float((probability * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(probability[order]), p)) + 1
    found = kept(Sampler(**OFF, typical_p=p), row)
    assert len(found.symmetric_difference(order[:n].tolist())) <= 1


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
    found = kept(Sampler(**OFF, xtc_probability=1.0, xtc_threshold=threshold, seed=1), row)
    assert 5 not in found
    if threshold <= 0.5 and threshold > 1e-6:
        assert len(found.symmetric_difference(wanted)) <= 2
    always = kept(Sampler(**OFF, xtc_probability=0.0, xtc_threshold=threshold), row)
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
        sampler = Sampler(**OFF, **options, logit_bias=banned, seed=3)  # type: ignore[arg-type]
        assert {sampler.sample(logits(i)) % 2 for i in range(200)} == {1}, options


# Stages with a memory -----------------------------------------------------------------------------


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


def test_mirostat_holds_its_surprise(stories: LlamaModel) -> None:
    rng = np.random.default_rng(1)
    rows = [(rng.standard_normal(500) * 2).astype(np.float32) for _ in range(400)]
    for version in (1, 2):
        found = []
        for tau in (2.0, 5.0):
            sampler = Sampler(
                temperature=1, mirostat=version, mirostat_tau=tau, seed=1, model=stories
            )
            surprise = [-math.log2(chances(row)[sampler.sample(row)]) for row in rows]
            found.append(float(np.mean(surprise[100:])))
        assert found[0] < found[1], version


def test_adaptive_p_comes_near_its_target() -> None:
    rng = np.random.default_rng(2)
    rows = [(rng.standard_normal(100) * 2.5).astype(np.float32) for _ in range(600)]
    means = []
    for target in (0.05, 0.4):
        sampler = Sampler(**OFF, adaptive_target=target, seed=4)
        means.append(float(np.mean([chances(row)[sampler.sample(row)] for row in rows])))
    assert means[0] < means[1]
    assert means[0] == pytest.approx(0.05, abs=0.08)


@pytest.mark.parametrize(
    "options",
    [
        {"xtc_probability": 0.5},
        {"typical_p": 0.5},
        {"mirostat": 1},
        {"mirostat": 2},
        {"adaptive_target": 0.3},
        {"dry_multiplier": 2.0},
        {"stages": ["temperature", "penalties", "top_k"], "repeat_penalty": 1.5},
    ],
    ids=str,
)
def test_clones_choose_the_same_and_seeds_repeat(
    stories: LlamaModel, options: dict[str, Any]
) -> None:
    rows = [np.resize(logits(i), stories.n_vocab) for i in range(60)]
    first = Sampler(temperature=1, seed=5, model=stories, **options)
    begin = [first.sample(row) for row in rows[:30]]
    again = Sampler(temperature=1, seed=5, model=stories, **options)
    assert [again.sample(row) for row in rows[:30]] == begin
    clone = first.clone()
    # Asking for chances changes nothing.
    clone.logprobs(rows[0])
    assert [clone.sample(row) for row in rows[30:]] == [first.sample(row) for row in rows[30:]]
    first.reset()
    assert [first.sample(row) for row in rows[:30]] == begin


# Order --------------------------------------------------------------------------------------------


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


# Calls of the program's own -----------------------------------------------------------------------


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

            def broken(ids: Any, values: Any) -> None:
                raise ValueError("mine")

            wrong = generator.submit("Once", 5, Sampler(temperature=0, stages=[broken]))
            right = generator.submit("Once", 5)
            generator.run()
            assert wrong.finish_reason == "error"
            assert str(wrong.error) == "mine"
            assert right.finish_reason == "length"


# Arguments ----------------------------------------------------------------------------------------


def test_wrong_settings_are_refused(stories: LlamaModel) -> None:
    for options, error in [
        ({"typical_p": 0.0}, ValueError),
        ({"top_n_sigma": -1}, ValueError),
        ({"xtc_probability": 2}, ValueError),
        ({"xtc_threshold": float("nan")}, ValueError),
        ({"dry_multiplier": -1}, ValueError),
        ({"dry_multiplier": 1.0}, ValueError),  # without a model
        ({"dry_sequence_breakers": [""]}, ValueError),
        ({"dry_sequence_breakers": ["x" * 41]}, ValueError),
        ({"mirostat": 3}, ValueError),
        ({"mirostat": 1}, ValueError),  # without a model
        ({"adaptive_target": 1.5}, ValueError),
        ({"adaptive_decay": 1.0}, ValueError),
        ({"stages": "top_k"}, TypeError),
        ({"stages": ["topk"]}, ValueError),
        ({"stages": ["top_k", "top_k"]}, ValueError),
        ({"stages": 3}, TypeError),
        ({"seed": -2}, ValueError),
    ]:
        with pytest.raises(error):
            Sampler(**options)  # type: ignore[arg-type]
