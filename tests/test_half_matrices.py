"""Prompts of models in f16: sums of products are llama.cpp's own, in its order.

Batches of less than 24 tokens go llama.cpp's own way, longer ones that of
``_native/cpu/half_matrices.cpp``. Without flash attention nothing else depends on the length of
a batch: the logits have to be the same, bit by bit.
"""

from __future__ import annotations

import platform

import numpy as np
import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

from gguf import GGMLQuantizationType as Kind

from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from test_quantized_weights import quantized

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="elsewhere the sums of long batches are other ones anyway",
)

N_FF = 1328
"""Rows longer than what is turned at once (640 numbers), and not a multiple of a block of 32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path = tmp_path_factory.mktemp("half") / "model.gguf"
    return LlamaModel(quantized(path, Kind.F16, n_ff=N_FF))


def logits(model: LlamaModel, pieces: list[np.ndarray], n_threads: int) -> np.ndarray:
    """The rows of all tokens, evaluated in these pieces."""
    options = {"n_threads": n_threads, "n_threads_batch": n_threads}
    rows, start = [], 0
    with LlamaContext(model, n_ctx=512, n_batch=512, flash_attn="disabled", **options) as ctx:
        for piece in pieces:
            batch = LlamaBatch(len(piece), 1)
            batch.add_sequence(piece, 0, True, start=start)
            ctx.decode(batch)
            rows += [ctx.logits(i) for i in range(len(piece))]
            start += len(piece)
    return np.array(rows)


# 126 rows are a piece of work and 6 a tile: whole ones, and every remainder.
@pytest.mark.parametrize("n_tokens", [24, 25, 28, 35, 126, 127, 153, 278])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_long_batches_have_the_logits_of_short_ones(
    model: LlamaModel, n_tokens: int, n_threads: int
) -> None:
    tokens = (np.arange(n_tokens, dtype=np.int32) * 37) % 250 + 5
    short = np.array_split(tokens, n_tokens // 12)
    np.testing.assert_array_equal(
        logits(model, [tokens], n_threads), logits(model, short, n_threads)
    )
