"""Log-probabilities after each token, from one decode with logits for all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache import LlamaBatch, LlamaContext


def log_probabilities(ctx: LlamaContext, tokens: Any) -> NDArray[np.float64]:
    """Decode tokens into sequence 0 of an empty context; return shape (n, n_vocab)."""
    batch = LlamaBatch()
    batch.add_sequence(tokens, 0, logits_all=True)
    ctx.decode(batch)
    rows = np.stack([ctx.logits(i) for i in range(len(tokens))]).astype(np.float64)
    return rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
