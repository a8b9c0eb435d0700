"""`ReuseReport` says how many tokens are evaluated, also where little can be gone back over."""

from __future__ import annotations

import time

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from pykvcache import BatchGenerator, PrefixCache
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import MemoryStore

WITHOUT_ROWS = tuple(case for case in SERVED if case.info.has_recurrent_state)
SIZE = 8


def evaluated(sequence: CachedSequence) -> int:
    """Evaluate, and return how many tokens that took; the report said so before."""
    before, said = sequence.context.tokens_evaluated, sequence.reuse.evaluated
    sequence.logits()
    assert sequence.context.tokens_evaluated - before == said, sequence.reuse
    return said


@pytest.mark.parametrize("n", [20, 90])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_forks_without_a_sequence_id_report_what_they_evaluate(
    case: Case, n: int, make_context: Make, fresh_logits: Fresh
) -> None:
    """A state that is taken out of a window has what its end sees, and no more."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 1}))
    text = words(1, n)
    with PrefixCache(ctx, block_size=SIZE) as cache:
        first = cache.sequence(text)
        assert evaluated(first) == n
        for at in (3, n // 2, n - 9, n - 1):
            prompt = [*text[:at], *words(at, 4)]
            other = cache.sequence(prompt)
            assert evaluated(other) <= at + 4
            assert apart(other.logits(), fresh_logits(case.name, prompt)) < case.tolerance
            fork = first.fork(at)
            assert evaluated(fork) <= at
            assert apart(fork.logits(), fresh_logits(case.name, text[:at])) < case.tolerance
        with first.fork() as fork:
            assert evaluated(fork) == 0


@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("is_prefetched", [False, True])
@pytest.mark.parametrize("case", WITHOUT_ROWS, ids=str)
def test_a_tail_record_without_logits_does_not_serve_an_exact_repeat(
    case: Case, is_prefetched: bool, n: int, make_context: Make, fresh_logits: Fresh
) -> None:
    """Who wrote it did not keep them, and who reads it does; a state cannot go back one token."""
    store, text = MemoryStore(), words(1, n)
    for keep_logits in (False, True):
        ctx = make_context(case.name, **case.options)
        with PrefixCache(
            ctx, block_size=SIZE, tiers=[store], tier_seconds=20, keep_logits=keep_logits
        ) as cache:
            if is_prefetched:
                assert cache.prefetch(text).wait()
            with cache.sequence(text) as sequence:
                assert evaluated(sequence) <= (SIZE if keep_logits else n)
                assert apart(sequence.logits(), fresh_logits(case.name, text)) < case.tolerance


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_the_first_difference_is_that_of_the_nearest_prompt(case: Case, make_context: Make) -> None:
    """Windows and states begin at a checkpoint before it, and the report says both."""
    ctx, text = make_context(case.name, **case.options), words(1, 60)
    with PrefixCache(ctx, block_size=SIZE, ram_bytes=1 << 24) as cache:
        cache.sequence(text).close()
        with cache.sequence(text) as first:
            evaluated(first)
        for at in (0, 3, 20, 43, 58):
            with cache.sequence([*text[:at], 56, *text[at + 1 :]]) as other:
                report = other.reuse
            assert report.first_difference == at, report
            assert f"token {at}" in report.reason
            reused = report.n_tokens - report.evaluated
            assert reused == at or f"{at} tokens are cached" in report.reason


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_tokens_that_nobody_has_evaluated_are_not_known(case: Case, make_context: Make) -> None:
    """The reason names the sequence that waits; no checkpoint is missing."""
    ctx, text = make_context(case.name, **case.options), words(1, 40)
    with PrefixCache(ctx, block_size=SIZE) as cache:
        waits = cache.sequence(text)
        other = cache.sequence([*text[:30], 56, *text[31:]])
        assert other.reuse.evaluated == 40
        assert other.reuse.first_difference == 30
        assert "a live sequence begins with the same 30 tokens" in other.reuse.reason
        assert "checkpoint" not in other.reuse.reason
        again = cache.sequence(text)
        assert "a live sequence begins with the same 40 tokens" in again.reuse.reason
        waits.evaluate()
        assert evaluated(cache.sequence(text)) <= 1


def test_samples_and_sequences_without_a_prompt_are_no_requests(make_context: Make) -> None:
    cache = PrefixCache(make_context("llama"), block_size=8)
    generator = BatchGenerator(cache)
    handles = generator.submit(list(range(7, 27)), 3, n=3)
    generator.run()
    assert {handle.finish_reason for handle in handles} <= {"length", "stop"}
    cache.sequence().close()
    assert (cache.stats().requests, cache.stats().hits) == (1, 0)
    assert cache.stats().n_tokens == 20


def test_what_tiers_brought_is_summed_up_after_a_clear(make_context: Make) -> None:
    store, prompt = MemoryStore(), list(range(5, 45))
    ctx = make_context("llama")
    with PrefixCache(ctx, block_size=8, tiers=[store], ram_bytes=0) as cache:
        with cache.sequence(prompt) as one:
            one.evaluate()
        assert cache.flush(30)
    for _ in range(10):
        with PrefixCache(ctx, block_size=8, tiers=[store], tier_seconds=0) as cache:
            sequence = cache.sequence(prompt)
            cache.clear()
            time.sleep(0.01)  # it may come by then, or not
            sequence.logits()
            report, stats = sequence.reuse, cache.stats()
            assert (stats.remote, stats.evaluated) == (report.remote, report.evaluated)
            sequence.close()
