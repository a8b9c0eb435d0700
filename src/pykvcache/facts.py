"""Read-only facts of a context, and llama.cpp's measurements."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache._native import lib
from pykvcache.enums import GgmlType, PoolingType
from pykvcache.model import LlamaModel

__all__ = ["ContextFacts", "PerfData"]


@dataclass(frozen=True)
class PerfData:
    """Measurements of ``llama_perf_context``; times in milliseconds.

    llama.cpp counts a call with one token as generation and any other as prompt.
    """

    t_load_ms: float
    t_p_eval_ms: float
    t_eval_ms: float
    n_p_eval: int
    n_eval: int
    n_reused: int


class ContextFacts:
    """Read-only facts of `LlamaContext`: llama.cpp's effective settings."""

    _native: lib.Context
    _model: LlamaModel
    _type_k: GgmlType
    _type_v: GgmlType

    @property
    def native(self) -> lib.Context:
        """The object of the compiled layer."""
        return self._native

    @property
    def model(self) -> LlamaModel:
        """The model of this context."""
        return self._model

    @property
    def n_ctx(self) -> int:
        """Number of cells over all sequences, rounded by llama.cpp (``llama_n_ctx``)."""
        return self._native.n_ctx

    @property
    def n_ctx_seq(self) -> int:
        """Number of cells that one sequence can use (``llama_n_ctx_seq``)."""
        return self._native.n_ctx_seq

    @property
    def max_position(self) -> int:
        """Highest position of a token; higher ones raise `PositionError`.

        The minimum of: the end of a learned table of positions; the position where the angles of
        RoPE, computed in float32, are off by 2**-5 (see docs/positions.md); and 2,147,483,615 minus
        the sliding window. Without RoPE or a table only the last one applies.
        """
        return self._native.max_position

    @property
    def n_batch(self) -> int:
        """Effective number of tokens per call (``llama_n_batch``)."""
        return self._native.n_batch

    @property
    def n_ubatch(self) -> int:
        """Effective number of tokens per compute step (``llama_n_ubatch``)."""
        return self._native.n_ubatch

    @property
    def n_seq_max(self) -> int:
        """Number of sequences (``llama_n_seq_max``)."""
        return self._native.n_seq_max

    @property
    def kv_unified(self) -> bool:
        """Whether all sequences share one pool of cells."""
        return self._native.kv_unified

    @property
    def flash_attn(self) -> bool:
        """Whether flash attention is used, with ``"auto"`` resolved."""
        return self._native.flash_attn

    @property
    def n_threads(self) -> int:
        """Threads for one token."""
        return self._native.n_threads

    @property
    def n_threads_batch(self) -> int:
        """Threads for more than one token."""
        return self._native.n_threads_batch

    @property
    def type_k(self) -> GgmlType:
        """Stored type of keys."""
        return self._type_k

    @property
    def type_v(self) -> GgmlType:
        """Stored type of values."""
        return self._type_v

    @property
    def pooling_type(self) -> PoolingType:
        """Effective pooling of embeddings."""
        return PoolingType(self._native.pooling_type)

    @property
    def tokens_evaluated(self) -> int:
        """Number of tokens evaluated since the context was created."""
        return self._native.tokens_evaluated
