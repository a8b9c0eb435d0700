"""The budget: what is counted is there, it is kept but for what is held, and more never hurts."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memory.kit import EVERY_SERVED, Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import LlamaContext, PrefixCache

POLICIES = ("hit-density", "lru", "s3fifo", "cost-aware")
SIZES = (8, 16, 5)
#: 16 KiB per token: a block of 64 tokens is one of 1 MiB.
WIDE = {"n_embd": 512, "n_head_kv": 4, "n_layer": 4}


def whole_bytes(ctx: LlamaContext, size: int, prompt: list[int]) -> int:
    """Return the bytes that a cache takes for one prompt."""
    with PrefixCache(ctx, block_size=size) as cache:
        before = cache.stats().ram_bytes
        with cache.sequence(prompt) as sequence:
            sequence.logits()
        return cache.stats().ram_bytes - before


def question(cache: PrefixCache, document: list[int], seed: int) -> int:
    """Ask a question about a document; return how many tokens are evaluated."""
    before = cache.context.tokens_evaluated
    with cache.sequence([*document, *words(seed, 6)]) as sequence:
        sequence.logits()
        list(sequence.generate(3))
    return cache.context.tokens_evaluated - before


@pytest.mark.parametrize("at", range(len(EVERY_SERVED)), ids=map(str, EVERY_SERVED))
def test_another_question_costs_no_more_with_more_memory(at: int, make_context: Make) -> None:
    """Each memory kind with a policy and a block size of the list, in turns."""
    case, policy, size = EVERY_SERVED[at], POLICIES[at % 4], SIZES[at % 3]
    ctx, document = make_context(case.name, **(case.options | {"n_seq_max": 2})), words(at, 90)
    whole, before = whole_bytes(ctx, size, [*document, *words(1, 9)]), [100] * 3
    for part in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        # What is fixed, and events that wait, come on top of what a prompt takes.
        limit = whole * part // 8 + (60_000 if part else 0)
        with PrefixCache(ctx, block_size=size, policy=policy, ram_bytes=limit) as cache:
            took = []
            for seed in (2, 3, 4):
                took.append(question(cache, document, seed))
                assert cache.stats().ram_bytes <= limit
                check_accounts(cache)
        assert all(now <= then for now, then in zip(took, before, strict=True)), (part, took)
        before = took
    # A state is taken where the second question parts.
    assert before[2] <= 6 + 3 - 1 + (size if before[1] > 9 else 0)


@pytest.mark.hazard("N93")
@pytest.mark.parametrize("at", range(len(EVERY_SERVED)), ids=map(str, EVERY_SERVED))
def test_what_is_in_use_or_pinned_never_leaves(
    at: int, make_context: Make, fresh_logits: Fresh
) -> None:
    case, policy, size = EVERY_SERVED[at], POLICIES[at % 4], SIZES[at % 3]
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    texts = [words(seed, 60) for seed in (1, 2)]
    limit = 2 * whole_bytes(ctx, size, texts[0]) + 60_000
    with PrefixCache(ctx, block_size=size, policy=policy, ram_bytes=limit) as cache:
        for text in texts:
            with cache.sequence(text) as sequence:
                sequence.logits()
        pin, prompt = cache.pin(texts[0]), [*texts[1], 7, 8, 9]
        pinned, used = pin.n_tokens, cache.sequence(prompt)
        said = used.reuse
        assert pinned
        assert said.ram
        for seed in range(10, 18):
            with cache.sequence(words(seed, 60)) as other:
                other.logits()
            check_accounts(cache)
        assert pin.n_tokens == pinned
        with cache.sequence([*texts[0], 7]) as again:
            assert again.reuse.ram + again.reuse.live >= min(pinned, 60)
            wanted = fresh_logits(case.name, [*texts[0], 7])
            assert apart(again.logits(), wanted) < case.tolerance
        before = ctx.tokens_evaluated
        assert apart(used.logits(), fresh_logits(case.name, prompt)) < case.tolerance
        assert ctx.tokens_evaluated - before == said.evaluated
        pin.release()
        used.close()
        with cache.sequence(words(20, 60)) as other:
            other.logits()
        assert cache.stats().ram_bytes <= limit
        check_accounts(cache)


def resident() -> int:
    """Return the bytes of memory that the process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.not_on_a_device(reason="the connection takes memory of its own")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_evicted_blocks_is_used_again(
    make_context: Make, model: Callable[..., Path]
) -> None:
    """So the process takes what the budget says, and the system clears no new pages."""
    budget = 24 << 20
    ctx = make_context(model("llama", **WIDE), n_ctx=512, n_seq_max=2, n_threads=2)
    ctx.decode(words(0, 256))  # what a decode needs is there
    ctx.clear_kv_cache()
    gc.collect()
    start = resident()
    with PrefixCache(ctx, block_size=64, ram_bytes=budget) as cache:

        def store(n: int, seed: int) -> None:
            for i in range(n):
                with cache.sequence(words(seed + i, 256)) as sequence:
                    sequence.logits()

        store(12, 100)
        assert cache.stats().removed
        assert cache.stats().ram_bytes <= budget
        grown = resident() - start
        faults = []
        for seed in (200, 300, 400):  # other threads of the process have faults, too
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            store(12, seed)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        assert grown < 1.25 * budget
        assert resident() - start < 1.25 * budget
        # 48 blocks of 256 pages each were stored in a round.
        assert min(faults) < 48 * 256 / 4
        check_accounts(cache)
