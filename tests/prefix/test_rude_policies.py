"""Policies of users that raise, or answer what can never be meant: an error, and nothing broken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pykvcache.prefix.runs import Run

from memory.kit import Logits, apart
from prefix.accounts import check_accounts
from pykvcache import LlamaContext, PrefixCache
from pykvcache.errors import ArgumentError, ReentryError
from pykvcache.prefix.policies import LRU
from support.models import RIGHT

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]

LIMIT = 60_000


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


class Own(LRU):
    """Answers what somebody else says."""

    def __init__(self) -> None:
        super().__init__()
        self.size: Callable[[], Any] = lambda: 0
        self.chosen: Callable[[], Any] = super().victim
        self.resized: Callable[[], object] = lambda: None
        self.most: Callable[[], Any] = lambda: 10**30

    @property
    def n_bytes(self) -> Any:  # type: ignore[override]
        return self.size()

    @property
    def most_blocks(self) -> Any:  # type: ignore[override]
        return self.most()

    def resize(self, max_bytes: int) -> None:
        self.resized()

    def victim(self) -> Any:
        return self.chosen()


class Odd(Exception):
    """Of a user's own."""


def odd() -> object:
    raise Odd


def use(cache: PrefixCache, seed: int, check: Callable[..., None] = lambda *_: None) -> None:
    for more, n in ((1, 40), (1, 33), (2, 50), (3, 60)):
        prompt = [*words(seed + more, n), 9, 8, 7]
        with cache.sequence(prompt) as sequence:
            check(sequence.logits(), prompt)


def goes_on(cache: PrefixCache, fresh: Fresh, make: Make) -> None:
    """Check that a cache whose policy behaves again works, and ends."""

    def check(got: Logits, prompt: list[int]) -> None:
        assert apart(got, fresh("llama", prompt)) < RIGHT

    use(cache, 7, check)
    check_accounts(cache)
    assert cache.stats().ram_bytes <= LIMIT
    cache.close()
    assert not cache.context.sequences()


@pytest.mark.parametrize("how", ["raise", "clear", "stats", "tree", "text", "negative", "float"])
def test_what_a_policy_takes(how: str, make_context: Make, fresh_logits: Fresh) -> None:
    policy = Own()
    cache = PrefixCache(
        make_context("llama", n_seq_max=2), block_size=8, ram_bytes=LIMIT, policy=policy
    )
    use(cache, 1)
    answers: dict[str, tuple[Callable[[], object], type[Exception] | None]] = {
        "raise": (odd, Odd),
        "clear": (cache.clear, ReentryError),
        "stats": (lambda: cache.stats().ram_bytes, None),
        "tree": (cache.tree, ReentryError),
        "text": (lambda: "much", TypeError),
        "negative": (lambda: -1, ArgumentError),
        "float": (lambda: 1.5, TypeError),
    }
    policy.size, error = answers[how]
    calls = (cache.stats, lambda: use(cache, 2), lambda: cache.sequence(words(2, 9)))
    for call in calls if error is not None else ():
        with pytest.raises(error):  # type: ignore[arg-type]
            call()
    if error is None:
        use(cache, 2)
    policy.size = lambda: 0
    goes_on(cache, fresh_logits, make_context)


@pytest.mark.parametrize("how", ["raise", "clear", "none", "negative", "text", "float", "one"])
def test_how_many_blocks_a_policy_lets_go(
    how: str, make_context: Make, fresh_logits: Fresh
) -> None:
    policy = Own()
    cache = PrefixCache(
        make_context("llama", n_seq_max=2), block_size=8, ram_bytes=LIMIT, policy=policy
    )
    use(cache, 1)
    answers: dict[str, tuple[Callable[[], object], type[Exception] | None]] = {
        "raise": (odd, Odd),
        "clear": (cache.clear, ReentryError),
        "none": (lambda: 0, ArgumentError),
        "negative": (lambda: -1, ArgumentError),
        "text": (lambda: "all", TypeError),
        "float": (lambda: 1.5, TypeError),
        "one": (lambda: 1, None),
    }
    policy.most, error = answers[how]
    with contextlib.nullcontext() if error is None else pytest.raises(error), cache._pool.hold():
        cache._ram.tree.shrink(0)
    policy.most = lambda: 10**30
    goes_on(cache, fresh_logits, make_context)


@pytest.mark.parametrize("how", ["raise", "text", "held", "gone", "other", "forged"])
def test_what_a_policy_chooses(how: str, make_context: Make, fresh_logits: Fresh) -> None:
    policy = Own()
    ctx = make_context("llama", n_seq_max=3)
    cache = PrefixCache(ctx, block_size=8, ram_bytes=LIMIT, policy=policy)
    other = PrefixCache(make_context("llama"), block_size=8, policy=Own())
    use(other, 1)
    use(cache, 1)
    gone = next(run for run in cache._ram.tree.runs() if run.is_evictable)
    cache.clear()
    use(cache, 1)
    held = cache.sequence(words(4, 60))
    held.logits()
    forged = Run(
        next(iter(cache._ram.tree.roots())),
        bytes(32),
        32,
        start=0,
        start_key=0,
        block_bytes=10,
        tokens_saved=8,
        now=0,
    )
    answers: dict[str, tuple[Callable[[], object], type[Exception]]] = {
        "raise": (odd, Odd),
        "text": (lambda: "the first", TypeError),
        "held": (lambda: next(run for run in cache._ram.tree.runs() if run.held), ArgumentError),
        "gone": (lambda: gone, ArgumentError),
        "other": (lambda: next(iter(other._ram.tree.runs())), ArgumentError),
        "forged": (lambda: forged, ArgumentError),
    }
    theirs = other.stats()
    policy.chosen, error = answers[how]
    # What fails while a sequence is closed is not kept, and no more.
    with contextlib.suppress(ArgumentError, Odd, TypeError):
        for seed in range(100, 140):
            use(cache, seed)
    with pytest.raises(error), cache._pool.hold():
        cache._ram.tree.shrink(0)
    policy.chosen = LRU.victim.__get__(policy)
    held.close()
    goes_on(cache, fresh_logits, make_context)
    assert other.stats() == theirs
    check_accounts(other)


def test_a_budget_that_a_policy_does_not_take(make_context: Make, fresh_logits: Fresh) -> None:
    ctx = make_context("llama", n_seq_max=2)
    policy = Own()
    policy.resized = odd
    with pytest.raises(Odd):
        PrefixCache(ctx, block_size=8, ram_bytes=LIMIT, policy=policy)
    policy.resized = lambda: None
    cache = PrefixCache(ctx, block_size=8, ram_bytes=LIMIT, policy=policy)
    # It is called again after something was cut short.
    policy.resized = odd
    policy.chosen = odd
    for seed in range(20):
        with contextlib.suppress(Odd):
            use(cache, seed)
    policy.chosen = LRU.victim.__get__(policy)
    policy.resized = cache.clear
    goes_on(cache, fresh_logits, make_context)
