"""Checkpoints of a recurrent state: the last few, by position."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import MOST, as_int, as_storable
from pykvcache.arrays.ollama._batch import as_range

__all__ = ["CheckpointRing"]


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
        n = as_int("count", count, minimum=0, maximum=2**16)
        # -1 marks an unused place; its arrays stay, to be written over.
        self._pos = np.full(n, -1, np.int64)
        self._arrays: list[dict[Hashable, NDArray[Any]]] = [{} for _ in range(n)]
        self._held: list[set[Hashable]] = [set() for _ in range(n)]
        self._next = 0
        self._last_pos = -1

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
        self._held[place].clear()
        return place

    def store(self, place: int, name: Hashable, array: NDArray[Any]) -> None:
        """Copy an array into the checkpoint at a place."""
        place = as_int("place", place, minimum=0, maximum=self._pos.size - 1)
        array = as_storable("array", array)
        kept = self._arrays[place].get(name)
        if kept is not None and (kept.shape, kept.dtype) == (array.shape, array.dtype):
            kept[...] = array
        else:
            self._arrays[place][name] = array.copy()
        self._held[place].add(name)

    def best(self, target: SupportsIndex) -> int | None:
        """Return the place of the highest checkpoint strictly below `target`, if any."""
        below = np.where(self._pos < as_int("target", target), self._pos, -1)
        if not below.size or below.max() < 0:
            return None
        return int(below.argmax())

    def at(self, place: int) -> tuple[int, Mapping[Hashable, NDArray[Any]]]:
        """Return position and arrays of the checkpoint at a place."""
        place = as_int("place", place, minimum=0, maximum=self._pos.size - 1)
        held = {name: self._arrays[place][name] for name in self._held[place]}
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
