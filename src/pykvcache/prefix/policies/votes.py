"""Which shadows hold each block of a tree, and which run the fewest of them would keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Final

from pykvcache._native.shadows import BlockVotes, Shadow
from pykvcache.prefix.runs import Run

__all__ = ["Votes"]

#: What is noted of a run, beside the keys of its blocks: measured with tracemalloc.
_RUN_BYTES: Final = 200
_KEY_BYTES: Final = 4


class Votes:
    """Each shadow votes for the blocks that it holds; what has the fewest votes leaves first.

    A block's votes are a number with a bit for each shadow. Runs that may leave wait in heaps, one
    for each such number; there the least recently used come first. Who holds a block holds what
    comes before it, too: so nothing has to leave for the sake of what comes before it.

    Parameters
    ----------
    n_shadows
        How many vote. There are 2 to that number of heaps: they have to be few.
    runs
        All runs in the tree. Whoever made this keeps them; their ``state`` is the keys of their
        blocks, and their ``stamp`` their number here.
    """

    def __init__(self, n_shadows: int, runs: Collection[Run]) -> None:
        self._runs = runs
        self.weights: Sequence[float] = [1.0] * n_shadows
        # Of blocks that shadows were sent and nobody stored, too.
        self._blocks = BlockVotes(n_shadows)
        self._most = 256
        # Runs that may leave, or might once, by their number.
        self._ends: dict[int, Run] = {}
        self._numbers = count()
        self._n_blocks = 0  # of all runs

    @property
    def n_bytes(self) -> int:
        """What all of this takes."""
        keys = _KEY_BYTES * self._n_blocks
        return self._blocks.memory + _RUN_BYTES * len(self._runs) + keys

    def of(self, key: int) -> int:
        """Return the votes of a block; all, if nobody knows it."""
        return self._blocks.of(key)

    # What the shadows hold --------------------------------------------------------------

    def knows(self, run: Run) -> bool:
        """Return whether a shadow holds the first block of a run, and was sent the last one."""
        first, last = _key_at(run, 0), _key_at(run, -1)
        return first in self._blocks and self.of(first) != 0 and last in self._blocks

    def sent(self, keys: bytes) -> None:
        """Note that all shadows are sent a prompt now."""
        if len(self._blocks) > self._most:
            # Forget blocks of prompts that were never stored.
            self._blocks.keep(b"".join(run.state for run in self._runs))
            self._most = 2 * len(self._blocks) + 256
        self._blocks.sent(keys)

    def drop(self, bit: int) -> None:
        """Learn that a shadow votes no more."""
        self._blocks.drop(bit)

    def hear(self, bit: int, shadow: Shadow) -> None:
        """Learn what a shadow has let go in its last call."""
        shadow.tell(self._blocks, bit)

    # What is in the tree ----------------------------------------------------------------

    def added(self, run: Run) -> None:
        """Learn of a run."""
        run.state, run.stamp = run.keys, next(self._numbers)
        self._n_blocks += run.n_blocks

    def used(self, run: Run) -> None:
        """Note that a run was used, or may leave from now on."""
        if run.is_evictable:
            self._ends[run.stamp] = run
            self._blocks.place(run.stamp, _key_at(run, -1), run.last_use, run.end)

    evictable = used

    def split(self, head: Run, tail: Run) -> None:
        """Learn that a run was cut in two."""
        keys, size = tail.state, _KEY_BYTES * head.n_blocks
        head.state, tail.state = keys[:size], keys[size:]
        head.stamp = next(self._numbers)

    def removing(self, run: Run, n_blocks: int) -> None:
        """Forget the last blocks of a run."""
        keys = run.state
        left = len(keys) - _KEY_BYTES * n_blocks
        self._withdraw(run)
        self._n_blocks -= n_blocks
        self._blocks.forget(keys[left:])
        run.state = keys[:left]
        if left:
            self.used(run)

    def _withdraw(self, run: Run) -> None:
        self._blocks.withdraw(run.stamp)
        self._ends.pop(run.stamp, None)

    # The choice -------------------------------------------------------------------------

    def weigh(self, weights: Sequence[float]) -> None:
        """Give each shadow's votes a weight."""
        self.weights = weights
        self._blocks.weigh(list(weights))

    def least(self) -> tuple[Run | None, int]:
        """Return what may leave that has the fewest votes, by weight.

        Returns
        -------
        run : Run or None
            A run; None if none may leave.
        n_blocks : int
            How many of its last blocks have the same votes.
        """
        while (number := self._blocks.least()) >= 0:
            run = self._ends[number]
            if run.is_evictable:
                return run, self._blocks.alike(run.state)
            self._withdraw(run)
        return None, 1


def _key_at(run: Run, place: int) -> int:
    return memoryview(run.state).cast("I")[place]
