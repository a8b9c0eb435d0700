"""`PrefixCache.forget`: a branch leaves with what only it needs, in memory and in tiers."""

from __future__ import annotations

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import PrefixCache
from pykvcache.prefix.stores import MemoryStore

SIZE = 8


SHARED = words(1, 40)
GONE, KEPT = [*SHARED, 6, *words(2, 33)], [*SHARED, 7, *words(3, 33)]


def known(cache: PrefixCache, prompt: list[int]) -> int:
    """Return how many tokens of a prompt need no evaluation."""
    with cache.sequence([*prompt, 5]) as sequence:
        return sequence.reuse.n_tokens - sequence.reuse.evaluated


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forgetting_a_branch_keeps_other_branches(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    with PrefixCache(ctx, block_size=SIZE) as cache:
        for text in (GONE, KEPT):
            with cache.sequence(text) as sequence:
                sequence.logits()
        before, size = known(cache, KEPT), cache.stats().ram_bytes
        assert known(cache, GONE) == len(GONE)
        cache.forget(GONE)
        check_accounts(cache)
        assert known(cache, GONE) <= len(SHARED)
        assert known(cache, KEPT) == before
        assert cache.stats().ram_bytes < size
        with cache.sequence([*KEPT, 5]) as sequence:
            assert apart(sequence.logits(), fresh_logits(case.name, [*KEPT, 5])) < case.tolerance
        cache.forget(words(9, 30))  # nothing of it is known
        cache.forget(SHARED)  # what goes on from it leaves, too
        assert known(cache, KEPT) == known(cache, SHARED) == 0
        assert not len(cache.tree())
        check_accounts(cache)


def test_what_is_held_stays_until_it_is_released(make_context: Make) -> None:
    with PrefixCache(make_context("gemma3", n_seq_max=2), block_size=SIZE) as cache:
        with cache.sequence(GONE) as sequence:
            sequence.logits()
        pin = cache.pin(GONE)
        pinned = pin.n_tokens
        assert pinned
        cache.forget(GONE)
        assert pin.n_tokens == pinned
        check_accounts(cache)
        pin.release()
        cache.forget(GONE)
        assert known(cache, GONE) == 0
        check_accounts(cache)


@pytest.mark.parametrize("case", [c for c in SERVED if c.has_states], ids=str)
def test_tiers_forget_a_branch_and_keep_the_others(case: Case, make_context: Make) -> None:
    store = MemoryStore()

    def cache_of() -> PrefixCache:
        ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
        return PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=20)

    with cache_of() as cache:
        for text in (GONE, KEPT):
            with cache.sequence(text) as sequence:
                sequence.logits()
        assert cache.flush(30)
    with cache_of() as cache:
        before = known(cache, KEPT)
        assert before
    with cache_of() as cache:
        assert known(cache, GONE)
        assert known(cache, KEPT)
        cache.forget(GONE)
        assert cache.flush(30)
    with cache_of() as cache:
        assert known(cache, GONE) <= len(SHARED)
    with cache_of() as cache:
        assert known(cache, KEPT) == before


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_tiers_forget_what_memory_never_had(name: str, make_context: Make) -> None:
    """After a restart, and with every end of the conversation."""
    store = MemoryStore()

    def cache_of() -> PrefixCache:
        ctx = make_context(name, n_ctx=512, n_seq_max=2)
        return PrefixCache(ctx, block_size=SIZE, ram_bytes=0, tiers=[store], tier_seconds=20)

    with cache_of() as cache:
        with cache.sequence(GONE) as sequence:
            sequence.logits()
            sequence.append(KEPT[:13])
            sequence.logits()
        assert cache.flush(30)
        assert list(store.entries())
    with cache_of() as cache:
        cache.forget(GONE + KEPT[:13])
        assert cache.flush(30)
    assert not list(store.entries())
