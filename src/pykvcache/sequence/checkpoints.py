"""Checkpoints: rollback points for memories that cannot be rewound."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_int
from pykvcache._native import lib
from pykvcache._ranges import Range, union

__all__ = ["POINTS", "Checkpoint", "CheckpointPolicy", "Checkpoints", "WindowChunk"]

Bytes = npt.NDArray[np.uint8]

#: Tokens per chunk of window cells.
CHUNK: Final = 64


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Recurrent state after n tokens; shared by forks."""

    n: int
    state: lib.StatePart

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.state.nbytes


@dataclass(frozen=True, eq=False)
class WindowChunk:
    """Serialized window cells of `n` consecutive tokens from `first` on; shared by forks.

    The leading `used` cells still belong to the sequence's tokens.
    """

    first: int
    n: int
    used: int
    cells: Bytes

    @property
    def end(self) -> int:
        """One past the last token in use."""
        return self.first + self.used

    @property
    def nbytes(self) -> int:
        """Bytes of the cells."""
        return self.cells.nbytes


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are taken, and how much memory they may use.

    Attributes
    ----------
    max_bytes
        Upper bound for all checkpoints of a context, in bytes. 0 takes none: a sequence that
        cannot be rewound is then evaluated again from its beginning.
    spacing
        Evaluating a prompt takes a checkpoint at its end and every ``spacing`` tokens before;
        0 takes only the one at the end.
    """

    max_bytes: int = 256 << 20
    spacing: int = 512

    def __post_init__(self) -> None:
        for name in ("max_bytes", "spacing"):
            object.__setattr__(self, name, as_int(getattr(self, name), name, 0))

    @property
    def chunk(self) -> int:
        """Tokens per chunk of window cells."""
        return CHUNK

    def next_stop(self, begin: int, end: int) -> int:
        """Return where to pause evaluating ``[begin, end)`` for a checkpoint, or ``end``."""
        if not self.spacing or not self.max_bytes:
            return end
        return min(end, (begin // self.spacing + 1) * self.spacing)


#: Default policy.
POINTS = CheckpointPolicy()


@dataclass(slots=True, eq=False)
class Checkpoints:
    """The checkpoints of one sequence: states, window cells, and one row of logits."""

    #: By number of tokens.
    states: list[Checkpoint] = field(default_factory=list)
    #: By first token; no token is in two chunks.
    windows: list[WindowChunk] = field(default_factory=list)
    #: Number of tokens, and the logits after them: a cache keeps those of a prompt's end.
    row: tuple[int, npt.NDArray[np.float32]] | None = None

    def __iter__(self) -> Iterator[Checkpoint | WindowChunk]:
        yield from self.states
        yield from self.windows

    def state_at(self, n: int) -> lib.StatePart | None:
        """Return the state after n tokens; None if there is none."""
        return next((point.state for point in self.states if point.n == n), None)

    def add_state(self, n: int, state: lib.StatePart) -> None:
        """Add a state; replace one after the same number of tokens."""
        self.states = [point for point in self.states if point.n != n]
        insort(self.states, Checkpoint(n, state), key=lambda point: point.n)

    def covered(self) -> list[Range]:
        """Return the ranges of tokens with saved window cells, in order."""
        return union((chunk.first, chunk.end) for chunk in self.windows)

    def add_window(self, chunk: WindowChunk) -> None:
        """Add window cells of tokens that have none yet."""
        insort(self.windows, chunk, key=lambda other: other.first)

    def window_chunks(self, begin: int, end: int) -> list[WindowChunk]:
        """Return the chunks of window cells that overlap ``[begin, end)``, in order."""
        return [one for one in self.windows if one.first < end and one.end > begin]

    def up_to(self, n: int) -> Checkpoints:
        """Return the checkpoints of the first n tokens, for a fork."""
        found = Checkpoints([point for point in self.states if point.n <= n], self.windows)
        found._cut_windows(n)
        return found

    def drop_after(self, n: int) -> None:
        """Drop the checkpoints beyond n tokens."""
        del self.states[bisect_right(self.states, n, key=lambda point: point.n) :]
        if self.windows and self.windows[-1].end > n:
            self._cut_windows(n)
        if self.row is not None and self.row[0] > n:
            self.row = None

    def _cut_windows(self, n: int) -> None:
        self.windows = [
            one if one.end <= n else replace(one, used=n - one.first)
            for one in self.windows
            if one.first < n
        ]

    def remove(self, one: Checkpoint | WindowChunk) -> None:
        """Drop a checkpoint, which forks may share."""
        self.states = [other for other in self.states if other is not one]
        # Forks share the cells, but may use fewer of them.
        if isinstance(one, WindowChunk):
            self.windows = [other for other in self.windows if other.cells is not one.cells]

    def gaps(self) -> Iterator[tuple[int, Checkpoint]]:
        """Yield each state but the last, with the number of tokens it saves."""
        before = 0
        for point in self.states[:-1]:
            yield point.n - before, point
            before = point.n
