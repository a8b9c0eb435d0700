"""Checkpoints: what a sequence can go back to whose memory cannot be rewound."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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

#: Tokens per chunk of window cells, where no cache says otherwise.
CHUNK: Final = 64


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The recurrent state after n tokens. Forks share it."""

    n: int
    state: lib.StatePart

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.state.nbytes


@dataclass(frozen=True, eq=False)
class WindowChunk:
    """Window cells of consecutive tokens. Forks share them.

    Attributes
    ----------
    first
        The first token.
    n
        How many cells there are.
    used
        How many of them are still of the sequence's tokens.
    cells
        Their bytes.
    """

    first: int
    n: int
    used: int
    cells: Bytes

    @property
    def end(self) -> int:
        """The token after the last one."""
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

    @property
    def chunk(self) -> int:
        """Tokens per chunk of window cells."""
        return CHUNK

    def next_stop(self, begin: int, end: int) -> int:
        """Where to pause an evaluation of ``[begin, end)`` for a checkpoint; at most ``end``."""
        if not self.spacing or not self.max_bytes:
            return end
        return min(end, (begin // self.spacing + 1) * self.spacing)


#: The policy of sequences that were given none.
POINTS = CheckpointPolicy()


@dataclass(slots=True, eq=False)
class Checkpoints:
    """The checkpoints of one sequence: states, window cells, and its logits at one place.

    Attributes
    ----------
    states
        Recurrent states, by number of tokens.
    windows
        Window cells, by first token; no token is in two chunks.
    row
        After how many tokens, and the logits there: a cache keeps those after a prompt.
    """

    states: list[Checkpoint] = field(default_factory=list)
    windows: list[WindowChunk] = field(default_factory=list)
    row: tuple[int, npt.NDArray[np.float32]] | None = None

    def __iter__(self) -> Iterator[Checkpoint | WindowChunk]:
        yield from self.states
        yield from self.windows

    def state_at(self, n: int) -> lib.StatePart | None:
        """Return the state after n tokens; None where there is none."""
        at = bisect_left(self.states, n, key=lambda point: point.n)
        return self.states[at].state if self.has_state_at(n, at) else None

    def has_state_at(self, n: int, at: int | None = None) -> bool:
        """Return whether there is a state after n tokens."""
        at = bisect_left(self.states, n, key=lambda point: point.n) if at is None else at
        return at < len(self.states) and self.states[at].n == n

    def add_state(self, n: int, state: lib.StatePart) -> None:
        """Keep one more state; one at the same place is replaced."""
        at = bisect_left(self.states, n, key=lambda point: point.n)
        self.states[at : at + self.has_state_at(n, at)] = [Checkpoint(n, state)]

    def covered(self) -> list[Range]:
        """Return the tokens whose window cells are kept, in order."""
        return union((chunk.first, chunk.end) for chunk in self.windows)

    def add_window(self, chunk: WindowChunk) -> None:
        """Keep window cells of tokens that have none yet."""
        at = bisect_right(self.windows, chunk.first, key=lambda other: other.first)
        self.windows.insert(at, chunk)

    def window_chunks(self, begin: int, end: int) -> list[WindowChunk]:
        """Return the window cells that are kept of the tokens of ``[begin, end)``, in order."""
        return [one for one in self.windows if one.first < end and one.end > begin]

    def up_to(self, n: int) -> Checkpoints:
        """Return those of the first n tokens, for a fork."""
        found = Checkpoints([point for point in self.states if point.n <= n], self.windows)
        found._cut_windows(n)
        return found

    def drop_after(self, n: int) -> None:
        """Forget those that lie beyond n tokens."""
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
        """Forget one, which a fork may share."""
        self.states = [other for other in self.states if other is not one]
        # Forks have the same cells, perhaps of fewer tokens.
        if isinstance(one, WindowChunk):
            self.windows = [other for other in self.windows if other.cells is not one.cells]

    def gaps(self) -> Iterator[tuple[int, Checkpoint]]:
        """Yield each state but the last with the tokens that it saves."""
        before = 0
        for point in self.states[:-1]:
            yield point.n - before, point
            before = point.n
