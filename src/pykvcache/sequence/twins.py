"""The state of parked sequences that hold the same: one for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeAlias

from pykvcache._native import lib

__all__ = ["PutBack", "Twins", "taken_out"]

#: What is kept of a parked sequence: called with an id, it makes the memory hold it there.
PutBack: TypeAlias = Callable[[int], object]


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


def taken_out(native: lib.Context, seq_id: int) -> PutBack:
    """Return what puts a sequence back; a memory without a known layout takes back its own only."""
    if not native.has_layout:
        state = native.get_partial_state(seq_id)
        return lambda dst: native.set_blocks(dst, [], state)
    data = native.get_state(seq_id, None)
    return lambda dst: native.set_state(dst, [data], None)
