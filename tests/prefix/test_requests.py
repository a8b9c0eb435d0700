"""What a request says of its prompt: where messages end, how much is kept, what leaves first."""

from __future__ import annotations

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import BatchGenerator, LlamaSequence, PrefixCache
from pykvcache.errors import ArgumentError
from pykvcache.prefix.cache import core_of

RECURRENT = tuple(case for case in SERVED if case.info.has_recurrent_state)
SIZE = 8


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_prompt_that_parts_at_a_boundary_begins_there(
    case: Case, is_batch: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    """Recurrent memories go on where states were taken: where messages end, in no whole blocks."""
    ctx, text = make_context(case.name, **case.options), words(1, 90)
    with PrefixCache(ctx, block_size=SIZE) as cache:
        if is_batch:
            BatchGenerator(cache).submit(text, 1, boundaries=[13, 50]).wait()
        else:
            with cache.sequence(text, boundaries=[50, 13]) as sequence:
                sequence.logits()
        for at in (50, 13):
            prompt = [*text[:at], *words(at, 7)]
            with cache.sequence(prompt) as other:
                assert other.reuse.evaluated == 7
                assert apart(other.logits(), fresh_logits(case.name, prompt)) < case.tolerance
        check_accounts(cache)


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("keep", [0, 41])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_the_cache_gets_no_more_than_the_tokens_to_keep(
    case: Case, keep: int, is_batch: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx, text = make_context(case.name, **case.options), words(2, 40)
    with PrefixCache(ctx, block_size=SIZE) as cache:
        if is_batch:
            tokens = BatchGenerator(cache).submit(text, 6, keep=keep).wait().tokens.tolist()
            whole = [*text, *tokens]
        else:
            sequence = cache.sequence(text)
            whole = [*text, *sequence.generate(6)]
            sequence.close(keep=keep)
        # A state cannot be cut: what ends before the first one is given as far as there is any.
        with cache.sequence([*whole, 7]) as other:
            assert other.reuse.n_tokens - other.reuse.evaluated <= keep
            if not core_of(cache).blocks.shape.needs_state:
                assert other.reuse.n_tokens - other.reuse.evaluated == min(keep, 45)
            wanted = fresh_logits(case.name, [*whole, 7])
            assert apart(other.logits(), wanted) < case.tolerance
        check_accounts(cache)


@pytest.mark.parametrize("is_batch", [False, True])
def test_prompts_of_lower_priority_leave_first(is_batch: bool, make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=1024, n_seq_max=2)
    with PrefixCache(ctx, block_size=SIZE, ram_bytes=1 << 18) as cache:
        for i in range(24):
            text, priority = words(10 + i, 64), 1 if i == 0 else 0
            if is_batch:
                BatchGenerator(cache).submit(text, 1, priority=priority).wait()
            else:
                with cache.sequence(text, priority=priority) as sequence:
                    sequence.logits()
        assert cache.stats().removed
        with cache.sequence([*words(10, 64), 5]) as sequence:
            assert sequence.reuse.evaluated == 1
        check_accounts(cache)


def test_boundaries_and_keep_need_a_prefix_cache_and_a_prompt(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=2)
    plain, own = BatchGenerator(ctx), LlamaSequence(ctx, [5, 6, 7])
    for options in ({"boundaries": [2]}, {"keep": 2}):
        with pytest.raises(ArgumentError, match="PrefixCache"):
            plain.submit([5, 6, 7], 2, **options)  # type: ignore[arg-type]
    with PrefixCache(ctx, block_size=SIZE) as cache:
        generator = BatchGenerator(cache)
        for options in ({"boundaries": [2]}, {"keep": 2}):
            with pytest.raises(ArgumentError, match="prompt"):
                generator.submit(own, 2, **options)  # type: ignore[arg-type]
        for wrong, error in (({"boundaries": [4]}, ValueError), ({"keep": -1}, ValueError)):
            with pytest.raises(error):
                generator.submit([5, 6, 7], 2, **wrong)  # type: ignore[arg-type]
        for wrong in ({"boundaries": 3}, {"boundaries": "3"}, {"keep": "all"}):
            with pytest.raises(TypeError):
                generator.submit([5, 6, 7], 2, **wrong)  # type: ignore[arg-type]
        assert not generator.n_waiting
        assert cache.stats().requests == 0
