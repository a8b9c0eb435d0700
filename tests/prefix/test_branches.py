"""Memories that cannot be rewound: what prompts share is reused, although they part midway."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.models import make_model

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, PrefixCache

BLOCK = 16


@pytest.mark.parametrize("name", ["mamba", "jamba", "gemma3", "lfm2"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("shared", [40, 200])
def test_what_prompts_share_is_evaluated_twice_at_most(
    name: str, batched: bool, shared: int, model_folder: Path
) -> None:
    with (
        LlamaModel(make_model(name, model_folder)) as model,
        LlamaContext(
            model,
            n_ctx=2048,
            n_seq_max=4,
            swa_full=False,
            type_k="f32",
            type_v="f32",
            flash_attn="disabled",
        ) as ctx,
        PrefixCache(ctx, block_size=BLOCK) as cache,
    ):
        prefix = [i % 50 + 1 for i in range(shared)]
        evaluated = []
        for k in range(4):
            prompt = prefix + [60 + k] * (30 + k)
            before = ctx.tokens_evaluated
            if batched:
                generator = BatchGenerator(cache)
                generator.submit(prompt, 1).wait()
            else:
                with cache.sequence(prompt) as sequence:
                    logits = sequence.logits()
                with LlamaSequence(ctx, prompt) as fresh:
                    here = ctx.tokens_evaluated
                    assert np.allclose(logits, fresh.logits(), atol=1e-3)
                    before += ctx.tokens_evaluated - here
            evaluated.append(ctx.tokens_evaluated - before)
        # The second prompt: log-spaced checkpoints leave as much as comes after the shared part,
        # and a block. From the third one on there is a checkpoint where they part.
        assert evaluated[1] <= 2 * 31 + 2 * BLOCK
        assert max(evaluated[2:]) <= 33 + BLOCK
