"""Checkpoints: rollback points for memories that cannot be rewound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_int
from pykvcache._native import lib
from pykvcache._ranges import Range, union

__all__ = [
    "DEFAULT_POLICY",
    "CheckpointPolicy",
    "Checkpoints",
    "Saved",
    "WindowChunk",
    "fit",
    "total_bytes",
]

#: What forks share: a recurrent state, or the bytes of window cells.
Saved = lib.StatePart | npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class WindowChunk:
    """Serialized window cells of `n` consecutive tokens from `first` on; shared by forks.

    The leading `used` cells still belong to the sequence's tokens.
    """

    first: int
    n: int
    used: int
    cells: npt.NDArray[np.uint8]

    @property
    def end(self) -> int:
        """One past the last token in use."""
        return self.first + self.used


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
        return 64

    def next_stop(self, begin: int, end: int) -> int:
        """Return where to pause evaluating ``[begin, end)`` for a checkpoint, or ``end``."""
        if not self.spacing or not self.max_bytes:
            return end
        return min(end, (begin // self.spacing + 1) * self.spacing)


DEFAULT_POLICY = CheckpointPolicy()


@dataclass(slots=True, eq=False)
class Checkpoints:
    """The checkpoints of one sequence: states, window cells, and one row of logits."""

    #: Recurrent states by the number of tokens before them, in order.
    states: dict[int, lib.StatePart] = field(default_factory=dict)
    #: In order; no token is in two chunks.
    windows: list[WindowChunk] = field(default_factory=list)
    #: Number of tokens, and the logits after them: a cache keeps those of a prompt's end.
    row: tuple[int, npt.NDArray[np.float32]] | None = None

    def __iter__(self) -> Iterator[Saved]:
        yield from self.states.values()
        yield from (chunk.cells for chunk in self.windows)

    def add_state(self, n: int, state: lib.StatePart) -> None:
        """Add the state after n tokens, or replace it."""
        self.states = dict(sorted((self.states | {n: state}).items()))

    def covered(self) -> list[Range]:
        """Return the ranges of tokens with saved window cells, in order."""
        return union((chunk.first, chunk.end) for chunk in self.windows)

    def up_to(self, n: int) -> Checkpoints:
        """Return the checkpoints of the first n tokens, for a fork."""
        found = Checkpoints(self.states, self.windows)
        found.drop_after(n)
        return found

    def drop_after(self, n: int) -> None:
        """Drop the checkpoints beyond n tokens."""
        self.states = {at: state for at, state in self.states.items() if at <= n}
        self.windows = [
            one if one.end <= n else replace(one, used=n - one.first)
            for one in self.windows
            if one.first < n
        ]
        if self.row is not None and self.row[0] > n:
            self.row = None

    def remove(self, saved: Saved) -> None:
        """Drop a checkpoint, which forks may share; of window cells they may use fewer."""
        self.states = {at: state for at, state in self.states.items() if state is not saved}
        self.windows = [chunk for chunk in self.windows if chunk.cells is not saved]

    def gaps(self) -> Iterator[tuple[int, Saved]]:
        """Yield each state but the last, with the number of tokens it saves."""
        before = 0
        for n in list(self.states)[:-1]:
            yield n - before, self.states[n]
            before = n


def total_bytes(every: Iterable[Checkpoints]) -> int:
    """Return the bytes of the checkpoints of several sequences; shared ones count once."""
    return sum({id(saved): saved.nbytes for one in every for saved in one}.values())


def fit(every: list[Checkpoints], max_bytes: int, n_swa: int) -> None:
    """Drop checkpoints of several sequences until they fit, cheapest to recompute first."""
    while total_bytes(every) > max_bytes:
        victim = _cheapest(every, n_swa)
        for one in every:
            one.remove(victim)


def _cheapest(every: list[Checkpoints], n_swa: int) -> Saved:
    """Return the checkpoint to drop first; there is one.

    Order: window cells before the last two windows of the longest sequence, states that
    precede another state, window cells before its last window, then any other.
    """
    longest = max((one.windows for one in every), key=len, default=[])
    beyond = longest[-1].end - longest[0].end if longest else 0
    if longest and beyond >= 2 * n_swa:
        return longest[0].cells
    if found := [gap for one in every for gap in one.gaps()]:
        return min(found, key=lambda gap: gap[0])[1]
    if longest and beyond >= n_swa:
        return longest[0].cells
    return next(saved for one in every for saved in one)
