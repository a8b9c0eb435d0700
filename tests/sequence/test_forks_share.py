"""Forks of what was evaluated evaluate nothing again, on every memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Logits, apart
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
        assert ctx.tokens_evaluated - before <= 4 * 3 + (0 if ctx.native.has_rest else 4)


@pytest.mark.hazard("N144")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_forks_without_an_id_share_one_state(
    name: str, make_context: Callable[..., LlamaContext], fresh_logits: Callable[..., Logits]
) -> None:
    """As long as the parent holds the same."""
    ctx = make_context(name, n_seq_max=1)
    tokens: list[int] = np.random.default_rng(1).integers(5, 56, 40).tolist()
    parent = LlamaSequence(ctx, tokens[:30])
    parent.evaluate()
    first = [parent.fork() for _ in range(3)] + [parent.fork(12)]
    parent.append(tokens[30:])
    parent.evaluate()
    second = [parent.fork(), parent.fork()]
    states = [fork._cells.state for fork in (*first, *second)]
    assert None not in states
    assert len(set(states)) == 2
    assert states[0] is not states[-1]
    parent.truncate(30)
    parent.append([7])
    parent.evaluate()
    for fork in (*first, *second, parent):
        assert apart(fork.logits(), fresh_logits(name, fork.tokens)) < 1e-2
