"""Reference of the memory operations in plain Python: the cells of each sequence.

Each method says which outcomes are right, and what a call that succeeds does. It knows nothing
of llama.cpp, and only one thing that a context decides by itself: where a window cache has
dropped cells of a sequence, it may refuse what would need them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from memory.kit import Case

END = 2**31 - 1
DONE, REFUSED, FULL = "done", "False", "NoKvCacheSlot"
UNSUPPORTED, POSITION, BROKEN = "UnsupportedOperation", "PositionError", "DecodeError"
INVALID = "InvalidBatch"


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


def in_turn(effects: list[Callable[[], None]]) -> None:
    for effect in effects:
        effect()


@dataclass(frozen=True)
class Saved:
    """A sequence's cells at the time of a save."""

    positions: list[int]
    tokens: list[int] | None
    ledger: Any


class Reference:
    """Sequences as lists of cells, and the sharing of recurrent states."""

    def __init__(self, case: Case, n_seq_max: int, n_cells: int) -> None:
        self.case, self.info = case, case.info
        self.unified = case.unified
        self.swa_full = case.swa_full
        self.forked = False
        self.n_cells = n_cells
        self.cells: dict[int, list[Cell]] = {seq: [] for seq in range(n_seq_max)}
        self.state = dict.fromkeys(range(n_seq_max), -1)
        # Tokens whose fresh run gives the same logits; None after what has no such run.
        self.tokens: dict[int, list[int] | None] = {seq: [] for seq in range(n_seq_max)}
        self._keys = itertools.count()
        self.whole_only = not self.info.can_remove_partial
        # Sequences of which the window has dropped cells.
        self.dropped: set[int] = set()

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
        if not self.info.has_memory:
            return verdict(nothing, DONE)

        def effect() -> None:
            first = max(self.positions(seq), default=-1) + 1
            self.cells[seq] += [Cell(first + i, next(self._keys)) for i in range(len(tokens))]
            self.state[seq] = next(self._keys)
            known = self.tokens[seq]
            if known is not None:
                known += tokens

        used = self.n_used() if self.unified else len(self.cells[seq])
        if self.info.memory == "recurrent" or used + len(tokens) <= self.n_cells:
            return verdict(effect, DONE, *self._window_may_refuse())
        return verdict(effect, FULL, *self._window_may_refuse())

    def _window_may_refuse(self) -> tuple[str, ...]:
        """Small windows do not reuse the cells of forks; sequences that lost cells are broken."""
        if self.swa_full or not self.info.n_swa:
            return ()
        keys = [cell.key for cells in self.cells.values() for cell in cells]
        self.forked = self.forked or len(keys) > len(set(keys))
        return (FULL, BROKEN) if self.forked else ()

    def decode_batch(self, words: dict[int, list[int]]) -> Verdict:
        """Decode tokens of several sequences at once."""
        if not words:
            return verdict(nothing, INVALID)
        verdicts = [self.decode(seq, tokens) for seq, tokens in words.items()]
        allowed = frozenset[str]().union(*(v.allowed for v in verdicts))
        if self.info.has_memory and self.info.memory != "recurrent":
            fits = allowed == {DONE}
            if self.unified:
                fits = self.n_used() + sum(map(len, words.values())) <= self.n_cells
            allowed = frozenset({DONE if fits else FULL, *self._window_may_refuse()})
        return Verdict(allowed, lambda: in_turn([v.effect for v in verdicts]))

    def decode_coupled(self, seqs: list[int], tokens: list[int]) -> Verdict:
        """Decode tokens that belong to all of these sequences."""
        first, *others = seqs

        def effect() -> None:
            one.effect()
            new, known = self.cells[first][-len(tokens) :], self.tokens[first]
            for seq in others:
                self.cells[seq] += new
                self.tokens[seq] = None if known is None else [*known]

        keys = [{cell.key for cell in self.cells[seq]} for seq in seqs]
        starts = {max(self.positions(seq), default=-1) for seq in seqs}
        reasons = [INVALID] if len(starts) > 1 or any(keys[0] != key for key in keys) else []
        if not self.unified or not self.info.can_couple:
            reasons.append(UNSUPPORTED)
        if reasons:
            return verdict(nothing, *reasons)
        one = self.decode(first, tokens)
        return Verdict(one.allowed, effect)

    def copy(self, src: int, dst: int, p0: int, p1: int) -> Verdict:
        if p0 > p1:
            return verdict(nothing, POSITION)
        if not self.info.has_memory:
            return verdict(nothing, UNSUPPORTED)

        def effect() -> None:
            chosen = self.within(src, p0, p1)
            known, whole = self.tokens[src], self.covers(src, p0, p1)
            if not (self.unified or self.info.memory == "recurrent"):
                chosen = [Cell(cell.pos, next(self._keys)) for cell in chosen]
            prefix = p0 <= min(self.positions(src), default=0)
            self.cells[dst] = chosen
            self.state[dst] = self.state[src]
            if known is not None and not whole:
                known = known[: len(chosen)] if prefix else None
            self.tokens[dst] = None if known is None else [*known]
            self._apply_pending(dst)

        if src == dst:
            return verdict(nothing, DONE)
        if not self.within(src, p0, p1):
            return verdict(self.remove([dst], 0, END).effect, DONE)
        if self.covers(src, p0, p1):
            return verdict(effect, DONE)
        if self.whole_only or not self.unified:
            return verdict(nothing, UNSUPPORTED)
        return verdict(effect, DONE, *([UNSUPPORTED] if src in self.dropped else []))

    def remove(self, seqs: list[int], p0: int, p1: int) -> Verdict:
        if p0 > p1:
            return verdict(nothing, POSITION)
        if not self.info.has_memory:
            return verdict(nothing, UNSUPPORTED)

        def effect() -> None:
            for seq in seqs:
                gone = self.within(seq, p0, p1)
                tail = not gone or max(gone).pos == max(self.positions(seq))
                kept = [cell for cell in self.cells[seq] if not p0 <= cell.pos < p1]
                known = self.tokens[seq]
                if gone:
                    self.tokens[seq] = known[: len(kept)] if known is not None and tail else None
                self.cells[seq] = kept
                self._apply_pending(seq)

        partial = [s for s in seqs if self.within(s, p0, p1) and not self.covers(s, p0, p1)]
        if partial and self.whole_only:
            return verdict(nothing, REFUSED)
        refused = not self.dropped.isdisjoint(partial)
        return verdict(effect, DONE, *([REFUSED] if refused else []))

    def remove_and_close(self, seq: int, begin: int, end: int) -> Verdict:
        """Remove a range and move what follows down, or nothing of both."""
        if begin > end:
            return verdict(nothing, POSITION)
        rest = self.within(seq, end, END)
        removal = self.remove([seq], begin, end)
        allowed = {UNSUPPORTED if o == REFUSED else o for o in removal.allowed}
        effects = [removal.effect]
        if rest and begin < end:
            shift = self.without(seq, begin, end).add(seq, end, END, begin - end)
            if DONE not in shift.allowed:
                allowed.discard(DONE)
            allowed |= shift.allowed - {DONE}
            if self.whole_only:
                # Also where it could be done: nothing is removed and all of it moves.
                allowed.add(UNSUPPORTED)
            effects.append(lambda: self.add(seq, end, END, begin - end).effect())
        return Verdict(frozenset(allowed), lambda: in_turn(effects))

    def resume(self, seq: int, pos: int) -> set[bool]:
        """Return the allowed answers of `can_resume`."""
        held = self.positions(seq)
        if pos == 0:
            return {True}
        if pos - 1 not in held:
            return {False}  # a decode there would leave a gap
        if self.whole_only:
            return {pos == held[-1] + 1}
        return {True, False} if seq in self.dropped else {True}

    def keep(self, seq: int) -> Verdict:
        return self.remove([other for other in self.cells if other != seq], 0, END)

    def clear(self) -> Verdict:
        if not self.info.has_memory:
            return verdict(nothing, DONE)
        return self.remove(list(self.cells), 0, END)

    def add(self, seq: int, p0: int, p1: int, delta: int) -> Verdict:
        return self._move(seq, p0, p1, lambda pos: pos + delta, delta == 0)

    def div(self, seq: int, p0: int, p1: int, d: int) -> Verdict:
        return self._move(seq, p0, p1, lambda pos: pos // d, d == 1)

    def _move(
        self, seq: int, p0: int, p1: int, target: Callable[[int], int], idle: bool
    ) -> Verdict:
        if p0 > p1:
            return verdict(nothing, POSITION)
        if self.info.has_mrope or not self.info.has_memory:
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
            return verdict(nothing, *reasons, *([UNSUPPORTED] if seq in self.dropped else []))
        return verdict(effect, DONE, *([UNSUPPORTED] if seq in self.dropped else []))

    # Out and in --------------------------------------------------------------------------

    def read(self) -> Verdict:
        """Keys, values and states as arrays."""
        if not self.info.has_memory or self.info.bounded:
            return verdict(nothing, UNSUPPORTED)
        broken = self._window_may_refuse()
        return verdict(nothing, DONE, *([UNSUPPORTED] if broken else []))

    def save(self, seq: int, ledger: Any) -> Saved:
        known = self.tokens[seq]
        return Saved(self.positions(seq), None if known is None else [*known], ledger)

    def load(self, seq: int, saved: Saved) -> Verdict:
        """Put arrays into a sequence; they know where a recurrent state began."""
        if not self.info.has_arrays:
            return verdict(nothing, UNSUPPORTED)
        return self.put(seq, saved, saved.positions)

    def _window_may_be_full(self) -> tuple[str, ...]:
        return (FULL,) if self.info.n_swa and not self.swa_full else ()

    def take(self) -> Verdict:
        """Copy a sequence, or everything, as bytes."""
        if not self.case.has_states:
            return verdict(nothing, UNSUPPORTED)
        # What a window has broken is not given out.
        broken = self._window_may_refuse()
        return verdict(nothing, DONE, *([UNSUPPORTED] if broken else []))

    def put(self, seq: int, saved: Saved, positions: list[int] | None = None) -> Verdict:
        """Restore a sequence into new cells."""
        if positions is None:
            positions = saved.positions
            if self.info.memory == "recurrent" and positions:
                positions = [*range(positions[-1] + 1)]  # bytes do not know where it began

        def effect() -> None:
            self.cells[seq] = [Cell(pos, next(self._keys)) for pos in positions]
            self.state[seq] = next(self._keys)
            self.tokens[seq] = None if saved.tokens is None else [*saved.tokens]
            self._apply_pending(seq)

        if not self.case.has_states:
            return verdict(nothing, UNSUPPORTED)
        used = self.without(seq, 0, END).n_used() if self.unified else 0
        fits = self.info.memory == "recurrent" or used + len(saved.positions) <= self.n_cells
        return verdict(effect, DONE if fits else FULL, *self._window_may_be_full())

    def save_all(self) -> tuple[Any, ...]:
        tokens = {s: None if known is None else [*known] for s, known in self.tokens.items()}
        return {s: [*cells] for s, cells in self.cells.items()}, tokens, dict(self.state)

    def put_all(self, saved: tuple[Any, ...]) -> Verdict:
        def effect() -> None:
            cells, tokens, state = saved
            if self.info.memory == "recurrent":
                cells = {
                    s: [Cell(pos, next(self._keys)) for pos in range(held[-1].pos + 1)]
                    if held
                    else []
                    for s, held in cells.items()
                }
            self.cells = {s: [*held] for s, held in cells.items()}
            self.tokens = {s: None if known is None else [*known] for s, known in tokens.items()}
            self.state = dict(state)

        if not self.case.has_states:
            return verdict(nothing, UNSUPPORTED)
        return verdict(effect, DONE)

    def _apply_pending(self, seq: int) -> None:
        if not self.cells[seq]:
            self.tokens[seq] = []
            self.state[seq] = -1
