"""How many checkpoints there are, and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memory.kit import Logits, Make, apart
from pykvcache import CheckpointPolicy, LlamaContext, LlamaSequence
from pykvcache.sequence.checkpoints import total_bytes
from pykvcache.sequence.pool import pool_of


def n_bytes(ctx: LlamaContext) -> int:
    """Return the bytes of all checkpoints of a context."""
    return total_bytes(cells.points for cells in pool_of(ctx).members)


@pytest.mark.parametrize("name", ["mamba", "jamba", "gemma3"])
def test_checkpoints_keep_to_their_budget(
    name: str, make_context: Make, fresh_logits: Callable[..., Logits]
) -> None:
    """All sequences together; the last one of each stays longest, and going back stays right."""
    ctx = make_context(name, n_ctx=512, n_seq_max=2)
    tokens = np.random.default_rng(1).integers(5, 56, 100, dtype=np.int32)
    one = LlamaSequence(ctx, tokens, checkpoints=CheckpointPolicy(spacing=10))
    one.evaluate()
    whole = n_bytes(ctx)
    points = one._cells.points
    assert list(points.states) == ([] if name == "gemma3" else list(range(10, 101, 10)))
    assert points.covered() == ([(0, 100)] if name == "gemma3" else [])
    one.close()
    assert n_bytes(ctx) == 0
    # Three states, or three windows of 32 tokens in chunks of ten, fit, and not much more.
    most = whole * 3 // 2 if name == "gemma3" else whole // 2
    policy = CheckpointPolicy(max_bytes=most, spacing=10)
    some = [LlamaSequence(ctx, np.roll(tokens, i), checkpoints=policy) for i in range(3)]
    for sequence in some:
        sequence.evaluate()
        assert 0 < n_bytes(ctx) <= policy.max_bytes
    for sequence in some:
        points = sequence._cells.points
        if name == "gemma3":
            assert sum(chunk.used for chunk in points.windows) <= 100, "kept twice"
            first, last = points.covered()[-1]
            assert first <= 100 - ctx.model.n_swa
            assert last == 100
        else:
            assert 100 in points.states
    for i, sequence in enumerate(some):
        sequence.truncate(60)
        wanted = fresh_logits(name, np.roll(tokens, i)[:60])
        assert apart(sequence.logits(), wanted) < 1e-2
    none = LlamaSequence(ctx, tokens, checkpoints=CheckpointPolicy(max_bytes=0))
    none.evaluate()
    assert not list(none._cells.points)
