"""Checkpoints of a recurrent state: the last few, by position."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import MOST, as_int, as_storable
from pykvcache.arrays.ollama._batch import as_range

__all__ = ["MOST_CHECKPOINTS", "CheckpointRing"]

#: Checkpoints of one sequence.
MOST_CHECKPOINTS = 2**16


class CheckpointRing:
    """A fixed number of checkpoints, the oldest of which gives way to the next.

    A checkpoint is a position and named arrays. It follows the checkpoint store of Ollama's
    recurrent cache.

    Parameters
    ----------
    count : int
        How many checkpoints to keep; 0 for none.

    Raises
    ------
    CacheValueError
        `count` is negative, or above 65,536.
    """

    def __init__(self, count: SupportsIndex) -> None:
        n = as_int("count", count, minimum=0, maximum=MOST_CHECKPOINTS)
        # -1 marks an unused place.
        self._pos = np.full(n, -1, np.int64)
        # Never changed in place, but replaced: copies of the ring share them.
        self._arrays: list[dict[Hashable, NDArray[Any]]] = [{}] * n
        self._next = 0
        self._last_pos = -1

    def copy(self) -> CheckpointRing:
        """Return an independent ring of the same checkpoints; their arrays are not copied."""
        other = CheckpointRing(0)
        other._pos, other._arrays = self._pos.copy(), self._arrays.copy()
        other._next, other._last_pos = self._next, self._last_pos
        return other

    # The default shallow copy would share the positions.
    __copy__ = copy

    @property
    def size(self) -> int:
        """Number of checkpoints."""
        return int((self._pos >= 0).sum())

    @property
    def last_pos(self) -> int:
        """Position of the last checkpoint taken or gone back to; -1 if there is none."""
        return self._last_pos

    @property
    def positions(self) -> list[int]:
        """Positions of the checkpoints, ascending."""
        return sorted(self._pos[self._pos >= 0].tolist())

    def record(self, pos: SupportsIndex) -> int:
        """Begin a checkpoint without arrays; return its place, -1 if the ring has none."""
        position = as_int("pos", pos, minimum=0, maximum=MOST)
        if not self._pos.size:
            return -1
        place = self._next
        self._next = (place + 1) % self._pos.size
        self._pos[place] = self._last_pos = position
        self._arrays[place] = {}
        return place

    def store(self, place: int, name: Hashable, array: NDArray[Any]) -> None:
        """Copy an array into the checkpoint at a place."""
        place = as_int("place", place, minimum=0, maximum=self._pos.size - 1)
        array = as_storable("array", array)
        self._hold(place, name, array.copy())

    def _hold(self, place: int, name: Hashable, array: NDArray[Any]) -> None:
        """Put an array into a checkpoint that nobody will write to from now on."""
        self._arrays[place] = {**self._arrays[place], name: array}

    def best(self, target: SupportsIndex) -> int | None:
        """Return the place of the highest checkpoint strictly below `target`, if any."""
        below = np.where(self._pos < as_int("target", target), self._pos, -1)
        if not below.size or below.max() < 0:
            return None
        return int(below.argmax())

    def at(self, place: int) -> tuple[int, Mapping[Hashable, NDArray[Any]]]:
        """Return position and arrays of the checkpoint at a place; they are read-only."""
        place = as_int("place", place, minimum=0, maximum=self._pos.size - 1)
        held = {name: array.view() for name, array in self._arrays[place].items()}
        for array in held.values():
            array.flags.writeable = False
        return int(self._pos[place]), held

    def prune_after(self, pos: SupportsIndex) -> None:
        """Drop the checkpoints above `pos`, to which the state was taken back."""
        position = as_int("pos", pos)
        self._pos[self._pos > position] = -1
        self._renumber(position)

    def shift_range(self, begin: SupportsIndex, end: SupportsIndex) -> None:
        """Drop the checkpoints in ``[begin, end)`` and lower those after it."""
        first, last = as_range(begin, end)
        self._pos[(self._pos >= first) & (self._pos < last)] = -1
        self._pos[self._pos >= last] -= last - first
        self._renumber(int(self._pos.max(initial=-1)))

    def _renumber(self, last_pos: int) -> None:
        used = self._pos >= 0
        self._last_pos = last_pos if used.any() else -1
        if not used.any():
            self._next = 0
        else:
            # The first unused place, or else that of the oldest checkpoint.
            self._next = int(self._pos.argmin() if used.all() else used.argmin())
