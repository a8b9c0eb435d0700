"""What the tests of tiers share: a cache that waits for its tiers, and prompts in them."""

from __future__ import annotations

from typing import Any

from memory.kit import CASES
from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.report import ReuseReport

SERVED = tuple(case for case in CASES if case.has_states and case.name != "t5")
SIZE = 8
#: Tiny models evaluate faster than any store answers.
WAIT: dict[str, Any] = {"tier_seconds": 20}


def evaluate(cache: PrefixCache, prompt: list[int], namespace: str = "") -> None:
    """Evaluate a prompt, and wait until its tiers have it."""
    with cache.sequence(prompt, namespace=namespace) as sequence:
        sequence.evaluate()
    assert cache.flush(60)


def write(ctx: LlamaContext, tier: Any, prompt: list[int]) -> None:
    """Write what a prompt needs to a tier."""
    with PrefixCache(ctx, block_size=SIZE, **WAIT, tiers=[tier]) as cache:
        evaluate(cache, prompt)


def clear_memory(cache: PrefixCache) -> None:
    """Drop all that a cache keeps in memory; what waits for tiers stays."""
    with cache._core.pool, cache._core.blocks.change():
        cache._core.blocks.clear(None)


def total(report: ReuseReport) -> int:
    return report.live + report.ram + report.disk + report.remote + report.evaluated
