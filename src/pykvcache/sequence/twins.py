"""The state of parked sequences that hold the same: one for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pykvcache._native import lib

__all__ = ["PutBack", "Twins", "least_cut", "taken_out"]


class PutBack:
    """What is kept of a parked sequence: called with an id, it makes the memory hold it there.

    Attributes
    ----------
    least
        To how many tokens a window of it can be cut, or more; to fewer the cells are missing.
    """

    __slots__ = ("__weakref__", "_put", "least")

    def __init__(self, put: Callable[[int], object], least: int) -> None:
        self._put = put
        self.least = least

    def __call__(self, seq_id: int) -> None:
        """Make the memory hold it under an id."""
        self._put(seq_id)


class Twins:
    """Sequences that hold the same: a fork and its origin, until one of them changes.

    The state is kept by those that are parked, not here.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: Callable[[], PutBack | None] = lambda: None

    def is_parked_with(self, state: PutBack) -> bool:
        """Whether this is the state of those that are parked."""
        return self._state() is state

    def state(self, take_out: Callable[[], PutBack]) -> PutBack:
        """Return the state of those that are parked, or take it out for the first of them."""
        known = self._state()
        if known is None:
            known = take_out()
            self._state = weakref.ref(known)
        return known


def least_cut(n: int, n_swa: int) -> int:
    """Return to how many of n tokens a window can be cut that has all that its last token saw."""
    return 1 if n <= n_swa else n - 1


def taken_out(native: lib.Context, seq_id: int, n: int, n_swa: int) -> PutBack:
    """Return what puts a sequence back; a memory without a known layout takes back its own only.

    ``n``: how many tokens it holds.
    """
    least = n
    if native.has_rest:
        # Other sequences may have taken the cell that its next token will not see.
        least = least_cut(n, n_swa)
        if not native.can_resume(seq_id, least):
            least = n - 1 if least < n - 1 and native.can_resume(seq_id, n - 1) else n
    if not native.has_layout:
        state = native.get_state_part(seq_id)
        return PutBack(lambda dst: native.set_blocks(dst, [], state=state), least)
    data = native.get_state(seq_id, None)
    return PutBack(lambda dst: native.set_state(dst, [data], None), least)
