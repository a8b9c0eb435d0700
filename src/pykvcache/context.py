"""LlamaContext: decoding, and control over its memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pykvcache._arguments import check_kind
from pykvcache._closing import Closing
from pykvcache._native import lib
from pykvcache._params import check_params
from pykvcache.adapters import AdapterInput, Adapters, ControlVector, LoraAdapter
from pykvcache.decoding import DecodeMethods
from pykvcache.enums import (
    AttentionType,
    AttentionTypeName,
    FlashAttention,
    FlashAttentionName,
    GgmlType,
    GgmlTypeName,
    PoolingType,
    PoolingTypeName,
    RopeScalingType,
    RopeScalingTypeName,
)
from pykvcache.errors import ClosedError, ContextCreateError
from pykvcache.introspection import PerfData
from pykvcache.kv import KvMethods
from pykvcache.memory import KvCacheMethods
from pykvcache.model import LlamaModel
from pykvcache.pictures import PictureMethods
from pykvcache.state import StateMethods

__all__ = ["LlamaContext", "open_context"]

_log = logging.getLogger("pykvcache")


class LlamaContext(
    DecodeMethods,
    KvCacheMethods,
    PictureMethods,
    KvMethods,
    StateMethods,
    Closing,
):
    """A context of a model: decodes tokens and keeps their keys and values.

    Methods by topic:

    lifetime and settings
        `close`, `is_closed`, `set_n_threads`, `set_adapters`, `adapters`, `perf`, `perf_reset`
    decode and generate
        `decode`, `encode`, `generate`, `abort`, `logits`, `embeddings`, `seq_embeddings`
    copy, remove and move cells of a sequence
        `copy_cache`, `copy_kv_cache_seq`, `copy_prefix`, `clear_kv_cache_seq`, `remove`,
        `clear_kv_cache`, `kv_cache_seq_keep`, `kv_cache_seq_add`, `kv_cache_seq_div`,
        `kv_cache_can_shift`, `kv_cache_update`, `kv_cache_compact`
    look into the memory
        `kv_cache_seq_pos_max`, `kv_cache_seq_pos_min`, `can_resume`, `sequences`, `cells`,
        `n_cells_used`, `memory_kind`, `memory_info`, `memory_breakdown`, `plot`
    keys and values as arrays
        `kv`, `write_kv`
    files and objects of a sequence or a context
        `save_sequence`, `load_sequence`, `sequence_state`, `restore_sequence`, `save_context`,
        `load_context`, `context_state`, `restore_context`, `save_llama_file`, `load_llama_file`
    raw bytes as llama.cpp writes them
        `get_state`, `set_state`, `state_size`, `get_partial_state`, `set_partial_state`
    facts
        `model`, `fingerprint`, `n_ctx`, `n_ctx_seq`, `n_batch`, `n_ubatch`, `n_seq_max`,
        `max_position`, `kv_unified`, `flash_attn`, `type_k`, `type_v`, `pooling_type`, `n_threads`,
        `n_threads_batch`, `tokens_evaluated`, `native`

    Every method takes the context's lock, so threads may share a context. Two contexts of
    one model run in parallel. The GIL is released during calls that take more than a few
    microseconds. After ``os.fork()`` the child's contexts are closed.

    Parameters
    ----------
    model
        The model.
    n_ctx
        Number of cells (tokens over all sequences); llama.cpp rounds up to a multiple of 256.
        Default: 2,048, or the model's trained length if that is shorter. 0: the model's trained
        length.
    n_batch, n_ubatch
        Tokens per call and per compute step. Larger batches are decoded in parts.
    n_seq_max
        Number of sequences, 1 to 256; ids are ``[0, n_seq_max)``.
    n_rs_seq
        Number of earlier states to keep of each recurrent state, for rolling back tokens of the
        last decode: at most `n_rs_seq` tokens, and never all tokens of that decode. Each costs as
        much memory as the state. Supported by Qwen 3.5, LFM2, Nemotron-H and some others. Must be
        below ``n_ubatch - 1``.
    kv_unified
        One pool of cells for all sequences, so that forks share cells and cost nothing.
        ``False`` gives each sequence a stream of ``n_ctx / n_seq_max`` cells. MiniMax M3's
        sparse attention needs that (or one sequence) and flash attention.
    swa_full
        Give sliding-window layers a full-size cache, so that sequences can be rewound and
        shifted; ``False`` saves memory and keeps only the window.
    type_k, type_v
        ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"``, ``"q5_1"``, ``"q5_0"``,
        ``"q4_1"``, ``"q4_0"`` or ``"iq4_nl"``.
    flash_attn
        ``"auto"``, ``"enabled"`` (True) or ``"disabled"`` (False).
    n_threads, n_threads_batch
        Threads for one token and for several. Default for several: the CPUs that affinity and
        cgroups allow, or `n_threads` if given. Default for one: a thread per 16 MiB of weights,
        at most those CPUs.
    embeddings
        Compute embeddings for all tokens, in addition to logits.
    pooling_type
        ``"unspecified"`` (the model's), ``"none"``, ``"mean"``, ``"cls"``, ``"last"``, ``"rank"``.
    attention_type
        ``"unspecified"`` (the model's), ``"causal"``, ``"non_causal"``.
    offload_kqv, op_offload
        Whether the cache and host operations are offloaded to a GPU.
    rope_scaling_type, rope_freq_base, rope_freq_scale
        RoPE overrides; 0 uses the model's.
    yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow, yarn_orig_ctx
        YaRN overrides; -1 (0 for ``yarn_orig_ctx``) uses the model's.
    no_perf
        Do not measure times.
    adapters
        LoRA adapters and control vectors, as in `set_adapters`.

    Raises
    ------
    ValueError, TypeError
        A parameter is invalid by itself.
    ContextCreateError
        The parameters do not fit together, or do not fit the model or this machine.

    Examples
    --------
    >>> from pykvcache import LlamaContext, LlamaModel, embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=256) as ctx:
    ...     ctx.decode(model.tokenize("Once upon a time"))
    ...     ctx.copy_kv_cache_seq(0, 1)  # a fork: sequence 1 holds the same prefix
    ...     ctx.kv_cache_seq_pos_max(1) == ctx.kv_cache_seq_pos_max(0)
    True
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 8,
        n_rs_seq: int = 0,
        kv_unified: bool = True,
        swa_full: bool = True,
        type_k: GgmlTypeName | GgmlType = "f16",
        type_v: GgmlTypeName | GgmlType = "f16",
        flash_attn: FlashAttentionName | FlashAttention | bool = "auto",
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        embeddings: bool = False,
        pooling_type: PoolingTypeName | PoolingType = "unspecified",
        attention_type: AttentionTypeName | AttentionType = "unspecified",
        offload_kqv: bool = True,
        op_offload: bool = True,
        rope_scaling_type: RopeScalingTypeName | RopeScalingType = "unspecified",
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = -1.0,
        yarn_beta_fast: float = -1.0,
        yarn_beta_slow: float = -1.0,
        yarn_orig_ctx: int = 0,
        no_perf: bool = False,
        adapters: Sequence[AdapterInput] = (),
    ) -> None:
        given = locals()
        check_kind(model, LlamaModel, "model")
        model.native.adds_special()  # raises ClosedError before anything is computed
        params = check_params(model, given)
        wanted = Adapters(model, adapters)
        self._model = model
        self._type_k: GgmlType = params["type_k"]
        self._type_v: GgmlType = params["type_v"]
        self._native = lib.Context(model.native, params)
        try:
            self._use(wanted)
        except BaseException:
            self._native.close()
            raise
        if self._native.index_use is False:
            # llama.cpp warns only once per process, and later.
            _log.warning(
                "this context attends to all cells, but this model was trained to attend only to "
                "cells that its index selects: to use the index, pass kv_unified=False (or "
                "n_seq_max=1), and flash_attn='enabled' (or 'auto')"
            )

    # Facts: llama.cpp's effective settings --------------------------------------------------

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

    # Settings and lifetime ------------------------------------------------------------------

    def set_n_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Change the number of threads, 1 to 512 (``llama_set_n_threads``)."""
        self._native.set_n_threads(
            n_threads, n_threads if n_threads_batch is None else n_threads_batch
        )

    def set_adapters(self, adapters: Sequence[AdapterInput]) -> None:
        """Set the adapters to use (``llama_set_adapters_lora``).

        Keys and values depend on them, so a change clears the memory: a `LlamaSequence` evaluates
        its tokens again at its next use, a prefix cache uses the blocks of these adapters, and
        states of other adapters are refused.

        One of them may be an aLoRA, which has `LoraAdapter.invocation_tokens`. Sequences, and what
        is built on them, use it from the last occurrence of these tokens on, and the other adapters
        alone before. `decode` and `generate` of this context use it for all tokens.

        Parameters
        ----------
        adapters
            `LoraAdapter` and `ControlVector` objects and paths of LoRA adapters, alone or as tuples
            with a scale; scale 0 has no effect. Empty: only the model.

        Raises
        ------
        TypeError, ValueError
            An adapter is given twice, or belongs to another model; or two are aLoRAs.
        UnsupportedOperation
            This context cannot use them, or the model has layers on RPC servers. The previous
            adapters stay in use.
        ReentryError
            Called from a callback of this context's sequences.
        """
        if self.is_closed:
            raise ClosedError("the context is closed")
        self._use(Adapters(self._model, adapters))

    def _use(self, adapters: Adapters) -> None:
        adapters.apply(self._native)
        self._adapters = adapters

    @property
    def adapters(self) -> tuple[tuple[LoraAdapter | ControlVector, float], ...]:
        """The adapters in use, with their scales."""
        return self._adapters.items

    def perf(self) -> PerfData:
        """Return llama.cpp's measurements since the last `perf_reset`."""
        return PerfData(*self._native.perf())

    def perf_reset(self) -> None:
        """Reset llama.cpp's measurements."""
        self._native.perf_reset()

    def close(self) -> None:
        """Free the context; wait for a running call of another thread. Idempotent."""
        self._native.close()

    @property
    def is_closed(self) -> bool:
        """Whether the context is closed, or was inherited through ``os.fork()``."""
        return self._native.is_closed

    def __repr__(self) -> str:
        state = " (closed)" if self.is_closed else ""
        return (
            f"<LlamaContext {self.memory_kind}, n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max}, "
            f"K {self._type_k.name.lower()}, V {self._type_v.name.lower()}{state}>"
        )


def open_context(model: LlamaModel, **options: Any) -> LlamaContext:
    """Open a context, with ``kv_unified=False`` if its memory cannot share cells among sequences.

    Parameters
    ----------
    model
        The model.
    **options
        Parameters of `LlamaContext`. A given ``kv_unified`` is kept.
    """
    try:
        return LlamaContext(model, **options)
    except ContextCreateError as error:
        if error.what != "kv_unified" or "kv_unified" in options:
            raise
        return LlamaContext(model, kv_unified=False, **options)
