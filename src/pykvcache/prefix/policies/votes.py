"""Which shadows hold each block of a tree, and which run the fewest of them would keep."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Final

from pykvcache.prefix.runs import Run

__all__ = ["Votes"]

#: What is noted of a block, of a run, and in a heap: measured with tracemalloc.
_BLOCK_BYTES: Final = 135
_RUN_BYTES: Final = 300
_ENTRY_BYTES: Final = 180

# Votes of no weight still tell apart what has the same weight otherwise.
_LEAST_WEIGHT: Final = 1e-9

_Heap = list[tuple[int, int, int, Run]]


class Votes:
    """Each shadow votes for the blocks that it holds; what has the fewest votes leaves first.

    A block's votes are a number with a bit for each shadow. Runs that may leave wait in heaps, one
    for each such number; there the least recently used come first. Who holds a block holds what
    comes before it, too: so nothing has to leave for the sake of what comes before it.

    Parameters
    ----------
    n_shadows
        How many vote. There may be 2 to that number of heaps: they have to be few.
    runs
        All runs in the tree. Whoever made this keeps them; their ``state`` is the keys of their
        blocks.
    """

    def __init__(self, n_shadows: int, runs: Collection[Run]) -> None:
        self._all = (1 << n_shadows) - 1
        self._runs = runs
        # Of each block by its key, of blocks that shadows were sent and nobody stored, too.
        self._votes: dict[int, int] = {}
        self._most = 256
        # Runs that may leave, or might once, by the key of their last block.
        self._ends: dict[int, Run] = {}
        # In each, entries of runs that changed since are skipped when met.
        self._heaps: dict[int, _Heap] = {}
        self._n_entries = self._stamp = 0
        # The heaps with their votes, the fewest first; empty when it has to be found out.
        self._order: list[tuple[int, _Heap]] = []
        self._weights: Sequence[float] = [1.0] * n_shadows

    @property
    def n_bytes(self) -> int:
        """What all of this takes."""
        runs = _RUN_BYTES * len(self._runs) + _ENTRY_BYTES * self._n_entries
        return _BLOCK_BYTES * len(self._votes) + runs

    def of(self, key: int) -> int:
        """Return the votes of a block; all, if nobody knows it."""
        return self._votes.get(key, self._all)

    # What the shadows hold --------------------------------------------------------------

    def knows(self, run: Run) -> bool:
        """Return whether a shadow holds the first block of a run, and was sent the last one."""
        keys = run.state
        return bool(self._votes.get(keys[0])) and keys[-1] in self._votes

    def sent(self, keys: array[int]) -> None:
        """Note that all shadows are sent a prompt now."""
        if len(self._votes) > self._most:
            self._tidy()
        self._votes.update(dict.fromkeys(keys, self._all))

    def _tidy(self) -> None:
        """Forget blocks of prompts that were never stored."""
        votes = self._votes
        self._votes = {key: votes[key] for run in self._runs for key in run.state if key in votes}
        self._most = 2 * len(self._votes) + 256

    def gone(self, bit: int, run: Run, first: int) -> None:
        """Learn that a shadow lets the last blocks of a run go: its tokens are their keys."""
        votes, ends = self._votes, self._ends
        for key in array("I", run.tokens[4 * first : 4 * run.n_blocks]):
            if key in votes:
                votes[key] &= ~bit
                if key in ends:
                    self._place(ends[key])

    # What is in the tree ----------------------------------------------------------------

    def added(self, run: Run) -> None:
        """Learn of a run."""
        run.state, run.stamp = run.keys, -1

    def used(self, run: Run) -> None:
        """Note that a run was used, or may leave from now on."""
        self._place(run)

    evictable = used

    def split(self, head: Run, tail: Run) -> None:
        """Learn that a run was cut in two."""
        keys = tail.state
        head.state, tail.state = keys[: head.n_blocks], keys[head.n_blocks :]

    def removing(self, run: Run, n_blocks: int) -> None:
        """Forget the last blocks of a run."""
        keys = run.state
        if self._ends.get(keys[-1]) is run:
            del self._ends[keys[-1]]
        for key in keys[-n_blocks:]:
            self._votes.pop(key, None)
        left = len(keys) - n_blocks
        if left // 16 == len(keys) // 16:
            del keys[left:]  # quick; the array keeps its memory
        else:
            run.state = keys[:left]
        run.stamp = -1
        if left:
            self._place(run)

    def _place(self, run: Run) -> None:
        """Put a run that may leave into the heap of its votes."""
        if not run.is_evictable:
            return
        key = run.state[-1]
        self._ends[key] = run
        bits = self.of(key)
        if (heap := self._heaps.get(bits)) is None:
            heap = self._heaps[bits] = []
            self._order = []
        self._stamp += 1
        run.stamp = self._stamp
        heapq.heappush(heap, (run.last_use, -run.end, run.stamp, run))
        self._n_entries += 1
        if self._n_entries > 2 * len(self._runs) + 64:
            self._clean()

    def _clean(self) -> None:
        """Drop the entries of runs that changed since."""
        heaps = {}
        for bits, heap in self._heaps.items():
            if valid := [x for x in heap if x[3].stamp == x[2] and x[3].is_evictable]:
                heapq.heapify(valid)
                heaps[bits] = valid
        self._heaps, self._order = heaps, []
        self._n_entries = sum(map(len, heaps.values()))

    def _first(self, heap: _Heap) -> Run | None:
        """Return the least recently used of a heap, which stays."""
        while heap:
            _, _, stamp, run = heap[0]
            if run.stamp == stamp and run.is_evictable:
                return run
            heapq.heappop(heap)
            self._n_entries -= 1
        return None

    # The choice -------------------------------------------------------------------------

    def weigh(self, weights: Sequence[float]) -> None:
        """Give each shadow's votes a weight."""
        self._weights = weights
        self._order = []

    def _sort(self) -> None:
        totals = [0.0]
        for weight in self._weights:
            totals += [total + weight + _LEAST_WEIGHT for total in totals]
        self._order = sorted(self._heaps.items(), key=lambda item: totals[item[0]])

    def least(self) -> tuple[Run | None, int]:
        """Return what may leave that has the fewest votes, by weight.

        Returns
        -------
        run : Run or None
            A run; None if none may leave.
        n_blocks : int
            How many of its last blocks have the same votes.
        """
        while (front := self._front()) is not None:
            bits, run = front
            if bits == self.of(run.state[-1]):
                return run, self._alike(run, bits)
            self._place(run)  # it got votes since
        return None, 1

    def _front(self) -> tuple[int, Run] | None:
        """Return the first run of the first heap that has any, and the votes of that heap."""
        if not self._order:
            self._sort()
        for bits, heap in self._order:
            if (run := self._first(heap)) is not None:
                return bits, run
        return None

    def _alike(self, run: Run, bits: int) -> int:
        """Return how many of a run's last blocks have these votes, as its last one has."""
        # Those before them have more.
        keys, of = run.state, self.of
        return len(keys) - bisect_left(keys, True, key=lambda key: of(key) == bits)
