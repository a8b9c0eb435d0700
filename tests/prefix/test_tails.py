"""What comes after the last full block of a prompt: how much of the budget it may take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import CASES, Case, apart
from prefix.accounts import check_accounts
from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.policies import LRU, POLICIES

Make = Callable[..., LlamaContext]
SERVED = [case for case in CASES if case.info.can_cache]


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def use(cache: PrefixCache, prompt: list[int]) -> int:
    """Evaluate a prompt; return how many tokens of it were not known."""
    with cache.sequence(prompt) as sequence:
        sequence.logits()
        return sequence.reuse.evaluated


def empty_bytes(ctx: LlamaContext) -> int:
    with PrefixCache(ctx) as cache:
        return cache.stats().ram_bytes


@pytest.mark.parametrize("name", ["llama", "mamba", "gemma3", "jamba"])
def test_short_prompts_use_what_blocks_leave(name: str, make_context: Make) -> None:
    """A quarter was theirs, however much was idle: with twice the memory that they take all of
    them were evaluated again."""
    ctx = make_context(name, n_ctx=512, n_seq_max=2)
    prompts = [words(seed, 20 + seed % 30) for seed in range(2, 42)]
    with PrefixCache(ctx) as cache:
        for prompt in prompts:
            use(cache, prompt)
        taken = cache.stats().ram_bytes
    with PrefixCache(ctx, ram_bytes=taken + taken // 4) as cache:
        for prompt in prompts:
            use(cache, prompt)
        for prompt in prompts:
            with cache.sequence([*prompt, 7]) as sequence:
                assert sequence.reuse.evaluated == 1
        check_accounts(cache)
        assert cache.stats().ram_bytes <= cache.stats().max_ram_bytes


def test_blocks_push_tails_back_to_a_quarter(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    most = empty_bytes(ctx) + 40 * 64 * cell
    with PrefixCache(ctx, ram_bytes=most, policy="lru") as cache:
        for seed in range(100):
            use(cache, words(seed, 50))
        assert cache._ram._tail_bytes > most / 2
        for seed in range(200, 260):
            use(cache, words(seed, 129))
            check_accounts(cache)
            assert cache.stats().ram_bytes <= most
        assert most / 6 < cache._ram._tail_bytes <= most / 4
        # Those that were used last are there.
        assert use(cache, words(99, 50)) == 1
        assert use(cache, words(0, 50)) >= 49


def test_a_tail_larger_than_its_quarter_is_kept_while_there_is_room(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    most = 3 * 64 * cell
    with PrefixCache(ctx, ram_bytes=most, policy="lru") as cache:
        tail = words(1, 63)
        use(cache, tail)
        assert cache._ram._tail_bytes > most / 4
        assert use(cache, tail) == 1
        use(cache, words(2, 129))
        check_accounts(cache)
        stored = cache.stats().ram_blocks
        use(cache, words(3, 63))  # there is no room: nothing leaves for it
        assert cache.stats().ram_blocks == stored
        check_accounts(cache)


def test_tails_larger_than_a_quarter_take_turns(make_context: Make) -> None:
    """The first ones stayed for ever where there was no room for more."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    most = empty_bytes(ctx) + 2 * 256 * cell
    with PrefixCache(ctx, ram_bytes=most, block_size=256) as cache:
        for seed in range(20):
            prompt = words(seed, 180 + 3 * seed)
            use(cache, prompt)
            assert len(prompt) * cell > most / 4
            assert use(cache, prompt) == 1
            check_accounts(cache)
            assert cache.stats().ram_bytes <= most


@pytest.mark.parametrize("policy", [*POLICIES])
def test_a_prompt_longer_than_the_budget_leaves_tails_their_quarter(
    policy: str, make_context: Make
) -> None:
    ctx = make_context("llama", n_ctx=2048, n_seq_max=2)
    cell = ctx.native.block_bytes()
    short = [words(seed, 40) for seed in range(6)]
    with PrefixCache(ctx, ram_bytes=1200 * cell, policy=policy) as cache:
        for seed in range(3):
            for prompt in short:
                evaluated = use(cache, prompt)
                assert evaluated == 1 or seed == 0
            use(cache, words(100 + seed, 1500))
            check_accounts(cache)


def test_a_tail_that_cannot_stay_takes_the_place_of_none(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=2048, n_seq_max=2)
    cell = ctx.native.block_bytes()
    long = words(1, 20 * 64)
    with PrefixCache(ctx, ram_bytes=empty_bytes(ctx) + 24 * 64 * cell, policy="lru") as cache:
        use(cache, long)
        assert cache.pin(long).n_tokens == len(long)
        small = [words(seed, 8) for seed in range(2, 4)]
        for prompt in small:
            use(cache, prompt)
        list(cache.events)
        cache._ram.max_bytes = cache._ram.tree.max_bytes = cache.stats().ram_bytes + 4 * cell
        for _ in range(2):
            assert use(cache, words(7, 63)) >= 62
            check_accounts(cache)
        for prompt in small:
            assert use(cache, prompt) == 1
        # One for which an other makes room is kept.
        assert use(cache, words(8, 9)) >= 8
        assert use(cache, words(8, 9)) == 1
        check_accounts(cache)


def test_tails_leave_before_the_budget_is_exceeded(make_context: Make) -> None:
    """What sequences in use hold stays; of tails a quarter of the budget stayed beside it."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    cell = ctx.native.block_bytes()
    most = empty_bytes(ctx) + 6 * 64 * cell
    with PrefixCache(ctx, ram_bytes=most, policy="lru") as cache:
        long = words(1, 5 * 64)
        use(cache, long)
        pin = cache.pin(long)
        assert pin.n_tokens == len(long)
        for seed in range(2, 8):
            use(cache, words(seed, 40))
            check_accounts(cache)
        assert cache._ram._tails
        with cache.sequence([*long, *words(9, 66)]) as other:
            other.evaluate()
            kept = cache.pin(other.tokens)
        check_accounts(cache)
        assert cache.stats().ram_bytes <= most
        kept.release()


class Growing(LRU):
    """Takes more and more memory, and so lets tails leave in the middle of a lookup."""

    grows = False

    def asked(self, tokens: bytes, step: int, start_key: int) -> None:
        super().asked(tokens, step, start_key)
        self.n_bytes = self.grows << 30


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_a_prompt_begins_with_a_tail_that_its_use_lets_leave(
    case: Case, make_context: Make
) -> None:
    fresh = make_context(case.name, n_seq_max=1)
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    policy = Growing()
    prompt = [token % (case.n_vocab - 7) + 5 for token in words(1, 27)]
    fresh.decode(prompt)
    with PrefixCache(ctx, block_size=16, policy=policy) as cache:
        use(cache, prompt[:24])
        policy.grows = True
        with cache.sequence(prompt) as sequence:
            assert not cache._ram._tails
            assert sequence.reuse.evaluated < len(prompt)
            check_accounts(cache)
            assert apart(sequence.logits(), fresh.logits()) < case.tolerance
        check_accounts(cache)
