"""Embedder: computes embeddings of texts, in a context of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._closing import Closing
from pykvcache.batch import LlamaBatch
from pykvcache.context import LlamaContext, open_context
from pykvcache.errors import ArgumentError
from pykvcache.model import LlamaModel

__all__ = ["Embedder"]

#: Upper bound on the tokens of a text.
MOST_TOKENS = 2048
#: Maximum number of texts per decode.
N_SEQ = 8


class Embedder(Closing):
    """Computes embeddings of texts of a model, which stays open; a context opens at first use."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self._ctx: LlamaContext | None = None
        self._lock = threading.Lock()  # one batch at a time: its rows are read afterwards

    def embed(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """Return the embeddings of tokenized texts, as in `LLM.embed`."""
        with self._lock:
            ctx = self._ctx = self._ctx or self._open()
        for ids in texts:
            if not 1 <= len(ids) <= ctx.n_ubatch:
                raise ArgumentError(
                    f"a text has {len(ids)} tokens: a text to embed must have 1 to {ctx.n_ubatch}",
                    "texts",
                    len(ids),
                    ctx.n_ubatch,
                )
        rows = np.empty((len(texts), self._model.n_embd), np.float32)
        most = 1 if ctx.memory_info.n_swa else ctx.n_seq_max  # a window: one text at a time
        for group in _groups([len(ids) for ids in texts], ctx.n_ubatch, most):
            batch = LlamaBatch()
            for seq, i in enumerate(group):
                batch.add_sequence(texts[i], seq, logits_all=True)
            with self._lock:
                if self._model.has_decoder:
                    ctx.clear_kv_cache()
                ctx.decode(batch)
                for seq, i in enumerate(group):
                    rows[i] = ctx.seq_embeddings(seq)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        unit: npt.NDArray[np.float32] = rows / np.maximum(norms, np.finfo(np.float32).tiny)
        return unit

    def _open(self) -> LlamaContext:
        n = min(self._model.n_ctx_train, MOST_TOKENS)
        options: dict[str, Any] = {"n_ctx": N_SEQ * n, "n_batch": n, "n_ubatch": n}
        options |= {"n_seq_max": N_SEQ, "embeddings": True}
        ctx = open_context(self._model, **options)
        if ctx.pooling_type.name != "NONE":
            return ctx
        ctx.close()
        return open_context(self._model, pooling_type="mean", **options)

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._ctx is not None:
            self._ctx.close()


def _groups(lengths: list[int], most_tokens: int, most_texts: int) -> Iterator[list[int]]:
    """Yield groups of consecutive texts that fit one decode."""
    group: list[int] = []
    n = 0
    for i, length in enumerate(lengths):
        if group and (n + length > most_tokens or len(group) == most_texts):
            yield group
            group, n = [], 0
        group.append(i)
        n += length
    if group:
        yield group
