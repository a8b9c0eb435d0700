"""Computing: the methods of a context that decode tokens and give what came of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import TokenInput, as_int, as_token_array
from pykvcache._native import lib
from pykvcache.batch import LlamaBatch
from pykvcache.facts import ContextFacts
from pykvcache.sampling import Sampler, check_sampler

__all__ = ["DecodeMethods"]

FloatArray = npt.NDArray[np.float32]


class DecodeMethods(ContextFacts):
    """The computing methods of `LlamaContext`; not made by itself."""

    _native: lib.Context

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
        OutputNotFinite
            They are NaN or infinite: weights or a state overflow. Minus infinity is a logit.
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
        sampler = Sampler(temperature=0) if sampler is None else check_sampler(sampler)
        sampler.native.check(self._model.native)
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
            row = self._native.decode_vector(tokens, seq_id, True)
            assert row is not None
            token = sampler.native.sample(self._native, row)
            if self._native.is_eog(token):
                return
            yield token
            step[0] = token
            tokens = step
