"""A context: decoding, and control over its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._convert import TokenInput, as_int, as_token_array
from pykvcache._native import lib
from pykvcache._params import check_params
from pykvcache.batch import LlamaBatch
from pykvcache.enums import (
    AttentionType,
    FlashAttention,
    GgmlType,
    PoolingType,
    RopeScalingType,
)
from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler

__all__ = ["LlamaContext", "PerfData"]

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PerfData:
    """What ``llama_perf_context`` counted; times in milliseconds.

    llama.cpp counts a call with one token as generation and any other as prompt.
    """

    t_load_ms: float
    t_p_eval_ms: float
    t_eval_ms: float
    n_p_eval: int
    n_eval: int
    n_reused: int


class LlamaContext:
    """A context of a model: it decodes tokens and holds what it has seen in its memory.

    Every method takes the context's lock, so threads may share a context; they wait
    for each other. Two contexts of one model run in parallel. The GIL is free during
    everything that takes longer than some microseconds. After ``os.fork()`` the
    child's contexts are closed.

    Parameters
    ----------
    model
        The model.
    n_ctx
        Cells of the cache, in tokens over all sequences; llama.cpp rounds up to a
        multiple of 256. Default: 2,048, or the model's own length if that is
        shorter. 0: the model's own length, whatever it costs.
    n_batch, n_ubatch
        Tokens per call and per compute step. More tokens are decoded in parts.
    n_seq_max
        Sequences, 1 to 256; ids are ``[0, n_seq_max)``.
    kv_unified
        One pool of cells for all sequences: forks share cells and cost nothing.
        ``False`` gives each sequence a stream of ``n_ctx / n_seq_max`` cells.
    swa_full
        Give sliding-window layers a full-size cache, so that a sequence can be
        rewound and shifted; ``False`` saves memory and keeps the window only.
    type_k, type_v
        ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"``, ``"q5_1"``, ``"q5_0"``,
        ``"q4_1"``, ``"q4_0"`` or ``"iq4_nl"``.
    flash_attn
        ``"auto"``, ``"enabled"`` or ``"disabled"``.
    n_threads, n_threads_batch
        Threads for one token and for more. Default: the CPUs this process may use.
    embeddings
        Compute embeddings for all tokens, beside logits.
    pooling_type
        ``"unspecified"`` (the model's), ``"none"``, ``"mean"``, ``"cls"``, ``"last"``, ``"rank"``.
    attention_type
        ``"unspecified"`` (the model's), ``"causal"``, ``"non_causal"``.
    offload_kqv, op_offload
        Whether the cache and host operations go to a GPU.
    rope_scaling_type, rope_freq_base, rope_freq_scale
        RoPE overrides; 0 takes the model's.
    yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow, yarn_orig_ctx
        YaRN overrides; -1 (0 for ``yarn_orig_ctx``) takes the model's.
    no_perf
        Do not measure times.

    Raises
    ------
    ValueError, TypeError
        A parameter is wrong by itself.
    ContextCreateError
        The parameters do not fit each other, the model or this machine.

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
        kv_unified: bool = True,
        swa_full: bool = True,
        type_k: str | GgmlType = "f16",
        type_v: str | GgmlType = "f16",
        flash_attn: str | FlashAttention = "auto",
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        embeddings: bool = False,
        pooling_type: str | PoolingType = "unspecified",
        attention_type: str | AttentionType = "unspecified",
        offload_kqv: bool = True,
        op_offload: bool = True,
        rope_scaling_type: str | RopeScalingType = "unspecified",
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = -1.0,
        yarn_beta_fast: float = -1.0,
        yarn_beta_slow: float = -1.0,
        yarn_orig_ctx: int = 0,
        no_perf: bool = False,
    ) -> None:
        given = locals()
        if not isinstance(model, LlamaModel):
            raise TypeError(f"model must be a LlamaModel, not {type(model).__name__}")
        model.native.adds_special()  # raises ClosedError before anything is computed
        params = check_params(model, given)
        self._model = model
        self._type_k: GgmlType = params["type_k"]
        self._type_v: GgmlType = params["type_v"]
        self._kv_unified = kv_unified
        self._native = lib.Context(model.native, params)

    # Facts ----------------------------------------------------------------------------

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
        """Cells over all sequences, as llama.cpp rounded it (``llama_n_ctx``)."""
        return self._native.n_ctx

    @property
    def n_ctx_seq(self) -> int:
        """Cells that one sequence can use (``llama_n_ctx_seq``)."""
        return self._native.n_ctx_seq

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
        return self._kv_unified

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
    def memory_kind(self) -> str:
        """Kind of memory.

        ``"attention"``, ``"sliding-window"``, ``"recurrent"``, ``"hybrid"``,
        ``"hybrid-sliding-window"``, ``"none"``, or ``"other"``: a class of llama.cpp
        of which only whole sequences are handled.
        """
        return self._native.memory_kind

    @property
    def tokens_evaluated(self) -> int:
        """Number of tokens that were computed since the context was made."""
        return self._native.tokens_evaluated

    # Decode ---------------------------------------------------------------------------

    def decode(
        self, batch_or_tokens: LlamaBatch | TokenInput, *, seq_id: SupportsIndex = 0
    ) -> None:
        """Compute tokens and store them in the memory (``llama_decode``).

        Parameters
        ----------
        batch_or_tokens
            Token ids, appended to ``seq_id`` at its next position, with logits for
            the last one; or a `LlamaBatch`. More than ``n_batch`` tokens are decoded
            in parts.
        seq_id
            The sequence that an array is appended to.

        Raises
        ------
        InvalidBatch
            Nothing to decode, a token outside the vocabulary, positions that do not
            continue their sequence; raised before anything is computed.
        NoKvCacheSlot
            The cache is full. Parts that were decoded before stay, and the positions
            tell the truth.
        DecodeAborted
            `abort` was called meanwhile.
        DecodeError
            Other failures; ``code`` is llama.cpp's.

        Notes
        -----
        A model without memory (BERT) computes the batch by itself, see `seq_embeddings`.
        """
        if isinstance(batch_or_tokens, LlamaBatch):
            b = batch_or_tokens
            self._native.decode_batch(b.token, b.pos, b.n_seq_id, b.seq_id, b.logits)
        else:
            self._native.decode_tokens(as_token_array(batch_or_tokens), seq_id, False)

    def encode(
        self, batch_or_tokens: LlamaBatch | TokenInput, *, seq_id: SupportsIndex = 0
    ) -> None:
        """Run the encoder (``llama_encode``): T5 before decoding, BERT for embeddings.

        Raises
        ------
        UnsupportedOperation
            The model has no encoder.
        InvalidBatch
            As for `decode`, or more tokens than ``n_ubatch``.
        """
        if isinstance(batch_or_tokens, LlamaBatch):
            b = batch_or_tokens
        else:
            tokens = as_token_array(batch_or_tokens)
            seq = as_int(seq_id, "sequence id", 0, self.n_seq_max - 1)
            b = LlamaBatch.from_arrays(tokens, np.arange(len(tokens), dtype=np.int32), seq)
        self._native.encode(b.token, b.pos, b.n_seq_id, b.seq_id)

    def logits(self, i: SupportsIndex = -1) -> FloatArray:
        """Return the logits of token i of the last decode (``llama_get_logits_ith``).

        Parameters
        ----------
        i
            Index in the batch; negative counts from the end of the tokens that have
            logits.

        Returns
        -------
        ndarray of float32, shape (n_vocab,)
            A copy.

        Raises
        ------
        IndexError
            That token has no logits; after a failed decode none has.
        """
        return self._native.logits(i)

    def embeddings(self, i: SupportsIndex = -1) -> FloatArray:
        """Return the embedding of token i of the last decode, shape (n_embd,); a copy.

        Needs ``embeddings=True`` and ``pooling_type="none"``
        (``llama_get_embeddings_ith``).
        """
        return self._native.token_embeddings(i)

    def seq_embeddings(self, seq_id: SupportsIndex = 0) -> FloatArray:
        """Return the pooled embedding of a sequence of the last decode; a copy.

        Shape (n_embd,), or the classifier scores of a reranking model
        (``llama_get_embeddings_seq``).
        """
        return self._native.seq_embeddings(seq_id)

    def abort(self) -> bool:
        """Ask a decode that runs in another thread to stop; tell whether there was one.

        The decode then raises `DecodeAborted`. Later decodes are not concerned.
        """
        return self._native.abort()

    def generate(
        self,
        prompt: str | TokenInput,
        max_tokens: int,
        sampler: Sampler | None = None,
        seq_id: SupportsIndex = 0,
    ) -> Iterator[int]:
        """Append a prompt to a sequence and yield sampled tokens.

        Each yielded token is decoded when the next one is asked for, so the last one
        is not in the memory yet: pass it as the prompt to go on. Ends before an
        end-of-generation token.

        Parameters
        ----------
        prompt
            Text (special tokens are added when the sequence is empty) or token ids.
        max_tokens
            Tokens to yield at most.
        sampler
            Default: greedy.
        seq_id
            The sequence.
        """
        limit = as_int(max_tokens, "max_tokens", 0, 2**31 - 1)
        if sampler is None:
            sampler = Sampler(temperature=0)
        elif not isinstance(sampler, Sampler):
            raise TypeError(f"sampler must be a Sampler, not {type(sampler).__name__}")
        if isinstance(prompt, str):
            empty = self.kv_cache_seq_pos_max(seq_id) < 0
            tokens = self._model.tokenize(prompt, add_special=empty)
        else:
            tokens = as_token_array(prompt)
        return self._generate(tokens, limit, sampler, seq_id)

    def _generate(
        self, tokens: npt.NDArray[np.int32], limit: int, sampler: Sampler, seq_id: SupportsIndex
    ) -> Iterator[int]:
        step = np.empty(1, np.int32)
        for _ in range(limit):
            row = self._native.decode_tokens(tokens, seq_id, True)
            assert row is not None
            token = sampler.native.sample(self._native, row)
            if self._native.is_eog(token):
                return
            yield token
            step[0] = token
            tokens = step

    # Memory: the seed's methods -----------------------------------------------------------

    def copy_cache(self, src: SupportsIndex, dest: SupportsIndex, size: SupportsIndex) -> None:
        """Make ``dest`` hold the positions ``[0, size)`` of ``src``.

        The same as ``copy_kv_cache_seq(src, dest, 0, size)``.
        """
        self._native.seq_cp(src, dest, 0, size, "copy_cache")

    def copy_kv_cache_seq(
        self,
        src: SupportsIndex,
        dest: SupportsIndex,
        p0: SupportsIndex | None = None,
        p1: SupportsIndex | None = None,
    ) -> None:
        """Make ``dest`` hold what ``src`` holds in ``[p0, p1)`` (``llama_memory_seq_cp``).

        What ``dest`` held before is removed. With ``kv_unified=True`` the cells are
        shared, and the copy costs no memory; otherwise the data is copied at the next
        decode or `kv_cache_update`. An empty range does nothing; an empty source
        empties ``dest``.

        Parameters
        ----------
        src, dest
            Sequence ids.
        p0, p1
            Half-open range of positions; ``None`` leaves that end open.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32.
        SequenceIdError, PositionError
            A value is out of range.
        UnsupportedOperation
            This memory cannot copy a part: recurrent and hybrid memory, streams, a
            sliding window that has dropped cells of that part.
        """
        self._native.seq_cp(src, dest, p0, p1, "copy_kv_cache_seq")

    def clear_kv_cache_seq(
        self,
        src: SupportsIndex | None = None,
        p0: SupportsIndex | None = None,
        p1: SupportsIndex | None = None,
    ) -> bool:
        """Remove the positions ``[p0, p1)`` of a sequence (``llama_memory_seq_rm``).

        Parameters
        ----------
        src
            Sequence id; ``None`` for all sequences.
        p0, p1
            Half-open range of positions; ``None`` leaves that end open.

        Returns
        -------
        bool
            ``False``, with nothing changed, where this memory cannot remove a part:
            recurrent and hybrid memory, and a sliding window that has dropped what
            would be seen afterwards. Removing all that a sequence holds always succeeds.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32; no removal is attempted.
        SequenceIdError, PositionError
            A value is out of range.
        """
        return self._native.seq_rm(src, p0, p1)

    def clear_kv_cache(self) -> None:
        """Forget everything, metadata and data (``llama_memory_clear``)."""
        self._native.clear(True)

    def kv_cache_seq_keep(self, seq_id: SupportsIndex) -> None:
        """Remove every sequence but one, in every stream (``llama_memory_seq_keep``)."""
        self._native.seq_keep(seq_id)

    def kv_cache_seq_add(
        self,
        seq_id: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        delta: SupportsIndex,
    ) -> None:
        """Add ``delta`` to the positions in ``[p0, p1)`` (``llama_memory_seq_add``).

        Keys are rotated to their new positions at the next decode, or now by
        `kv_cache_update`.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32.
        SequenceIdError
            The sequence id is out of range.
        PositionError
            A position would become negative, too large, or one that is held already.
        UnsupportedOperation
            M-RoPE, architectures and types whose keys cannot be rotated again, cells
            that another sequence shares, windows that dropped cells, and a part of a
            recurrent or hybrid sequence.
        """
        self._native.seq_add(seq_id, p0, p1, delta)

    def kv_cache_seq_div(
        self,
        seq_id: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        d: SupportsIndex,
    ) -> None:
        """Divide the positions in ``[p0, p1)`` by ``d``, an integer in [1, 255].

        Several cells may then share a position. ``llama_memory_seq_div`` rotates keys
        the wrong way; here each cell gets the shift that it moved by. Raises as
        `kv_cache_seq_add`.
        """
        self._native.seq_div(seq_id, p0, p1, d)

    def kv_cache_seq_pos_max(self, seq_id: SupportsIndex) -> int:
        """Return the highest position of a sequence; -1 if empty, unused or out of range."""
        return self._native.seq_pos(seq_id, True)

    # Memory: what the seed lacks ------------------------------------------------------------

    def kv_cache_seq_pos_min(self, seq_id: SupportsIndex) -> int:
        """Return the lowest position of a sequence; -1 if empty, unused or out of range.

        On a sliding-window memory: the lowest one that the window still holds.
        """
        return self._native.seq_pos(seq_id, False)

    def kv_cache_can_shift(self) -> bool:
        """Tell whether `kv_cache_seq_add` can be done on this memory at all."""
        return self._native.can_shift()

    def kv_cache_update(self) -> None:
        """Apply pending shifts and copies now instead of at the next decode."""
        self._native.update()

    # Figures and life -----------------------------------------------------------------------

    def set_n_threads(self, n_threads: int, n_threads_batch: int | None = None) -> None:
        """Change the number of threads, 1 to 512 (``llama_set_n_threads``)."""
        self._native.set_n_threads(
            n_threads, n_threads if n_threads_batch is None else n_threads_batch
        )

    def perf(self) -> PerfData:
        """Return llama.cpp's own figures since the last `perf_reset`."""
        return PerfData(*self._native.perf())

    def perf_reset(self) -> None:
        """Set llama.cpp's own figures to zero."""
        self._native.perf_reset()

    def close(self) -> None:
        """Free the context; waits for a call of another thread. Twice does nothing."""
        self._native.close()

    @property
    def is_closed(self) -> bool:
        """Whether the context was closed, or belongs to the process before a fork."""
        return self._native.is_closed

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " (closed)" if self.is_closed else ""
        return (
            f"<LlamaContext {self.memory_kind}, n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max}, "
            f"K {self._type_k.name.lower()}, V {self._type_v.name.lower()}{state}>"
        )
