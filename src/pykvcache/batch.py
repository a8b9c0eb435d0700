"""A batch of tokens for one decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._convert import IntArray, TokenInput, as_bool, as_int, as_token_array

__all__ = ["LlamaBatch"]

INT32_MAX = 2**31 - 1
#: llama.cpp's limit of sequences per context.
SEQUENCES_MAX = 256


class LlamaBatch:
    """Tokens with their positions, sequences and output flags (``llama_batch``).

    The arrays grow by doubling, so a batch has no fixed capacity; what is more than
    the context's ``n_batch`` is decoded in parts. Not safe for concurrent changes.

    Parameters
    ----------
    capacity
        Tokens to make room for at first.
    n_seq_max
        Sequences per token to make room for at first.
    """

    def __init__(self, capacity: int = 512, n_seq_max: int = 1) -> None:
        rows = as_int(capacity, "capacity", 0, INT32_MAX)
        width = as_int(n_seq_max, "n_seq_max", 1, SEQUENCES_MAX)
        self._n = 0
        self._token: IntArray = np.empty(rows, np.int32)
        self._pos: IntArray = np.empty(rows, np.int32)
        self._n_seq_id: IntArray = np.empty(rows, np.int32)
        self._seq_id: IntArray = np.empty((rows, width), np.int32)
        self._logits: npt.NDArray[np.int8] = np.empty(rows, np.int8)

    @classmethod
    def from_arrays(
        cls,
        tokens: TokenInput,
        pos: TokenInput,
        seq_ids: TokenInput | npt.NDArray[np.integer[Any]] | SupportsIndex,
        logits: npt.NDArray[Any] | Sequence[bool] | bool = False,
    ) -> LlamaBatch:
        """Make a batch from arrays, copying each once.

        Parameters
        ----------
        tokens, pos
            Integers, shape (n,).
        seq_ids
            One sequence for all, or integers of shape (n,), or (n, k) for tokens that
            belong to k sequences each.
        logits
            Which tokens to give outputs for: one value for all, or shape (n,).

        Raises
        ------
        ValueError
            The shapes do not fit each other.
        """
        token = as_token_array(tokens)
        n = len(token)
        batch = cls(n, 1)
        batch._token[:] = token
        batch._pos[:] = _column(as_token_array(pos, "pos"), n, "pos")
        batch._seq_id = _sequences(seq_ids, n)
        batch._n_seq_id[:] = batch._seq_id.shape[1]
        batch._logits[:] = _flags(logits, n)
        batch._n = n
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
            A sequence id, or several: the token is then computed once for all of them.
        logits
            Whether to give outputs (logits, embeddings) for it.
        """
        t = as_int(token, "token", 0, INT32_MAX)
        p = as_int(pos, "pos", 0, INT32_MAX)
        seqs = [as_int(s, "sequence id", 0, INT32_MAX) for s in _ids(seq_ids)]
        if not seqs:
            raise ValueError("a token must belong to at least one sequence")
        flag = as_bool(logits, "logits")
        self._reserve(1, len(seqs))
        i = self._n
        self._token[i] = t
        self._pos[i] = p
        self._n_seq_id[i] = len(seqs)
        self._seq_id[i, : len(seqs)] = seqs
        self._logits[i] = flag
        self._n = i + 1

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
            Token ids, shape (n,); copied at once, without a Python loop for arrays.
        seq_id
            The sequence.
        logits_all
            Outputs for all tokens, not only for the last one.
        start
            Position of the first token.
        """
        token = as_token_array(tokens)
        n = len(token)
        seq = as_int(seq_id, "sequence id", 0, INT32_MAX)
        first = as_int(start, "start", 0, INT32_MAX - n)
        flag = as_bool(logits_all, "logits_all")
        if n == 0:
            return
        begin = self._n
        end = begin + n
        self._reserve(n, 1)
        self._token[begin:end] = token
        self._pos[begin:end] = _ramp(first, n)
        self._n_seq_id[begin:end] = 1
        self._seq_id[begin:end, 0] = seq
        self._logits[begin:end] = flag
        self._logits[end - 1] = 1
        self._n = end

    def clear(self) -> None:
        """Remove all tokens and keep the room."""
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"<LlamaBatch of {self._n} tokens>"

    # Read-only views --------------------------------------------------------------------

    @property
    def token(self) -> IntArray:
        """Token ids, shape (n,); read-only."""
        return _frozen(self._token[: self._n])

    @property
    def pos(self) -> IntArray:
        """Positions, shape (n,); read-only."""
        return _frozen(self._pos[: self._n])

    @property
    def n_seq_id(self) -> IntArray:
        """Number of sequences of each token, shape (n,); read-only."""
        return _frozen(self._n_seq_id[: self._n])

    @property
    def seq_id(self) -> IntArray:
        """Sequences of each token, shape (n, k); row i is valid up to ``n_seq_id[i]``."""
        return _frozen(self._seq_id[: self._n])

    @property
    def logits(self) -> npt.NDArray[np.int8]:
        """Output flags, shape (n,); read-only."""
        return _frozen(self._logits[: self._n])

    def _reserve(self, more: int, width: int) -> None:
        rows, columns = self._seq_id.shape
        wanted = self._n + more
        if wanted <= rows and width <= columns:
            return
        rows = max(wanted, 2 * rows) if wanted > rows else rows
        columns = max(width, columns)
        for name in ("_token", "_pos", "_n_seq_id", "_logits"):
            old = getattr(self, name)
            new = np.empty(rows, old.dtype)
            new[: self._n] = old[: self._n]
            setattr(self, name, new)
        seq_id = np.zeros((rows, columns), np.int32)
        seq_id[: self._n, : self._seq_id.shape[1]] = self._seq_id[: self._n]
        self._seq_id = seq_id


def _frozen(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view.flags.writeable = False
    return view


#: The positions that most batches begin with: a slice of them is had in half the time.
_POSITIONS = _frozen(np.arange(4096, dtype=np.int32))


def _ramp(first: int, n: int) -> IntArray:
    """Return ``[first, first + n)``; not to be written."""
    if first + n <= len(_POSITIONS):
        return _POSITIONS[first : first + n]
    return np.arange(first, first + n, dtype=np.int32)


def _ids(seq_ids: SupportsIndex | Sequence[SupportsIndex]) -> Sequence[SupportsIndex]:
    # Arrays have __index__ too, whatever their size.
    if isinstance(seq_ids, SupportsIndex) and not isinstance(seq_ids, np.ndarray):
        return [seq_ids]
    if len(seq_ids) > SEQUENCES_MAX:
        raise ValueError(
            f"a token belongs to at most {SEQUENCES_MAX} sequences, not {len(seq_ids)}"
        )
    return list(seq_ids)


def _column(values: IntArray, n: int, what: str) -> IntArray:
    if len(values) != n:
        raise ValueError(f"{what} holds {len(values)} values for {n} tokens")
    return values


def _sequences(seq_ids: Any, n: int) -> IntArray:
    if hasattr(seq_ids, "__index__") and not isinstance(seq_ids, np.ndarray):
        return np.full((n, 1), as_int(seq_ids, "sequence id", 0, INT32_MAX), np.int32)
    array = np.asarray(seq_ids)
    if array.ndim == 2:
        if array.dtype.kind not in "iu":
            raise TypeError(f"seq_ids must have an integer dtype, not {array.dtype}")
        if array.shape[0] != n or not 1 <= array.shape[1] <= SEQUENCES_MAX:
            raise ValueError(
                f"seq_ids has shape {array.shape}: ({n}, k) is expected, k in [1, {SEQUENCES_MAX}]"
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
        raise ValueError(f"logits has shape {array.shape}: ({n},) is expected")
    return np.array(array != 0, np.int8)
