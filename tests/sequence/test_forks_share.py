"""Forks of what was evaluated evaluate nothing again, on every memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import make_model

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "lfm2"])
@pytest.mark.parametrize("batched", [False, True])
def test_forks_after_evaluate_share_the_whole_prompt(
    name: str, batched: bool, model_folder: Path
) -> None:
    with (
        LlamaModel(make_model(name, model_folder)) as model,
        LlamaContext(model, n_ctx=1024, n_seq_max=5) as ctx,
    ):
        prompt = LlamaSequence(ctx, [i % 50 + 1 for i in range(70)])
        prompt.evaluate()
        forks = [prompt.fork() for _ in range(4)]
        before = ctx.tokens_evaluated
        if batched:
            generator = BatchGenerator(ctx)
            for fork in forks:
                generator.submit(fork, 3)
            generator.run()
        else:
            for fork in forks:
                list(fork.generate(3))
        # Three tokens each, and on plain attention the last one of the prompt for each.
        assert ctx.tokens_evaluated - before <= 4 * 3 + (4 if ctx.memory_kind == "attention" else 0)
