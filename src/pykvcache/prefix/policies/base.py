"""What a policy is asked, and a heap for those that give every run a priority."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

from pykvcache._native.shadows import Shadow
from pykvcache.prefix.runs import Run

__all__ = ["ByPriority", "Policy"]


class Policy:
    """Decide which blocks are evicted first; a subclass overrides what it needs of these calls.

    Attributes
    ----------
    whole : bool
        Whether a run leaves whole, and not only as many of its last blocks as must.
    declines : bool
        Whether what was just added may be the first to go. Otherwise all else goes before it.
    most_blocks : int
        The most blocks of the run that `victim` returned last that may leave before it is asked
        again.
    n_bytes : int
        What it remembers of runs that left, in bytes; what it notes of a run counts with the run.
    max_notes : int or None
        The most that `n_bytes` should be; None where nobody counts.
    """

    whole: bool = False
    declines: bool = False
    most_blocks: int = 2**62
    n_bytes: int = 0
    max_notes: int | None = None

    def resize(self, max_bytes: int) -> None:
        """Learn the budget; called first, whenever it changes, and before `adopt`."""

    def asked(self, tokens: bytes, step: int, start_key: int) -> None:
        """Learn of a prompt that was looked up, known or not: `used` follows for what is known.

        Parameters
        ----------
        tokens
            All of it, as the tree has them; a rest shorter than a block may follow.
        step
            Bytes of the tokens of one block.
        start_key
            The number that keys of its blocks begin with, see `Run.key`.
        """

    def added(self, run: Run) -> None:
        """Learn of a new run; `evictable` follows."""

    def used(self, run: Run) -> None:
        """Learn that a prompt began with this run: called for each on its way, the last first."""

    def adopt(self, runs: Sequence[Run]) -> None:
        """Learn of runs that another policy had, in the order of their last use.

        Of one path the last comes first. `evictable` follows. After a call that was cut short (by
        Ctrl-C, or by what the policy raised) these are all that are left, known or not.
        """
        for run in runs:
            self.added(run)

    def remembered(self, run: Run) -> None:
        """Learn that a run that was just added was used before: ``uses`` says how often."""

    def learn_from(self, other: Shadow) -> None:
        """Begin with what a shadow of the same name has learned of other runs."""

    def split(self, head: Run, tail: Run) -> None:
        """Give the head, which is new, the history of the tail that it was cut from."""

    def removing(self, run: Run, n_blocks: int) -> None:
        """Learn that so many of its last blocks are evicted now."""

    def evictable(self, run: Run) -> None:
        """Learn that its last block may go from now on, until it is held or followed by others."""

    def victim(self) -> Run | None:
        """Return the evictable run whose last blocks go first; None if there is none."""
        raise NotImplementedError


# Of all heaps: when a run moves to another heap, its entry in the first becomes invalid.
_stamps = count()


class Leaves:
    """A heap of evictable runs. Entries of runs that changed since are skipped when met."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Run]] = []
        self._limit = 64

    def push(self, run: Run, priority: Any) -> None:
        """Put a run in, or give it another priority; the smallest comes out first."""
        run.stamp = next(_stamps)
        heapq.heappush(self._heap, (priority, run.stamp, run))
        if len(self._heap) > self._limit:
            self._heap = [x for x in self._heap if x[2].stamp == x[1] and x[2].is_evictable]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def first(self) -> Run | None:
        """Return the run with the smallest priority, which stays."""
        heap = self._heap
        while heap:
            _, stamp, run = heap[0]
            if run.stamp == stamp and run.is_evictable:
                return run
            heapq.heappop(heap)
        return None


class ByPriority(Policy):
    """Evicts the run with the smallest `priority`, which may change when the run is used."""

    def __init__(self) -> None:
        self.leaves = Leaves()

    def priority(self, run: Run) -> Any:
        """Return what compares runs: the smallest goes first."""
        raise NotImplementedError

    def used(self, run: Run) -> None:
        """Note the new priority."""
        if run.is_evictable:
            self.leaves.push(run, self.priority(run))

    def evictable(self, run: Run) -> None:
        """Note the priority."""
        self.leaves.push(run, self.priority(run))

    def victim(self) -> Run | None:
        """Return the run with the smallest priority."""
        return self.leaves.first()
