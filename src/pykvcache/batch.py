"""A batch of tokens for one decode."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import IntArray, TokenInput, as_bool, as_int, as_token_array
from pykvcache._native import lib
from pykvcache.errors import ArgumentError, InternalError

__all__ = ["LlamaBatch"]

INT32_MAX = 2**31 - 1
#: llama.cpp's limit of sequences per context.
SEQUENCES_MAX = 256


class LlamaBatch:
    """Tokens with their positions, sequences and output flags (``llama_batch``).

    The arrays grow by doubling, so a batch has no fixed capacity. Batches larger than the
    context's ``n_batch`` are decoded in parts. Not safe for concurrent changes.

    Parameters
    ----------
    capacity
        Initial capacity in tokens.
    n_seq_max
        Initial capacity in sequences per token.
    """

    def __init__(self, capacity: int = 512, n_seq_max: int = 1) -> None:
        rows = as_int(capacity, "capacity", 0, INT32_MAX)
        width = as_int(n_seq_max, "n_seq_max", 1, SEQUENCES_MAX)
        self._rows = lib.Rows(rows, width)

    @classmethod
    def from_arrays(
        cls,
        tokens: TokenInput,
        pos: TokenInput,
        seq_ids: TokenInput | npt.NDArray[np.integer[Any]] | SupportsIndex,
        logits: npt.NDArray[Any] | Sequence[bool] | bool = False,
    ) -> LlamaBatch:
        """Make a batch from arrays, which are copied once.

        Parameters
        ----------
        tokens, pos
            Integers, shape (n,).
        seq_ids
            One sequence for all tokens, or integers of shape (n,), or (n, k) for tokens that
            belong to k sequences each.
        logits
            Which tokens get outputs: one value for all, or shape (n,).

        Raises
        ------
        ValueError
            The shapes do not match.
        """
        batch = cls(0, 1)
        if not batch._rows.fill(tokens, pos, seq_ids, logits):
            token = as_token_array(tokens)
            n = len(token)
            place = _column(as_token_array(pos, "pos"), n, "pos")
            _done(batch._rows.fill(token, place, _sequences(seq_ids, n), _flags(logits, n)))
        return batch

    def add(
        self,
        token: SupportsIndex,
        pos: SupportsIndex,
        seq_ids: SupportsIndex | Sequence[SupportsIndex],
        logits: bool = False,
    ) -> None:
        """Append one token.

        Parameters
        ----------
        token
            Token id.
        pos
            Position in its sequences.
        seq_ids
            A sequence id or several; the token is computed once for all of them.
        logits
            Whether the token gets outputs (logits, embeddings).
        """
        if self._rows.add(token, pos, seq_ids, logits):
            return
        t = as_int(token, "token", 0, INT32_MAX)
        p = as_int(pos, "pos", 0, INT32_MAX)
        seqs = [as_int(s, "sequence id", 0, INT32_MAX) for s in _ids(seq_ids)]
        if not seqs:
            raise ArgumentError("a token must belong to at least one sequence", "seq_ids", 0, 1)
        _done(self._rows.add(t, p, seqs, as_bool(logits, "logits")))

    def add_sequence(
        self,
        tokens: TokenInput,
        seq_id: SupportsIndex,
        logits_all: bool = False,
        *,
        start: SupportsIndex = 0,
    ) -> None:
        """Append tokens of one sequence at consecutive positions.

        Parameters
        ----------
        tokens
            Token ids, shape (n,); arrays are copied without a Python loop.
        seq_id
            The sequence.
        logits_all
            Whether all tokens get outputs instead of only the last one.
        start
            Position of the first token.
        """
        if self._rows.append(tokens, seq_id, logits_all, start):
            return
        token = as_token_array(tokens)
        seq = as_int(seq_id, "sequence id", 0, INT32_MAX)
        first = as_int(start, "start", 0, INT32_MAX - len(token))
        _done(self._rows.append(token, seq, as_bool(logits_all, "logits_all"), first))

    def clear(self) -> None:
        """Remove all tokens; keep the capacity."""
        self._rows.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<LlamaBatch of {len(self._rows)} tokens>"

    # Read-only views --------------------------------------------------------------------

    @property
    def token(self) -> IntArray:
        """Token ids, shape (n,); read-only."""
        return self._rows.token

    @property
    def pos(self) -> IntArray:
        """Positions, shape (n,); read-only."""
        return self._rows.pos

    @property
    def n_seq_id(self) -> IntArray:
        """Number of sequences of each token, shape (n,); read-only."""
        return self._rows.n_seq_id

    @property
    def seq_id(self) -> IntArray:
        """Sequences of each token, shape (n, k); row i is valid up to ``n_seq_id[i]``."""
        return self._rows.seq_id

    @property
    def logits(self) -> npt.NDArray[np.int8]:
        """Output flags, shape (n,); read-only."""
        return self._rows.logits

    @property
    def native(self) -> lib.Rows:
        """The compiled rows, for the context."""
        return self._rows

    def __copy__(self) -> LlamaBatch:
        return copy.deepcopy(self)


def _done(taken: bool) -> None:
    if not taken:
        raise InternalError("the batch does not take values that were converted for it")


def _ids(seq_ids: SupportsIndex | Sequence[SupportsIndex]) -> Sequence[SupportsIndex]:
    # All arrays have __index__.
    if isinstance(seq_ids, SupportsIndex) and not isinstance(seq_ids, np.ndarray):
        return [seq_ids]
    if len(seq_ids) > SEQUENCES_MAX:
        raise ArgumentError(
            f"a token belongs to at most {SEQUENCES_MAX} sequences, not {len(seq_ids)}",
            "seq_ids",
            len(seq_ids),
            SEQUENCES_MAX,
        )
    return list(seq_ids)


def _column(values: IntArray, n: int, what: str) -> IntArray:
    if len(values) != n:
        raise ArgumentError(
            f"{what} holds {len(values)} values for {n} tokens", what, len(values), n
        )
    return values


def _sequences(seq_ids: Any, n: int) -> IntArray:
    if hasattr(seq_ids, "__index__") and not isinstance(seq_ids, np.ndarray):
        return np.full((n, 1), as_int(seq_ids, "sequence id", 0, INT32_MAX), np.int32)
    array = np.asarray(seq_ids)
    if array.ndim == 2:
        if array.dtype.kind not in "iu":
            raise TypeError(f"seq_ids must have an integer dtype, not {array.dtype}")
        if array.shape[0] != n or not 1 <= array.shape[1] <= SEQUENCES_MAX:
            raise ArgumentError(
                f"seq_ids has shape {array.shape}: ({n}, k) is expected, k in [1, {SEQUENCES_MAX}]",
                "seq_ids",
                array.shape,
                (n, SEQUENCES_MAX),
            )
        flat = as_token_array(array.ravel(), "seq_ids")
        return np.array(flat.reshape(array.shape), np.int32)
    column = _column(as_token_array(seq_ids, "seq_ids"), n, "seq_ids")
    return np.array(column.reshape(n, 1), np.int32)


def _flags(logits: Any, n: int) -> npt.NDArray[np.int8]:
    if isinstance(logits, (bool, np.bool_)):
        return np.full(n, bool(logits), np.int8)
    array = np.asarray(logits)
    if array.dtype.kind not in "biu":
        raise TypeError(f"logits must be booleans, not {array.dtype}")
    if array.shape != (n,):
        raise ArgumentError(
            f"logits has shape {array.shape}: ({n},) is expected", "logits", array.shape, (n,)
        )
    return np.array(array != 0, np.int8)
