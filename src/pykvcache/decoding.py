"""The methods of a context that compute: decode, encode, logits, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import TokenInput, as_int, as_token_array
from pykvcache._native import lib
from pykvcache.batch import LlamaBatch
from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler, check_sampler

__all__ = ["DecodeMethods"]

FloatArray = npt.NDArray[np.float32]


class DecodeMethods:
    """The computing methods of `LlamaContext`; a base class."""

    _native: lib.Context
    _model: LlamaModel

    def decode(
        self, batch_or_tokens: LlamaBatch | TokenInput, *, seq_id: SupportsIndex = 0
    ) -> None:
        """Decode tokens and store their cells in the memory (``llama_decode``).

        Parameters
        ----------
        batch_or_tokens
            Token ids, appended to ``seq_id`` at its next position, with logits for the last
            one; or a `LlamaBatch`. More than ``n_batch`` tokens are decoded in parts.
        seq_id
            The sequence to which token ids are appended.

        Raises
        ------
        InvalidBatch
            The batch is empty, a token is outside the vocabulary, or positions do not continue
            their sequence; raised before anything is computed.
        PositionError
            A position would exceed `max_position`; nothing was decoded.
        NoKvCacheSlot
            The cache has too few free cells; nothing was decoded. With ``swa_full=False`` a
            window's cache may become full in the middle of a long call: its first
            ``n_decoded`` tokens stay; continue with the rest.
        DecodeAborted
            `abort` was called; at least the first ``n_decoded`` tokens stay.
        DecodeError
            Any other failure; ``code`` is llama.cpp's.

        Notes
        -----
        A model without memory (BERT) computes only the batch, see `seq_embeddings`. All adapters
        in use apply to all tokens, including an aLoRA; `LlamaSequence` activates it at its tokens.
        """
        native = self._native
        if native.decode_tokens(batch_or_tokens, seq_id):
            return  # the common case: an array or a list of ints
        if isinstance(batch_or_tokens, LlamaBatch):
            native.decode_batch(batch_or_tokens.native)
        else:
            native.decode_tokens(as_token_array(batch_or_tokens), seq_id)

    def encode(
        self, batch_or_tokens: LlamaBatch | TokenInput, *, seq_id: SupportsIndex = 0
    ) -> None:
        """Run the encoder (``llama_encode``): of T5 before decoding, of BERT for embeddings.

        Raises
        ------
        UnsupportedOperation
            The model has no encoder.
        InvalidBatch
            As in `decode`; also for more than ``n_ubatch`` tokens.
        """
        if isinstance(batch_or_tokens, LlamaBatch):
            b = batch_or_tokens
        else:
            tokens = as_token_array(batch_or_tokens)
            seq = as_int(seq_id, "sequence id", 0, self._native.n_seq_max - 1)
            b = LlamaBatch.from_arrays(tokens, np.arange(len(tokens), dtype=np.int32), seq)
        self._native.encode(b.native)

    def logits(self, i: SupportsIndex = -1) -> FloatArray:
        """Return the logits of token i of the last decode (``llama_get_logits_ith``).

        Parameters
        ----------
        i
            Index in the batch; negative numbers count from the end of the tokens with logits.

        Returns
        -------
        ndarray of float32, shape (n_vocab,)
            A copy.

        Raises
        ------
        IndexError
            The token has no logits (no token has after a failed decode), or its row is no
            longer valid because the token or an earlier one was removed, moved or replaced.
            A fork that has the token keeps its logits valid.
        OutputNotFinite
            They contain NaN or infinity, because weights or a state overflowed. Minus infinity
            is a valid logit.
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
        """Stop a decode that runs in another thread; return whether one was running.

        The decode raises `DecodeAborted`. Later decodes are not affected.
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

        Each yielded token is decoded when the next one is requested, so the last one is
        not in the memory yet: pass it as the prompt to continue. Ends before an
        end-of-generation token.

        Parameters
        ----------
        prompt
            Text (special tokens are added if the sequence is empty) or token ids.
        max_tokens
            Maximum number of tokens to yield.
        sampler
            Default: greedy.
        seq_id
            The sequence.
        """
        limit = as_int(max_tokens, "max_tokens", 0, 2**31 - 1)
        sampler = check_sampler(sampler, self._model)
        if isinstance(prompt, str):
            empty = self._native.seq_pos(seq_id, True) < 0
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
            token = sampler.native.sample(self._native, row)
            if self._native.is_eog(token):
                return
            yield token
            step[0] = token
            tokens = step
