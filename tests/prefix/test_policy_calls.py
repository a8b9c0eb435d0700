"""Policies of users that call the cache, or raise, in the middle of what they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext, PrefixCache
from pykvcache.errors import ReentryError
from pykvcache.prefix.policies import LRU

Make = Callable[..., LlamaContext]

CALLS = ["asked", "added", "used", "split", "removing", "evictable", "victim"]


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


class Rude(LRU):
    """Does something at the n-th call of one of its methods."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.act: Callable[[], object] = lambda: None
        self.n_acts = 0
        method = getattr(self, call)

        def rude(*arguments: Any) -> Any:
            self.n_acts += 1
            self.act()
            return method(*arguments)

        setattr(self, call, rude)


def use(cache: PrefixCache, ctx: LlamaContext, seed: int, *, checked: bool = False) -> None:
    """Prompts that share beginnings, in little room; `checked`: each gives a run's own."""
    for more, n in ((1, 40), (1, 33), (2, 50), (1, 40), (3, 60), (2, 50)):
        prompt = [*words(seed + more, n), 9, 8, 7]
        with cache.sequence(prompt) as sequence:
            got = sequence.logits()
        if checked:
            ctx.clear_kv_cache()
            ctx.decode(np.array(prompt, np.int32))
            np.testing.assert_allclose(got, ctx.logits(), atol=2e-4)
            ctx.clear_kv_cache()


def whole(cache: PrefixCache) -> None:
    """Check what the tree says of itself: every block has bytes, nothing stays held."""
    tree = cache._ram.tree
    runs = list(tree.runs())
    assert not any(run.held for run in runs)
    assert all(payload is not None for run in runs for payload in run.payloads)
    assert tree.n_blocks == sum(run.n_blocks for run in runs if not run.is_checkpoint)
    assert tree.n_runs == len(runs)


@pytest.mark.parametrize(
    ("call", "how"),
    [*product(CALLS, ["clear", "raise"]), ("added", "close"), ("victim", "sequence")],
)
def test_a_policy_cannot_change_what_asks_it(call: str, how: str, make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=2)
    policy = Rude(call)
    with PrefixCache(ctx, block_size=8, ram_bytes=60_000, policy=policy) as cache:

        def act() -> None:
            if how == "raise":
                raise ReentryError("of its own")
            policy.act = lambda: None
            cache.sequence([5, 6]) if how == "sequence" else getattr(cache, how)()

        use(cache, ctx, 0)
        n = policy.n_acts
        at = max(1, n // 2)
        left, refused = at, 0

        def later(act: Callable[[], None] = act) -> None:
            nonlocal left, refused
            left -= 1
            if left == 0:
                try:
                    act()
                except ReentryError:
                    refused += 1
                    raise

        policy.act = later
        for seed in (100, 200):
            # What fails while a sequence is closed is not kept, and no more.
            with contextlib.suppress(ReentryError):
                use(cache, ctx, seed + at)
        assert refused == 1
        assert not cache.is_closed
        policy.act = lambda: None
        whole(cache)
        use(cache, ctx, 100 + at, checked=True)
        whole(cache)
        assert cache.stats().ram_bytes <= 60_000
