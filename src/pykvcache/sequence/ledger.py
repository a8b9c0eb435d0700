"""The tokens of a sequence, and how many of them its memory holds."""

from __future__ import annotations

import sys

import numpy as np

from pykvcache._arguments import IntArray
from pykvcache._native import lib

__all__ = ["NOTHING", "Ledger", "common_prefix"]

NOTHING = np.empty(0, np.int32)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Return how many leading tokens of two vectors are equal."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    same = a[:n] == b[:n]
    # argmin finds the first False; it returns 0 if there is none.
    at = int(same.argmin())
    return n if same[at] else at


class Ledger(lib.Tokens):
    """Tokens of a sequence, and the tokens its memory holds.

    The memory holds the first `n_held` of ``tokens[:n_evaluated] + stale``. Editing the tokens
    never touches the memory: surplus tokens move to `stale`, and count as evaluated again if the
    same tokens return. Tokens from `shifted_at` on (if not None) never count again: their K/V was
    computed with a different prefix. Those from `activated_at` on (if not -1) were evaluated with
    an activated adapter, and count as long as `invoked_at` is the same. `version` is the memory's
    prefix version at the last check.
    """

    __slots__ = ("shifted_at", "stale")

    def __init__(self, tokens: IntArray = NOTHING) -> None:
        self.stale: IntArray = NOTHING
        self.shifted_at: int | None = None
        lib.Tokens.append(self, tokens)

    @property
    def pending(self) -> IntArray:
        """The tokens that the memory does not hold yet; valid until the next edit."""
        return self.part(self.n_evaluated, len(self))

    @property
    def n_held(self) -> int:
        """How many tokens the memory holds, including `stale`."""
        return self.n_evaluated + len(self.stale)

    def append(self, tokens: IntArray) -> None:
        """Append tokens."""
        self.become(len(self), tokens)

    def become(self, n: int, tokens: IntArray) -> None:
        """Keep the first n tokens, then append `tokens`."""
        self._forget(n)
        complete = self.n_evaluated == n
        self.replace(n, tokens)
        self.settle()
        if complete and len(self.stale):
            self.claim()

    def claim(self) -> None:
        """Count stale tokens as evaluated as far as the pending tokens match them."""
        same = min(common_prefix(self.pending, self.stale), self.limit - self.n_evaluated)
        if self.shifted_at is not None:
            same = min(same, max(0, self.shifted_at - self.n_evaluated))
        self.n_evaluated += same
        self.stale = self.stale[same:] if same < len(self.stale) else NOTHING

    def truncate(self, n: int) -> None:
        """Keep the first n tokens."""
        self.become(n, NOTHING)

    def settle(self) -> None:
        """Stop counting tokens that were evaluated with adapters other than those they need now."""
        if self.activated_at != self.invoked_at:
            self._forget(self.limit)

    @property
    def limit(self) -> int:
        """Maximum number of tokens that can count, given the adapters they were evaluated with."""
        if self.activated_at == self.invoked_at:
            return sys.maxsize
        return min(at for at in (self.activated_at, self.invoked_at) if at >= 0)

    def _forget(self, n: int) -> None:
        """Count at most n tokens as evaluated; move the rest to `stale`."""
        if n < self.n_evaluated:
            gone = self.part(n, self.n_evaluated).copy()
            # In this order: an interrupt may leave n_held too large (detected), never too small.
            self.stale = np.concatenate([gone, self.stale]) if len(self.stale) else gone
            self.n_evaluated = n

    def delete(self, begin: int, end: int) -> None:
        """Remove tokens from the middle; the caller updates `n_evaluated` and `stale`."""
        self.replace(begin, self.part(end, len(self)).copy())
        self.settle()

    def holds(self, n: int) -> None:
        """Record that the memory holds exactly the first n tokens."""
        self.n_evaluated = n
        self.stale = NOTHING
        self.drop_marks()

    def drop_marks(self) -> None:
        """Drop the marks at or beyond the end of the held tokens."""
        if self.shifted_at is not None and self.n_held <= self.shifted_at:
            self.shifted_at = None
        if self.activated_at >= 0 and self.n_held <= self.activated_at:
            self.activated_at = -1
