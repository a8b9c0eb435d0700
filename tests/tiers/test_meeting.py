"""Load or recompute: the rule by counted time, and evaluation that meets what is loaded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from memory.kit import Case, Logits, apart
from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.prefix.stores import MemoryStore
from pykvcache.prefix.tiers.fetch import Fetch
from pykvcache.prefix.tiers.rule import PATIENCE, RISK, Savings, is_hopeless, next_part, wait_until
from pykvcache.prefix.tiers.speeds import EvaluationTime, TwoTerms
from tiers.slow import SlowStore
from tiers.test_tiers import SERVED, SIZE, words

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]


# The rule ---------------------------------------------------------------------------------------


@dataclass
class World:
    """Counted time. ``believed`` and ``guess``: by what evaluating and loading are misjudged."""

    n: int
    a: float
    b: float
    cut: float
    latency: float
    per_token: float
    believed: float = 1.0
    guess: float = 1.0
    group: int = 512

    def evaluate(self, begin: int, end: int) -> float:
        return self.a * (end - begin) + self.b * (end**2 - begin**2)

    @property
    def alone(self) -> float:
        return self.evaluate(0, self.n)

    @property
    def load(self) -> float:
        return self.latency + self.n * self.per_token

    def come(self, now: float) -> int:
        """How many tokens have come, the last ones first, in groups."""
        if now >= self.load:
            return self.n
        return max(0, int((now - self.latency) / self.per_token) // self.group * self.group)

    def left(self, now: float, to_load: int) -> float:
        """As `Fetch.left`."""
        n_groups, come = -(-to_load // self.group), self.come(now)
        since = now - (self.latency + come * self.per_token if come else 0.0)
        return max(self.guess * self.load * to_load / self.n, since * n_groups)

    def request(self, savings: Savings) -> float:
        """Seconds that a request takes with the rule, as `TierMethods` and `Meeting` use it."""
        thinks = self.believed * self.alone
        allowance = savings.allowance(thinks, answered=True)
        if is_hopeless(self.load * self.guess, thinks):
            savings.note(thinks, 0)
            return self.alone
        now = 0.0
        while now < self.load:
            come = self.come(now)
            saved = self.believed * self.evaluate(self.n - come, self.n)
            until = wait_until(now, self.left(now, self.n - come), allowance, saved)
            until = max(until, savings.try_until(thinks))
            if until <= now:
                break
            now = min(until, self.load)
        savings.note(thinks, now)
        if now >= self.load:
            savings.gain(thinks, thinks)
            return now
        come = self.come(now)
        may_lose = allowance - now + self.believed * self.evaluate(self.n - come, self.n)
        at = 0
        while at < (end := self.n - self.come(now)):
            seconds = self.believed * self.evaluate(at, end)
            left, cut = self.left(now, end - at), self.believed * self.cut
            part, loss = next_part(end - at, seconds, left, 512, cut, may_lose)
            may_lose -= loss
            savings.gain(thinks, -loss)
            more = -(-part // 512) - (-(end - at - part) // 512) + (-(end - at) // 512)
            now += self.evaluate(at, at + part) + more * self.cut
            at += part
        savings.gain(thinks, self.believed * self.evaluate(at, self.n))
        return now


def some_world(rng: random.Random, most: int) -> World:
    """Speeds over many orders of magnitude; what was learned of tiers may be off by 1,000."""
    a = 10 ** rng.uniform(-6, -2)
    return World(
        int(2 ** rng.uniform(6, most)),
        a,
        a * 10 ** rng.uniform(-7, -4),
        a * 2 ** rng.uniform(1, 6),
        10 ** rng.uniform(-5, 2),
        10 ** rng.uniform(-8, 0),
        rng.uniform(0.8, 1.25),
        10 ** rng.uniform(-3, 3),
    )


def test_the_rule_loses_five_percent_at_most_in_20_000_cases() -> None:
    """Each is the first request of a cache."""
    rng = random.Random(1)
    worst, gains = 0.0, []
    for _ in range(20_000):
        world = some_world(rng, 15)
        ratio = world.request(Savings()) / world.alone
        worst = max(worst, ratio)
        if world.load < world.alone / 100:
            gains.append(1 / ratio)
    assert worst <= 1.05
    assert np.median(gains) > 20


def test_the_rule_loses_five_percent_at_most_over_many_requests() -> None:
    """Of tiers that become 10,000 times slower at the worst time."""
    rng = random.Random(2)
    worst_short, worst, worst_sum = 0.0, 0.0, 0.0
    for _ in range(300):
        savings, took, alone = Savings(), 0.0, 0.0
        world = some_world(rng, 13)
        for i in range(40):
            if i % 5 == 0:
                world.per_token = 10 ** rng.uniform(-8, 0)
                world.latency = 10 ** rng.uniform(-5, 2)
            world.n, world.guess = int(2 ** rng.uniform(6, 13)), 10 ** rng.uniform(-3, 3)
            seconds = world.request(savings)
            took, alone = took + seconds, alone + world.alone
            worst_sum = max(worst_sum, took / alone)
            if seconds - world.alone <= 0.0126:  # 10 ms, misjudged by a quarter
                worst_short = max(worst_short, seconds / world.alone)
            else:
                worst = max(worst, seconds / world.alone)
    assert worst_sum <= 1.05
    assert worst <= 1.0501
    assert worst_short <= 1.2501


def test_a_tier_that_does_not_answer_costs_little_whatever_was_saved() -> None:
    savings = Savings()
    assert savings.allowance(2.0, answered=False) == pytest.approx(2 * PATIENCE)
    savings.gain(2.0, 1e9)
    for evaluation in (0.01, 0.08, 2.0, 300.0):
        allowance = savings.allowance(evaluation, answered=False)
        assert allowance <= RISK * evaluation
        assert wait_until(0.0, 0.0, allowance, 0.0) <= allowance
        assert wait_until(0.0, 0.0, savings.allowance(2.0, answered=True), 0.0) <= 2.0 * RISK


@pytest.mark.parametrize(
    ("n", "alone", "load"),
    [
        (256, 0.08, 0.005),
        (256, 0.08, 0.01),
        (1024, 0.48, 0.015),
        (1024, 0.48, 0.06),
        (4096, 3, 0.3),
    ],
    ids=str,
)
def test_a_tier_that_keeps_its_word_is_waited_for(n: int, alone: float, load: float) -> None:
    """From the third request on at most one short part is evaluated."""
    rng, savings = random.Random(3), Savings()
    for i in range(12):
        guess = rng.uniform(0.8, 1.2)
        world = World(n, alone / n, 0, 0.003, 0.3 * load, 0.7 * load / n, 1, guess)
        seconds = world.request(savings)
        assert seconds <= 1.03 * alone
        assert i < 2 or seconds <= 1.6 * load


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    """What it does beside an evaluation is all that is known, and that is too little."""
    savings, world = Savings(), World(1024, 0.001, 0, 0.003, 0.01, 1e-5, guess=15)
    took = [world.request(savings) for _ in range(20)]
    assert min(took[:2]) > 10 * world.load  # what little was loaded beside has saved a lot
    assert took[2] == pytest.approx(world.load)


def test_a_tier_that_never_saved_anything_is_tried_less_often() -> None:
    savings, waits = Savings(), []
    for _ in range(40):
        waits.append(savings.try_until(1.0) > 0)
        savings.note(1.0, PATIENCE if waits[-1] else 0.0)
        savings.seconds = min(savings.seconds, 0.4)
    assert waits[:9] == [False] * 8 + [True]
    assert sum(waits) == 4
    savings.seconds = 0.6
    assert [savings.try_until(1.0) > 0, savings.in_a_row] == [True, 4]


def test_parts_are_as_long_as_what_comes_should_take() -> None:
    assert next_part(1000, 1.0, 0.1, 512, 0.002, 1.0) == (91, 0.002)
    assert next_part(1024, 1.0, 0.0, 512, 0.01, 1.0) == (11, 0.01)  # not shorter than a cut
    assert next_part(1024, 1.0, 0.1, 512, 0.01, 0.009) == (512, 0.0)  # it may not lose that
    assert next_part(1025, 1.0, 0.1, 512, 0.01, 0.0) == (94, 0.0)  # there are three parts anyhow
    assert next_part(100, 1.0, 9.0, 512, 0.01, 1.0) == (91, 0.01)
    assert next_part(100, 1.0, 99.0, 512, 0.01, 1.0) == (100, 0.0)
    assert next_part(1, 0.0, 0.0, 512, 0.0, 0.0) == (1, 0.0)


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
    monkeypatch.setattr("pykvcache.prefix.meeting.next_part", lambda *_: (SIZE, 0.0))
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
    if not case.info.has_rest:
        assert report.evaluated <= {1: 56, 3: 34, 100: 34}[pace]
    assert report.remote >= 24 or (case.info.has_rest and hole is not None)
    assert f"{report.remote} tokens came" in report.reason or not report.remote
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
    monkeypatch.setattr("pykvcache.prefix.meeting.next_part", lambda *_: (SIZE, 0.0))
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
