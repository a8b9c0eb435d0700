"""A context: decoding, and control over its memory."""

from __future__ import annotations

from collections.abc import Iterator
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
from pykvcache.facts import ContextFacts, PerfData
from pykvcache.introspection import IntrospectionMethods
from pykvcache.kv import KvMethods
from pykvcache.memory import KvCacheMethods
from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler
from pykvcache.state import LlamaFileMethods

__all__ = ["LlamaContext"]

FloatArray = npt.NDArray[np.float32]


class LlamaContext(ContextFacts, KvCacheMethods, IntrospectionMethods, LlamaFileMethods, KvMethods):
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
        Threads for one token and for more. Default for more: the CPUs that affinity and
        cgroups leave this process, or `n_threads` if that is given; for one token one thread
        for each 16 MiB of weights, and no more than these CPUs.
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
        type_k: GgmlTypeName | GgmlType = "f16",
        type_v: GgmlTypeName | GgmlType = "f16",
        flash_attn: FlashAttentionName | FlashAttention = "auto",
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
    ) -> None:
        given = locals()
        if not isinstance(model, LlamaModel):
            raise TypeError(f"model must be a LlamaModel, not {type(model).__name__}")
        model.native.adds_special()  # raises ClosedError before anything is computed
        params = check_params(model, given)
        self._model = model
        self._type_k: GgmlType = params["type_k"]
        self._type_v: GgmlType = params["type_v"]
        self._native = lib.Context(model.native, params)

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
        PositionError
            A token would lie past `max_position`; nothing was decoded.
        NoKvCacheSlot
            The cache has fewer free cells than there are tokens; nothing was decoded.
            With ``swa_full=False`` a window's cache may be full in the middle of a long
            call: ``n_decoded`` tokens of it stay, decode those after them to go on.
        DecodeAborted
            `abort` was called meanwhile; ``n_decoded`` tells how many tokens stay.
        DecodeError
            Other failures; ``code`` is llama.cpp's.

        Notes
        -----
        A model without memory (BERT) computes the batch by itself, see `seq_embeddings`.
        """
        native = self._native
        if native.decode_tokens(batch_or_tokens, seq_id):
            return  # an array or a list of ints, as nearly always
        if isinstance(batch_or_tokens, LlamaBatch):
            native.decode_batch(batch_or_tokens.native)
        else:
            native.decode_vector(as_token_array(batch_or_tokens), seq_id, False)

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
        self._native.encode(b.native)

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
            That token has no logits, and after a failed decode none has; or no sequence
            holds it any more after what came before it: it was removed, moved or
            replaced. A fork that holds it keeps its logits readable.
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
            row = self._native.decode_vector(tokens, seq_id, True)
            assert row is not None
            token = sampler.native.sample(self._native, row)
            if self._native.is_eog(token):
                return
            yield token
            step[0] = token
            tokens = step

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
