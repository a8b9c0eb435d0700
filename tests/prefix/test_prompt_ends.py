"""What is kept at the end of a prompt: its logits, and a state that cannot be cut."""

from __future__ import annotations

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from prefix.accounts import check_accounts
from pykvcache import BatchGenerator, PrefixCache
from pykvcache.prefix.stores import MemoryStore

SIZE = 8


@pytest.mark.parametrize(("n", "n_known"), [(1, 0), (24, 0), (25, 24)])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_kept_logits_outlive_the_answer(
    case: Case, n: int, n_known: int, make_context: Make, fresh_logits: Fresh
) -> None:
    """What is generated, appended or stored after a prompt takes nothing from its repeat.

    The last token alone may have been new.
    """
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    with PrefixCache(ctx, block_size=SIZE, keep_logits=True) as cache:
        prompt = words(n, n)
        if n_known:
            with cache.sequence(prompt[:n_known]) as sequence:
                sequence.logits()
        for longer in (2, SIZE + 3):
            with cache.sequence(prompt) as sequence:
                list(sequence.generate(longer))
            with cache.sequence([*prompt, *words(longer, longer)]) as sequence:
                sequence.logits()
        BatchGenerator(cache).submit(prompt, 3).wait()
        before = ctx.tokens_evaluated
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.evaluated == 0
            assert apart(sequence.logits(), fresh_logits(case.name, prompt)) < case.tolerance
        assert ctx.tokens_evaluated == before
        used = cache.sequence(prompt)  # in use, and gone on from
        list(used.generate(3))
        other = cache.sequence(prompt)
        assert other.reuse.evaluated == 0
        assert apart(other.logits(), fresh_logits(case.name, prompt)) < case.tolerance


def test_edits_before_the_end_of_a_prompt_take_its_logits(
    make_context: Make, fresh_logits: Fresh
) -> None:
    with PrefixCache(make_context("llama"), block_size=SIZE, keep_logits=True) as cache:
        prompt, other = words(1, 21), words(2, 21)
        for edit in ("sync", "truncate", "discard"):
            cache.clear()
            with cache.sequence(prompt) as sequence:
                list(sequence.generate(2))
                if edit == "sync":
                    sequence.sync([*prompt[:20], *other])
                elif edit == "truncate":
                    sequence.truncate(20)
                    sequence.append(other)
                else:
                    sequence.discard(3, 6)
                sequence.evaluate()
                tokens = sequence.tokens.tolist()
            for again in (prompt, tokens[:21], tokens):
                with cache.sequence(again) as sequence:
                    assert apart(sequence.logits(), fresh_logits("llama", again)) < 1e-3


@pytest.mark.parametrize("is_prefetched", [False, True])
@pytest.mark.parametrize("n", [24, 25])
@pytest.mark.parametrize("case", [c for c in SERVED if c.has_states], ids=str)
def test_logits_come_out_of_tiers_wherever_a_prompt_ends(
    case: Case, n: int, is_prefetched: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    """And stay in memory for the next repeat."""
    store, prompt = MemoryStore(), words(n, n)
    for evaluated in (n, 0):
        ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
        with PrefixCache(
            ctx, block_size=SIZE, keep_logits=True, tiers=[store], tier_seconds=20
        ) as cache:
            if is_prefetched:
                assert cache.prefetch(prompt).wait()
            for expected in (evaluated, 0, 0):
                before = ctx.tokens_evaluated
                with cache.sequence(prompt) as sequence:
                    assert apart(sequence.logits(), fresh_logits(case.name, prompt)) < (
                        case.tolerance
                    )
                    assert sequence.reuse.evaluated == expected
                assert ctx.tokens_evaluated - before == expected
            check_accounts(cache)


@pytest.mark.parametrize("name", ["gemma3", "jamba", "mamba"])
def test_tiers_are_searched_although_ram_has_the_state_after_the_last_token(
    name: str, make_context: Make
) -> None:
    """Memory has the end of a block, where the prompt ends; tiers have what is before it."""
    store, text = MemoryStore(), words(1, 48)
    with PrefixCache(
        make_context(name, n_ctx=512), block_size=SIZE, tiers=[store], tier_seconds=20
    ) as cache:
        cache.sequence(text).logits()
    with PrefixCache(
        make_context(name, n_ctx=512), block_size=SIZE, tiers=[store], tier_seconds=20
    ) as cache:
        longer = cache.sequence(text + words(2, 5))
        assert longer.reuse.remote == 48
        longer.close()
        again = cache.sequence(text)
        again.logits()
        assert again.reuse.evaluated <= SIZE
