"""What the memory operations mean, in plain Python: which cells each sequence holds.

Each method says which outcomes are right, and what a call that succeeds does. It knows nothing
of llama.cpp, and only one thing that a context decides by itself: a window cache may refuse what
would need cells that it has dropped.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from memory.kit import Case

END = 2**31 - 1
DONE, REFUSED, FULL = "done", "False", "NoKvCacheSlot"
UNSUPPORTED, POSITION, BROKEN = "UnsupportedOperation", "PositionError", "DecodeError"


class Cell(NamedTuple):
    """One cell; two sequences share it if both hold its `key`."""

    pos: int
    key: int


@dataclass(frozen=True)
class Verdict:
    """The outcomes that are right, and what to do if the call succeeded."""

    allowed: frozenset[str]
    effect: Callable[[], None]


def nothing() -> None:
    """Leave everything as it is."""


def verdict(effect: Callable[[], None], *allowed: str) -> Verdict:
    return Verdict(frozenset(allowed), effect)


class Reference:
    """Sequences as lists of cells, and for a recurrent state, who shares it with whom."""

    def __init__(self, case: Case, n_seq_max: int, n_cells: int) -> None:
        self.info = case.info
        self.unified = case.unified
        self.n_cells = n_cells
        self.cells: dict[int, list[Cell]] = {seq: [] for seq in range(n_seq_max)}
        self.state = dict.fromkeys(range(n_seq_max), -1)
        # Tokens whose fresh run gives the same logits; None after what has no such run.
        self.tokens: dict[int, list[int] | None] = {seq: [] for seq in range(n_seq_max)}
        self._keys = itertools.count()
        self.whole_only = self.info.has_recurrent_state
        # Set while the window has dropped cells: what would need them may be refused.
        self.may_refuse = False

    # Questions ---------------------------------------------------------------------------

    def positions(self, seq: int) -> list[int]:
        """Sorted; a division makes several cells share one."""
        return sorted(cell.pos for cell in self.cells[seq])

    def n_used(self) -> int:
        """Number of cells that some sequence holds."""
        return len({cell.key for cells in self.cells.values() for cell in cells})

    def within(self, seq: int, p0: int, p1: int) -> list[Cell]:
        return [cell for cell in self.cells[seq] if p0 <= cell.pos < p1]

    def covers(self, seq: int, p0: int, p1: int) -> bool:
        return len(self.within(seq, p0, p1)) == len(self.cells[seq])

    def is_shared(self, seq: int, p0: int, p1: int) -> bool:
        keys = {cell.key for cell in self.within(seq, p0, p1)}
        others = [s for s in self.cells if s != seq and self.cells[s]]
        if self.info.memory != "recurrent" and any(
            not keys.isdisjoint(cell.key for cell in self.cells[s]) for s in others
        ):
            return True
        return self.whole_only and any(self.state[s] == self.state[seq] for s in others)

    def without(self, seq: int, p0: int, p1: int) -> Reference:
        """A copy from which the range was removed."""
        other = copy.copy(self)
        other.cells, other.tokens, other.state = (
            dict(self.cells),
            dict(self.tokens),
            dict(self.state),
        )
        other.cells[seq] = [cell for cell in self.cells[seq] if not p0 <= cell.pos < p1]
        return other

    # Operations --------------------------------------------------------------------------

    def decode(self, seq: int, tokens: list[int]) -> Verdict:
        def effect() -> None:
            first = max(self.positions(seq), default=-1) + 1
            self.cells[seq] += [Cell(first + i, next(self._keys)) for i in range(len(tokens))]
            self.state[seq] = next(self._keys)
            known = self.tokens[seq]
            if known is not None:
                known += tokens

        if self.info.n_swa:
            # Shared cells of a window are not reused; a sequence may be broken by an earlier one.
            return verdict(effect, DONE, FULL, BROKEN)
        if self.info.memory == "recurrent":
            return verdict(effect, DONE)
        used = self.n_used() if self.unified else len(self.cells[seq])
        return verdict(effect, DONE if used + len(tokens) <= self.n_cells else FULL)

    def copy(self, src: int, dst: int, p0: int, p1: int) -> Verdict:
        def effect() -> None:
            chosen = self.within(src, p0, p1)
            known = self.tokens[src]
            whole = len(chosen) == len(self.cells[src])
            if not (self.unified or self.info.memory == "recurrent"):
                chosen = [Cell(cell.pos, next(self._keys)) for cell in chosen]
            prefix = p0 <= min(self.positions(src), default=0)
            self.cells[dst] = chosen
            self.state[dst] = self.state[src]
            self.tokens[dst] = known[: len(chosen)] if known is not None and prefix else None
            self._settle(dst, whole=whole)

        if src == dst or p0 >= p1:
            return verdict(nothing, DONE)
        if self.covers(src, p0, p1):
            return verdict(effect, DONE)
        if self.whole_only or not self.unified:
            return verdict(nothing, UNSUPPORTED)
        return verdict(effect, DONE, *([UNSUPPORTED] if self.may_refuse else []))

    def remove(self, seqs: list[int], p0: int, p1: int) -> Verdict:
        def effect() -> None:
            for seq in seqs:
                gone = self.within(seq, p0, p1)
                tail = not gone or max(gone).pos == max(self.positions(seq))
                kept = [cell for cell in self.cells[seq] if cell not in gone]
                known = self.tokens[seq]
                if gone:
                    self.tokens[seq] = known[: len(kept)] if known is not None and tail else None
                self.cells[seq] = kept
                self._settle(seq)

        partial = [s for s in seqs if self.within(s, p0, p1) and not self.covers(s, p0, p1)]
        if partial and self.whole_only:
            return verdict(nothing, REFUSED)
        return verdict(effect, DONE, *([REFUSED] if partial and self.may_refuse else []))

    def keep(self, seq: int) -> Verdict:
        return self.remove([other for other in self.cells if other != seq], 0, END)

    def clear(self) -> Verdict:
        return self.remove(list(self.cells), 0, END)

    def add(self, seq: int, p0: int, p1: int, delta: int) -> Verdict:
        return self._move(seq, p0, p1, lambda pos: pos + delta, delta == 0)

    def div(self, seq: int, p0: int, p1: int, d: int) -> Verdict:
        return self._move(seq, p0, p1, lambda pos: pos // d, d == 1)

    def _move(
        self, seq: int, p0: int, p1: int, target: Callable[[int], int], idle: bool
    ) -> Verdict:
        if self.info.has_mrope:
            return verdict(nothing, UNSUPPORTED)
        moving = self.within(seq, p0, p1)
        if p0 >= p1 or not moving or idle:
            return verdict(nothing, DONE)

        def effect() -> None:
            whole = self.covers(seq, p0, p1)
            distances = {target(cell.pos) - cell.pos for cell in moving}
            self.cells[seq] = [
                Cell(target(cell.pos), cell.key) if p0 <= cell.pos < p1 else cell
                for cell in self.cells[seq]
            ]
            if self.info.memory != "recurrent" and not (whole and len(distances) == 1):
                self.tokens[seq] = None

        still = {cell.pos for cell in self.cells[seq] if not p0 <= cell.pos < p1}
        targets = {target(cell.pos) for cell in moving}
        reasons = []
        if not self.info.can_shift or (self.whole_only and not self.covers(seq, p0, p1)):
            reasons.append(UNSUPPORTED)
        if self.is_shared(seq, p0, p1):
            reasons.append(UNSUPPORTED)
        if min(targets) < 0 or max(targets) >= END or targets & still:
            reasons.append(POSITION)
        if reasons:
            # Where several apply, any of them is a right answer.
            return verdict(nothing, *reasons, *([UNSUPPORTED] if self.may_refuse else []))
        return verdict(effect, DONE, *([UNSUPPORTED] if self.may_refuse else []))

    def _settle(self, seq: int, whole: bool = True) -> None:
        if not self.cells[seq]:
            self.tokens[seq] = []
            self.state[seq] = -1
