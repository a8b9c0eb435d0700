"""A BatchGenerator over a cache: what arrives together is evaluated once."""

from __future__ import annotations

import pytest

from memory.kit import Make, words
from pykvcache import BatchGenerator, LlamaSequence, PrefixCache

SIZE = 8


@pytest.mark.parametrize(("shared", "is_once"), [(4, False), (16, True), (30, True), (63, True)])
def test_requests_wait_for_a_shared_prefix_of_16_or_more_tokens(
    shared: int, is_once: bool, make_context: Make
) -> None:
    """From 16 tokens on, whatever the size of a block."""
    ctx, trunk = make_context("llama", n_ctx=1024, n_seq_max=8), words(1, shared)
    with PrefixCache(ctx, block_size=64) as cache:
        generator = BatchGenerator(cache)
        handles = [generator.submit([*trunk, 5 + i, *words(i, 8)], 1) for i in range(8)]
        generator.run()
        assert all(handle.finish_reason for handle in handles)
    once = shared + 8 * 9
    assert (ctx.tokens_evaluated == once) if is_once else ctx.tokens_evaluated > once


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("n", [31, 32, 33, 47, 65])
def test_a_shared_prefix_longer_than_a_prefill_chunk_is_evaluated_once(
    name: str, n: int, make_context: Make
) -> None:
    """Wherever the parts end in which the first request is evaluated."""
    ctx, trunk = make_context(name, n_ctx=2048, n_seq_max=9), words(1, n)
    with PrefixCache(ctx, block_size=SIZE) as cache:
        generator = BatchGenerator(cache, n_chunk=32)
        handles = [generator.submit([*trunk, 5 + i, *words(i, 7)], 1) for i in range(8)]
        generator.run()
        assert all(handle.finish_reason for handle in handles)
    # Where the memory cannot be cut, a state is taken where the prompts part.
    assert ctx.tokens_evaluated == n + 8 * 8


@pytest.mark.parametrize("n_seq_max", [1, 8])
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "mamba"])
def test_late_requests_wait_for_a_prefix_that_is_being_evaluated(
    name: str, n_seq_max: int, make_context: Make
) -> None:
    """They are forks of what is evaluated when they come, and wait for more."""
    ctx = make_context(name, n_ctx=1024, n_seq_max=n_seq_max)
    trunk, ends = words(1, 160), [words(10 + i, 30) for i in range(5)]
    with PrefixCache(ctx, block_size=SIZE) as cache:
        generator = BatchGenerator(cache, n_chunk=16)
        handles = [generator.submit(trunk + ends[0], 1)]
        for end in ends[1:]:
            generator.step()
            handles.append(generator.submit(trunk + end, 1))
        generator.run()
        assert ctx.tokens_evaluated == 160 + 5 * 30


@pytest.mark.parametrize("n_seq_max", [1, 6])
@pytest.mark.parametrize("name", ["gemma3", "jamba", "mamba"])
def test_states_are_saved_where_waiting_requests_diverge(
    name: str, n_seq_max: int, make_context: Make
) -> None:
    """Far before the end of the first prompt, and behind one that stands in their way."""
    ctx = make_context(name, n_ctx=2048, n_seq_max=n_seq_max)
    lonely = make_context(name, n_ctx=2048, n_seq_max=1)
    first = words(1, 200)
    prompts = [first, words(2, 40), *(first[:n] + words(10 + n, 9) for n in (20, 41, 104))]
    with PrefixCache(ctx, block_size=SIZE) as cache:
        generator = BatchGenerator(cache)
        handles = [generator.submit(prompt, 1) for prompt in prompts]
        generator.run()
        for prompt, handle in zip(prompts, handles, strict=True):
            with LlamaSequence(lonely, prompt) as alone:
                assert handle.tokens.tolist() == list(alone.generate(1))
        once = 200 + 40 + (20 - 16 + 9) + (41 - 40 + 9) + 9
        assert ctx.tokens_evaluated <= once
