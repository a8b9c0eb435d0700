"""Checkpoints: where a sequence can go back to whose memory cannot be rewound."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pykvcache._integers import as_int
from pykvcache._native import lib

__all__ = ["POINTS", "Checkpoint", "CheckpointPolicy", "Checkpoints"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The part of a memory that cannot be rewound, as it was after n tokens. Forks share it."""

    n: int
    state: lib.Partial

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.state.nbytes


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are taken, and how much memory they may use.

    Attributes
    ----------
    max_bytes
        Bytes of all checkpoints of a context together. 0 takes none: what cannot be rewound is
        evaluated again from its beginning.
    spacing
        A prompt that is evaluated gets a checkpoint at its end, and one every ``spacing`` tokens
        before; 0 leaves those between out.
    """

    max_bytes: int = 256 << 20
    spacing: int = 512

    def __post_init__(self) -> None:
        for name in ("max_bytes", "spacing"):
            object.__setattr__(self, name, as_int(getattr(self, name), name, 0))

    def next_stop(self, begin: int, end: int) -> int:
        """Where to pause an evaluation of ``[begin, end)`` for a checkpoint; at most ``end``."""
        if not self.spacing or not self.max_bytes:
            return end
        return min(end, (begin // self.spacing + 1) * self.spacing)


#: The policy of sequences that were given none.
POINTS = CheckpointPolicy()


@dataclass(frozen=True)
class BlockCheckpoints(CheckpointPolicy):
    """Checkpoints at the ends of blocks, where a prefix cache can keep them.

    Attributes
    ----------
    block_size
        Tokens per block: there is a checkpoint after the last full block of each prompt, and 1, 3,
        7, 15... blocks before, where prompts are likely to part.
    """

    block_size: int = 64

    def next_stop(self, begin: int, end: int) -> int:
        """Where to pause an evaluation: every ``spacing`` tokens, and denser towards the end."""
        if not self.max_bytes:
            return end
        block = self.block_size
        n_blocks = end // block
        before = (n_blocks - 2**k + 1 for k in range(n_blocks.bit_length() + 1))
        stop = super().next_stop(begin, end) // block * block
        candidates = [n for n in (stop, *(block * n for n in before)) if begin < n < end]
        return min(candidates, default=end)


class Checkpoints:
    """The checkpoints of one sequence, by number of tokens; and its logits at one place."""

    __slots__ = ("_points", "row")

    def __init__(self, points: Iterable[Checkpoint] = ()) -> None:
        self._points = list(points)
        #: After how many tokens, and the logits there: a cache keeps those after a prompt.
        self.row: tuple[int, npt.NDArray[np.float32]] | None = None

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def at_most(self, n: int) -> Checkpoint | None:
        """Return the deepest one that lies at n tokens or before."""
        at = bisect_right(self._points, n, key=lambda point: point.n)
        return self._points[at - 1] if at else None

    def add(self, point: Checkpoint) -> None:
        """Keep one more; one at the same place is replaced."""
        at = bisect_right(self._points, point.n, key=lambda other: other.n)
        if at and self._points[at - 1].n == point.n:
            self._points[at - 1] = point
        else:
            self._points.insert(at, point)

    def up_to(self, n: int) -> Checkpoints:
        """Return those at n tokens or before, for a fork."""
        return Checkpoints(point for point in self._points if point.n <= n)

    def drop_after(self, n: int) -> None:
        """Forget those that lie beyond n tokens."""
        del self._points[bisect_right(self._points, n, key=lambda point: point.n) :]
        if self.row is not None and self.row[0] > n:
            self.row = None

    def remove(self, point: Checkpoint) -> None:
        """Forget one."""
        self._points = [other for other in self._points if other is not point]

    def gaps(self) -> Iterator[tuple[int, Checkpoint]]:
        """Yield each but the last with the tokens that would be evaluated again without it."""
        before = 0
        for point in self._points[:-1]:
            yield point.n - before, point
            before = point.n
