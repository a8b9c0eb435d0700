"""A BatchGenerator over a cache: what arrives together is evaluated once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, PrefixCache, Sampler

Make = Callable[..., LlamaContext]
SIZE = 8


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "mamba"])
def test_requests_that_share_a_prefix_evaluate_it_once(name: str, make_context: Make) -> None:
    ctx = make_context(name, n_ctx=1024, n_seq_max=6)
    lonely = make_context(name, n_ctx=1024, n_seq_max=1)
    trunk = words(1, 80)
    prompts = [trunk + words(10 + i, 5 + i) for i in range(5)]
    with PrefixCache(ctx, block_size=SIZE) as cache:
        generator = BatchGenerator(cache, n_chunk=16)
        handles = [generator.submit(prompt, 4, Sampler(seed=i)) for i, prompt in enumerate(prompts)]
        generator.run()
        for i, handle in enumerate(handles):
            with LlamaSequence(lonely, prompts[i]) as alone:
                assert handle.tokens.tolist() == list(alone.generate(4, Sampler(seed=i)))
        once = len(prompts[0]) + sum(len(prompt) - 80 for prompt in prompts[1:]) + 5 * 4
        assert ctx.tokens_evaluated <= once
        # Later ones begin with what the first gave.
        before = ctx.tokens_evaluated
        generator.submit(prompts[2], 1).wait()
        assert ctx.tokens_evaluated - before <= SIZE
        assert not ctx.n_cells_used


def test_samples_of_one_prompt(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=4)
    with PrefixCache(ctx, block_size=SIZE) as cache:
        generator = BatchGenerator(cache)
        handles = generator.submit(words(1, 50), 5, Sampler(temperature=1, seed=1), n=6)
        assert isinstance(handles, list)
        generator.run()
        assert ctx.tokens_evaluated <= 50 + 6 * 4
        assert len({tuple(handle.tokens) for handle in handles}) > 3
