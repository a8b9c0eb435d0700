"""Load or recompute: the rule by counted time, and evaluation that meets what is loaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import Case, Logits, apart
from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.prefix.stores import MemoryStore
from pykvcache.prefix.tiers.fetch import Fetch
from pykvcache.prefix.tiers.speeds import EvaluationTime, TwoTerms, load_wait, next_chunk
from tiers.slow import SlowStore
from tiers.test_tiers import SERVED, SIZE, words

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]


# The rule ---------------------------------------------------------------------------------------


def simulate(
    n: int, a: float, b: float, believed: float, latency: float, per_token: float, guess: float
) -> tuple[float, float]:
    """Return (seconds with the rule, seconds of evaluating alone), in a world of counted time.

    ``believed``: by which factor the time of evaluation is misjudged; ``guess``: that of loading.
    """

    def evaluate(begin: float, end: float) -> float:
        return a * (end - begin) + b * (end**2 - begin**2)

    alone = evaluate(0, n)
    load = latency + n * per_token
    wait = load_wait(load * guess, alone * believed)
    if wait is None:
        return alone, alone
    if load <= wait:
        return load, alone
    now, at = wait, 0
    while at < n:
        # What has come: the last tokens.
        come = n if now >= load else max(0.0, (now - latency) / per_token)
        if at >= n - come:
            break
        end = min(n, at + next_chunk(n - at, believed * evaluate(at, n), 512))
        now += evaluate(at, end)
        at = end
    return now, alone


def test_the_rule_loses_five_percent_at_most_in_20_000_cases() -> None:
    """Speeds over many orders of magnitude; what was learned of tiers may be off by 1,000."""
    rng = random.Random(1)
    worst, gains = 0.0, []
    for _ in range(20_000):
        n = int(2 ** rng.uniform(6, 15))
        a = 10 ** rng.uniform(-6, -2)
        b = a * 10 ** rng.uniform(-7, -4)
        latency, per_token = 10 ** rng.uniform(-5, 2), 10 ** rng.uniform(-8, 0)
        guess = 10 ** rng.uniform(-3, 3)
        mine, alone = simulate(n, a, b, rng.uniform(0.8, 1.25), latency, per_token, guess)
        worst = max(worst, mine / alone)
        if latency + n * per_token < alone / 100:
            gains.append(alone / mine)
    assert worst <= 1.0501
    assert np.median(gains) > 20


def test_what_is_learned() -> None:
    time = EvaluationTime(1e-9)
    for begin, end in ((0, 4096), (0, 512), (512, 1024), (0, 2048)):
        time.note(begin, end, 1e-3 * (end - begin) + 1e-7 * (end**2 - begin**2))
    time.note(0, 1, 100.0)  # a token that is generated tells nothing of prompts
    assert time.seconds(0, 8192) == pytest.approx(8.192 + 6.71, rel=0.01)
    tier = TwoTerms(1, 1)
    for n_bytes in (0, 10**6, 0, 4 * 10**6):
        tier.note(1, n_bytes, 0.003 + n_bytes / 2e8)
    assert tier.seconds(1, 2 * 10**6) == pytest.approx(0.013, rel=0.01)
    for _ in range(20):
        tier.note(1, 10**6, 1.0)  # it has become slow
    assert tier.seconds(1, 10**6) == pytest.approx(1.0, rel=0.2)


def test_requests_that_move_nothing_say_nothing_of_the_bandwidth() -> None:
    tier = TwoTerms(5e-4, 1 / 1.5e9)
    for i in range(40):
        # Two terms that always come together cannot be told apart: one of them becomes 0.
        tier.note(1, 2e6, 3e-3 * (1 + 0.3 * (i % 2)))
    for seconds in (4e-4, 1e-3, 4e-4):
        tier.note(1, 0, seconds)
        assert tier.seconds(11, 25e6) < 0.1


# Meeting ----------------------------------------------------------------------------------------


class Steps:
    """Stands in a cache's way such that blocks come when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetches: list[Fetch] = []
        monkeypatch.setattr(Fetch, "start", lambda fetch: self.fetches.append(fetch))

    def come(self, seed: int, hole: int | None = None) -> None:
        """Let the search run to its end, and take blocks away that have not come yet."""
        fetch = self.fetches[-1]
        fetch.run()
        self.held = dict(fetch.blocks)
        fetch.done.clear()
        fetch.blocks.clear()
        self.order = sorted(self.held, reverse=True)
        if hole is not None and hole in self.held:
            self.order.remove(hole)

    def one(self) -> None:
        """Let the next block from the back come."""
        fetch = self.fetches[-1]
        if self.order:
            i = self.order.pop(0)
            fetch.blocks[i] = self.held[i]
        if not self.order:
            fetch.done.set()


@pytest.mark.parametrize(
    ("case", "pace", "hole"),
    [
        *((case, pace, None) for case in SERVED for pace in (1, 100)),
        *((case, 3, 3) for case in SERVED[::2]),
        *((case, 1, 3) for case in SERVED[1::2]),
    ],
    ids=str,
)
def test_front_and_back_meet_in_place(
    case: Case,
    pace: int,
    hole: int | None,
    make_context: Make,
    fresh_logits: Fresh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Per part of 8 tokens that is evaluated, `pace` blocks come from the back."""
    store, prompt = MemoryStore(), words(1, 93)
    with PrefixCache(
        make_context(case.name, **case.options), block_size=SIZE, tiers=[store]
    ) as cache:
        cache.sequence(prompt).evaluate()
    steps = Steps(monkeypatch)
    monkeypatch.setattr("pykvcache.prefix.meeting.next_chunk", lambda *_: SIZE)
    ctx = make_context(case.name, **case.options)
    cache = PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=0)
    sequence = cache.sequence(prompt)
    assert sequence.reuse.evaluated == 93
    steps.come(1, hole)
    incoming = sequence._cells.incoming
    assert incoming is not None

    def meet(cells: object) -> int | None:
        for _ in range(pace):
            steps.one()
        return type(incoming).meet(incoming, cells)  # type: ignore[arg-type]

    monkeypatch.setattr(incoming, "meet", meet)
    logits = sequence.logits()
    assert apart(logits, fresh_logits(case.name, prompt)) < case.tolerance
    report = sequence.reuse
    assert report.remote + report.evaluated == 93 == cache.stats().n_tokens
    assert ctx.tokens_evaluated == report.evaluated
    if case.info.memory == "attention":
        assert report.evaluated <= {1: 56, 3: 34, 100: 34}[pace]
    assert report.remote >= 24 or (case.info.memory != "attention" and hole is not None)
    made = list(sequence.generate(3))
    whole = [*prompt, *made]
    assert apart(sequence.logits(), fresh_logits(case.name, whole)) < case.tolerance
    cache.close()


@pytest.mark.parametrize("name", ["llama", "jamba"])
@pytest.mark.parametrize("edit", ["truncate", "sync", "append", "fork", "park", "close", "discard"])
def test_a_sequence_that_is_edited_meanwhile(
    name: str, edit: str, make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prompt = MemoryStore(), words(1, 93)
    with PrefixCache(make_context(name), block_size=SIZE, tiers=[store]) as cache:
        cache.sequence(prompt).evaluate()
    steps = Steps(monkeypatch)
    monkeypatch.setattr("pykvcache.prefix.meeting.next_chunk", lambda *_: SIZE)
    cache = PrefixCache(make_context(name), block_size=SIZE, tiers=[store], tier_seconds=0)
    sequence: Any = cache.sequence(prompt)
    steps.come(1)
    steps.one()
    steps.one()
    if edit == "truncate":
        sequence.truncate(50)
    elif edit == "sync":
        sequence.sync([*prompt[:70], *words(9, 20)])
    elif edit == "append":
        sequence.append(words(9, 30))
    elif edit == "fork":
        other = sequence.fork(60)
        assert apart(other.logits(), fresh_logits(name, prompt[:60])) < 1e-3
    elif edit == "park":
        sequence.park()
    elif edit == "close":
        sequence.close()
        assert steps.fetches[-1].is_cancelled
        return
    elif edit == "discard":
        sequence.discard(20, 40, reevaluate=True)
    while steps.order:
        steps.one()
    assert apart(sequence.logits(), fresh_logits(name, sequence.tokens)) < 1e-3
    cache.close()


def test_a_batch_meets_too(
    make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prompt = MemoryStore(), words(1, 93)
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store]) as cache:
        cache.sequence(prompt).evaluate()
    steps = Steps(monkeypatch)
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=0)
    generator = BatchGenerator(cache, n_chunk=SIZE)
    handle = generator.submit(prompt, 3)
    steps.come(1)
    while not len(handle.tokens):
        steps.one()
        generator.step()
    assert ctx.tokens_evaluated < 60
    assert handle.tokens[0] == int(fresh_logits("llama", prompt).argmax())


def test_a_slow_tier_holds_nobody_up_and_is_left_alone(make_context: Make) -> None:
    """What it takes is learned by the first request, which does not wait for it."""
    slow = SlowStore(MemoryStore(), latency=5.0)
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow.store]) as cache:
        cache.sequence(words(1, 93)).evaluate()
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow])
    with cache.sequence(words(1, 93)) as sequence:
        sequence.logits()
    assert sequence.reuse.evaluated == 93
    slow.closing.set()
    cache._tiers.tiers[0].speed.note(1, 0, 1e5)
    for i in range(3):
        with cache.sequence(words(2 + i, 93)) as sequence:
            sequence.logits()
    assert cache.stats().tiers[0].too_slow >= 3
    cache.close()
