"""The tokens of a sequence, and how many of them its memory holds. Knows no llama.cpp."""

from __future__ import annotations

import numpy as np

from pykvcache._convert import IntArray

__all__ = ["Ledger", "common_prefix"]

_NOTHING = np.empty(0, np.int32)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Return how many leading tokens of two vectors are equal."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    same = a[:n] == b[:n]
    # argmin finds the first False, and 0 where there is none.
    at = int(same.argmin())
    return n if same[at] else at


class Ledger:
    """Tokens that a sequence consists of, beside those that its memory holds.

    The memory holds the first `n_held` of ``tokens[:n_evaluated] + stale``. Editing the tokens
    never touches the memory: what it holds too much waits in `stale`, and counts again when the
    same tokens come back. From `shifted_at` on (if not None) they never do: those were computed
    with others before them.
    """

    __slots__ = ("_buffer", "_frozen", "_n", "n_evaluated", "shifted_at", "stale")

    def __init__(self, tokens: IntArray = _NOTHING, n_evaluated: int = 0) -> None:
        self._n = len(tokens)
        self._buffer = np.empty(max(16, self._n), np.int32)
        self._buffer[: self._n] = tokens
        self._frozen: IntArray | None = None
        self.n_evaluated = n_evaluated
        self.stale: IntArray = _NOTHING
        self.shifted_at: int | None = None

    def __len__(self) -> int:
        return self._n

    @property
    def tokens(self) -> IntArray:
        """All tokens, read-only; later edits do not change an array that was handed out."""
        if self._frozen is None:
            self._frozen = self._buffer[: self._n].copy()
            self._frozen.flags.writeable = False
        return self._frozen

    @property
    def pending(self) -> IntArray:
        """The tokens that the memory does not hold yet; valid until the next edit."""
        return self._buffer[self.n_evaluated : self._n]

    def token_at(self, i: int) -> int:
        """Return one token."""
        return int(self._buffer[i])

    @property
    def n_held(self) -> int:
        """How many tokens the memory holds, those of `stale` too."""
        return self.n_evaluated + len(self.stale)

    def part(self, begin: int, end: int) -> IntArray:
        """Return a view of some tokens; valid until the next edit."""
        return self._buffer[begin : min(end, self._n)]

    def append(self, tokens: IntArray) -> None:
        """Put tokens behind the last one."""
        n = len(tokens)
        self._reserve(self._n + n)
        self._buffer[self._n : self._n + n] = tokens
        complete = self.n_evaluated == self._n
        self._n += n
        self._frozen = None
        if complete and len(self.stale):
            self.claim()

    def append_one(self, token: int) -> None:
        """Put one token behind the last one."""
        self._reserve(self._n + 1)
        self._buffer[self._n] = token
        complete = self.n_evaluated == self._n
        self._n += 1
        self._frozen = None
        if complete and len(self.stale):
            self.claim()

    def claim(self) -> None:
        """Count held tokens as evaluated that the pending ones turn out to be."""
        same = common_prefix(self.pending, self.stale)
        if self.shifted_at is not None:
            same = min(same, max(0, self.shifted_at - self.n_evaluated))
        self.n_evaluated += same
        self.stale = self.stale[same:] if same < len(self.stale) else _NOTHING

    def truncate(self, n: int) -> None:
        """Keep the first n tokens."""
        if n < self.n_evaluated:
            gone = self._buffer[n : self.n_evaluated].copy()
            self.stale = np.concatenate([gone, self.stale]) if len(self.stale) else gone
            self.n_evaluated = n
        self._n = n
        self._frozen = None

    def delete(self, begin: int, end: int) -> None:
        """Take tokens out of the middle; the caller has seen to `n_evaluated` and `stale`."""
        kept = self._n - (end - begin)
        self._buffer[begin:kept] = self._buffer[end : self._n].copy()
        self._n = kept
        self._frozen = None

    def holds(self, n: int) -> None:
        """Take note that the memory holds the first n tokens and nothing else."""
        self.n_evaluated = n
        self.stale = _NOTHING

    def _reserve(self, n: int) -> None:
        if n > len(self._buffer):
            grown = np.empty(max(n, 2 * len(self._buffer)), np.int32)
            grown[: self._n] = self._buffer[: self._n]
            self._buffer = grown
