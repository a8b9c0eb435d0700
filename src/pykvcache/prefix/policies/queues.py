"""Policies of two queues, against prompts that come only once: slru and s3fifo."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pykvcache.prefix.policies.base import Leaves, Policy
from pykvcache.prefix.runs import Run

__all__ = ["S3FIFO", "SLRU"]


class SLRU(Policy):
    """Segmented LRU: what was used again is protected, in up to 80 % of the budget.

    New blocks are on probation and leave first, the least recently used first. A use protects. What
    is too much there goes back on probation, the least recently used first.
    """

    protected_share = 0.8

    def __init__(self) -> None:
        self._limit = 0.0
        self._probation = Leaves()
        self._last_resort = Leaves()
        self._protected: OrderedDict[Run, None] = OrderedDict()
        self._bytes = 0
        self._clock = 0

    def resize(self, max_bytes: int) -> None:
        """Give the protected queue its share of the budget."""
        self._limit = self.protected_share * max_bytes
        self._demote()

    def added(self, run: Run) -> None:
        """Put a new run into the queue on probation."""
        self._clock += 1
        run.state = self._clock

    def remembered(self, run: Run) -> None:
        """Count it as a use."""
        self.used(run)

    def adopt(self, runs: Sequence[Run]) -> None:
        """Put a run that was used before into the protected queue."""
        for run in runs:
            self.added(run)
            if run.uses:
                self.used(run)

    def used(self, run: Run) -> None:
        """Put a used run into the protected queue."""
        self._clock += 1
        run.state = self._clock
        if run in self._protected:
            self._protected.move_to_end(run)
        else:
            self._protected[run] = None
            self._bytes += run.n_bytes
        self._enter(run)
        self._demote()

    def _demote(self) -> None:
        while self._bytes > self._limit and self._protected:
            run, _ = self._protected.popitem(last=False)
            self._bytes -= run.n_bytes
            self._clock += 1
            run.state = self._clock
            self._enter(run)

    def split(self, head: Run, tail: Run) -> None:
        """Put the head where the tail is, a little more recent."""
        head.state = tail.state
        if tail in self._protected:
            self._protected[head] = None
            self._protected.move_to_end(head, last=False)
            self._protected.move_to_end(tail, last=False)

    def removing(self, run: Run, n_blocks: int) -> None:
        """Subtract the bytes of blocks that are evicted."""
        if run in self._protected:
            self._bytes -= n_blocks * run.block_bytes
            if n_blocks == run.n_blocks:
                del self._protected[run]

    def evictable(self, run: Run) -> None:
        """Add the run to the queue that it belongs to."""
        self._enter(run)

    def _enter(self, run: Run) -> None:
        if run.is_evictable:
            leaves = self._last_resort if run in self._protected else self._probation
            leaves.push(run, run.state)

    def victim(self) -> Run | None:
        """Return the least recently used on probation, or protected if there is none."""
        return self._probation.first() or self._last_resort.first()


class S3FIFO(Policy):
    """Two first-in-first-out queues and a list of names that left (Yang et al., SOSP 2023).

    New blocks enter a small queue of 10 % of the budget. Those used there move to the main queue,
    the others leave; a block that comes back soon enters the main queue at once. A use in the main
    queue buys another round, up to three.
    """

    small_share = 0.1

    def __init__(self) -> None:
        self._limit = 0.0
        self._budget = 0
        self._small, self._main = Leaves(), Leaves()
        self._small_bytes = 0
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._ghost_bytes = 0
        self._clock = 0

    def resize(self, max_bytes: int) -> None:
        """Give the small queue its share."""
        self._budget = max_bytes
        self._limit = self.small_share * max_bytes

    def _place(self, run: Run, uses: int, in_main: bool) -> None:
        self._clock += 1
        run.state = (uses, in_main, self._clock)

    def added(self, run: Run) -> None:
        """Put it into the small queue, or the main one if its first block left not long ago."""
        ghost = self._ghosts.pop(run.key(0), None)
        if ghost is not None:
            self._ghost_bytes -= ghost
        else:
            self._small_bytes += run.n_bytes
        self._place(run, 0, ghost is not None)

    def remembered(self, run: Run) -> None:
        """Count it as a use."""
        self.used(run)

    def adopt(self, runs: Sequence[Run]) -> None:
        """Put what was used before into the main queue."""
        for run in runs:
            if not run.uses:
                self._small_bytes += run.n_bytes
            self._place(run, 0, run.uses > 0)

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """What the names of blocks take that left."""
        return 120 * len(self._ghosts)

    def used(self, run: Run) -> None:
        """Count the use, up to three."""
        uses, in_main, place = run.state
        run.state = (min(uses + 1, 3), in_main, place)

    def split(self, head: Run, tail: Run) -> None:
        """Put the head where the tail is."""
        head.state = tail.state

    def removing(self, run: Run, n_blocks: int) -> None:
        """Remember what leaves the small queue."""
        _, in_main, _ = run.state
        if in_main:
            return
        size = n_blocks * run.block_bytes
        self._small_bytes -= size
        key = run.key(run.n_blocks - n_blocks)
        self._ghost_bytes += size - self._ghosts.pop(key, 0)
        self._ghosts[key] = size
        while self._ghost_bytes > self._budget and self._ghosts:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def evictable(self, run: Run) -> None:
        """Append the run to its queue."""
        _, in_main, place = run.state
        (self._main if in_main else self._small).push(run, place)

    def victim(self) -> Run | None:
        """Return the first of a queue that was not used since it entered; others move on."""
        while True:
            small, main = self._small.first(), self._main.first()
            run = small if small and (self._small_bytes > self._limit or not main) else main
            if run is None:
                return None
            uses, in_main, _ = run.state
            if uses == 0:
                return run
            if not in_main:
                self._small_bytes -= run.n_bytes
            self._place(run, uses - 1 if in_main else 0, True)
            self.evictable(run)
