"""Subscribers of events that call the cache: nothing is being changed when they are called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memory.kit import Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import LlamaSequence, PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent
from support.models import RIGHT


@pytest.mark.parametrize("how", ["clear", "sequence", "close"])
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
    assert not cache.is_closed or not cache.stats().ram_blocks
    cache.close()
    assert not ctx.sequences()


# How a sequence can be edited in the middle of its own call: its tokens, and other cells.
HEAD, REST = words(1, 16), words(2, 48)
EDITS: dict[str, Callable[[PrefixCache, LlamaSequence], object]] = {
    "other tokens, evaluated": lambda cache, one: (
        one.truncate(16),
        one.append(REST),
        one.evaluate(),
    ),
    "fewer": lambda cache, one: one.truncate(20),
    "closed": lambda cache, one: one.close(),
    "another": lambda cache, one: cache.sequence(words(3, 40)).evaluate(),
    "clear": lambda cache, one: cache.clear(),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"keep_logits": True}), ("jamba", {})],
    ids=["llama-logits", "jamba"],
)
def test_a_subscriber_may_edit_the_sequence_that_it_hears_of(
    name: str,
    options: dict[str, bool],
    edit: str,
    make_context: Make,
    fresh_logits: Fresh,
    tmp_path: Path,
) -> None:
    """Cells of other tokens are never shared, in memory or in a tier."""
    ctx = make_context(name, n_ctx=512, n_seq_max=1)
    prompt = HEAD + words(4, 48)
    cache = PrefixCache(ctx, block_size=8, tiers=[tmp_path], tier_seconds=20, **options)
    one = cache.sequence(prompt)
    done = []

    def callback(event: CacheEvent) -> None:
        if not done and threading.current_thread() is threading.main_thread():
            done.append(event)
            assert not cache._core.pool.depth, "a call is still under way"
            EDITS[edit](cache, one)

    cache.events.subscribe(callback)
    one.evaluate()
    one.close()
    assert done
    assert cache.flush(30)
    for other in (cache, None):
        if other is None:  # one that has the tier alone
            cache.close()
            ctx = make_context(name, n_ctx=512, n_seq_max=1)
            other = PrefixCache(ctx, block_size=8, tiers=[tmp_path], tier_seconds=20, **options)
        for tokens in (prompt, HEAD + REST, [*HEAD, *REST, 7], [*prompt, 7], prompt[:20]):
            with other.sequence(tokens) as again:
                assert apart(again.logits(), fresh_logits(name, tokens)) < max(RIGHT, 1e-2)
    other.close()


def test_what_a_subscriber_raises_goes_no_further_than_one_call(make_context: Make) -> None:
    """Not every exception is an Exception; the context's sequences go on."""

    class Odd(BaseException):
        """As asyncio's CancelledError."""

    heard: list[CacheEvent] = []
    with PrefixCache(make_context("llama"), block_size=8) as cache:

        def callback(event: CacheEvent) -> None:
            heard.append(event)
            raise Odd

        end = cache.events.subscribe(callback)
        sequence = cache.sequence(words(1, 30))
        sequence.evaluate()
        with pytest.raises(Odd):
            sequence.close()
        end()
        n = len(heard)
        with cache.sequence(words(1, 30)) as again:
            assert again.reuse.ram == 29
        assert len(heard) == n == 1


def test_lookup_callbacks_run_outside_of_other_calls(make_context: Make) -> None:
    depths = []
    with PrefixCache(make_context("llama"), block_size=8) as cache:
        cache.events.subscribe_lookups(lambda _: depths.append(cache._core.pool.depth))
        cache.events.subscribe(lambda _: depths.append(cache._core.pool.depth))
        for seed in (1, 1, 2):
            with cache.sequence(words(seed, 30)) as sequence:
                sequence.evaluate()
    assert len(depths) >= 5
    assert not any(depths)
