"""Subscribers of events that call the cache: nothing is being changed when they are called."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Logits, apart
from prefix.accounts import check_accounts
from pykvcache import LlamaContext, LlamaSequence, PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent
from support.models import RIGHT

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


@pytest.mark.parametrize("how", ["clear", "sequence", "pin", "tree", "close"])
@pytest.mark.parametrize("kind", [BlockStored, BlockRemoved])
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_subscriber_may_call_the_cache(
    name: str, kind: type[CacheEvent], how: str, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(name, n_ctx=512, n_seq_max=4)
    cell = max(64, ctx.native.block_bytes())
    cache = PrefixCache(ctx, block_size=8, ram_bytes=16 * 8 * cell + 60_000)
    heard: list[CacheEvent] = []
    calls = 0

    def act() -> None:
        if how == "sequence":
            with cache.sequence([*words(1, 20), *words(calls, 20)]) as sequence:
                sequence.evaluate()
        elif how == "pin":
            cache.pin(words(1, 40)).release()
        else:
            getattr(cache, how)()

    def callback(event: CacheEvent) -> None:
        nonlocal calls
        heard.append(event)
        if isinstance(event, kind) and not cache.is_closed:
            calls += 1
            if calls in (2, 5, 9, 30) and (how != "close" or calls == 9):
                act()

    cache.events.subscribe(callback)
    for step in range(24):
        prompt = [*words(1, 8 * (step % 4)), *words(step, 30)]
        with LlamaSequence(ctx, prompt) if cache.is_closed else cache.sequence(prompt) as sequence:
            assert apart(sequence.logits(), fresh_logits(name, prompt)) < max(RIGHT, 1e-2)
        if not cache.is_closed:
            check_accounts(cache, heard)
    assert calls >= 9
    assert cache.is_closed == (how == "close")
    assert cache.stats().ram_bytes <= cache.stats().max_ram_bytes
    assert not cache.is_closed or not cache._ram.tree.n_runs
    cache.close()
    assert not ctx.sequences()
