"""Try an installed pykvcache: load the embedded model, decode, fork, rewind, compare.

Usage: ``python smoke.py``, anywhere. Needs the package and NumPy, nothing else.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import pykvcache
from pykvcache import LlamaContext, LlamaModel, embedded_model_path

PROMPT = "Once upon a time there was a girl who had a red ball."
# Without rounding to f16, so that equal caches give equal logits whatever the batches were.
EXACT: dict[str, Any] = {
    "n_ctx": 512,
    "n_seq_max": 2,
    "type_k": "f32",
    "type_v": "f32",
    "flash_attn": "disabled",
}


def decoded(model: LlamaModel, prompt: list[int], last: int) -> npt.NDArray[np.float32]:
    """Logits after both in a context that has seen nothing else, in batches of the same sizes."""
    with LlamaContext(model, **EXACT) as fresh:
        fresh.decode(prompt)
        fresh.decode([last])
        return fresh.logits()


def main() -> int:
    """Run the smoke test; 0 when all is right."""
    with LlamaModel(embedded_model_path()) as model:
        prompt = model.tokenize(PROMPT).tolist()
        first, second = prompt[1], prompt[2]
        with LlamaContext(model, **EXACT) as ctx:
            ctx.decode(prompt)
            ctx.copy_kv_cache_seq(0, 1)
            ctx.decode([first], seq_id=1)
            fork = ctx.logits()
            assert ctx.tokens_evaluated == len(prompt) + 1, "the fork evaluated its prefix again"
            ctx.clear_kv_cache_seq(1, len(prompt), None)
            ctx.decode([second], seq_id=1)
            rewound = ctx.logits()
            assert ctx.kv_cache_seq_pos_max(0) == len(prompt) - 1
        assert np.abs(fork - rewound).max() > 0.1, "another token changed nothing"
        np.testing.assert_allclose(fork, decoded(model, prompt, first), atol=1e-3)
        np.testing.assert_allclose(rewound, decoded(model, prompt, second), atol=1e-3)
    version = importlib.metadata.version("pykvcache")
    print(f"pykvcache {version} works, Python {sys.version.split()[0]}, {pykvcache.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
