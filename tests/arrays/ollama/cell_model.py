"""A reference for Ollama's causal caches: a plain list of cells, without arrays.

Every cell knows its token, so that a test sees whether data and metadata moved together.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

INF = 2**31 - 1


class Full(Exception):
    """No room for the batch."""


class Refused(Exception):
    """The removal cannot be done."""


class Shared(Exception):
    """The removal would move shared cells."""


@dataclass
class Cell:
    pos: int = 0
    seqs: set[int] = field(default_factory=set)
    token: int = -1


class CellModel:
    """The behaviour, cell by cell."""

    def __init__(self, window: int = 0, memory: int = 0, chunk: int = 0) -> None:
        self.window, self.memory, self.chunk = window or INF, memory or window or INF, chunk

    def init(
        self, max_sequences: int, capacity: int, max_batch: int, pad: int = 1, mask_pad: int = 1
    ) -> None:
        if self.memory != INF and max_sequences > 1:
            self.memory = max(self.memory, self.window + 1)
        if self.memory >= capacity:
            self.memory = INF
        if self.memory < self.window:
            raise Refused("memory below window")
        sliding = self.memory != INF
        size = max_sequences * (self.memory if sliding else capacity) + max_batch * sliding
        self.cells = [Cell() for _ in range(-(-size // pad) * pad)]
        self.max_batch, self.pad, self.mask_pad = max_batch, pad, mask_pad
        # Positions that the window dropped, per sequence; the tokens there are lost.
        self.dropped: dict[int, set[int]] = {}
        self.defragmented = False

    @property
    def sliding(self) -> bool:
        return self.memory != INF

    def of(self, seq: int) -> list[Cell]:
        return [cell for cell in self.cells if seq in cell.seqs]

    def last(self, seq: int) -> int:
        return max((cell.pos for cell in self.of(seq)), default=-1)

    def start_forward(self, positions: list[int], seqs: list[int], tokens: list[int]) -> None:
        before = copy.deepcopy((self.cells, self.dropped))
        self.batch = list(zip(positions, seqs, strict=True))
        self._slide()
        if sum(not cell.seqs for cell in self.cells) < len(positions):
            self.cells, self.dropped = before
            raise Full
        start = self._block(len(positions))
        if start is None:
            self._defragment()
            start = self._block(len(positions))
            assert start is not None
        for i, (pos, seq) in enumerate(self.batch):
            self.cells[start + i] = Cell(pos, {seq}, tokens[i])
        lowest: dict[int, int] = {}
        for pos, seq in self.batch:
            lowest[seq] = min(pos, lowest.get(seq, pos))
        used = [
            i
            for i, cell in enumerate(self.cells)
            if any(
                seq in cell.seqs and (not self.sliding or cell.pos >= low - self.window)
                for seq, low in lowest.items()
            )
        ]
        self.first = used[0] // self.pad * self.pad
        self.length = -(-(used[-1] + 1) // self.pad) * self.pad - self.first

    def _slide(self) -> None:
        if not self.sliding:
            return
        for seq in set().union(*(cell.seqs for cell in self.cells)):
            here = [pos for pos, other in self.batch if other == seq]
            lowest = min(here) if here else self.last(seq) + 1
            for cell in self.of(seq):
                if cell.pos < lowest - self.memory:
                    cell.seqs.remove(seq)
                    self.dropped.setdefault(seq, set()).add(cell.pos)

    def _block(self, count: int) -> int | None:
        run = 0
        for i, cell in enumerate(self.cells):
            run = 0 if cell.seqs else run + 1
            if run == count:
                return i + 1 - count
        return None

    def _defragment(self) -> None:
        # Which cell goes where does not matter, only that no hole is left in front.
        self.cells.sort(key=lambda cell: not cell.seqs)
        self.defragmented = True

    def mask(self, except_: tuple[int, ...] = ()) -> NDArray[np.bool_]:
        """Return which cells of the current range each row sees, padding rows included."""
        rows = -(-len(self.batch) // self.mask_pad) * self.mask_pad
        seen = np.zeros((rows, self.length), bool)
        for i, (pos, seq) in enumerate(self.batch):
            for j, cell in enumerate(self.cells[self.first : self.first + self.length]):
                seen[i, j] = (
                    seq in cell.seqs
                    and (cell.pos <= pos or i in except_)
                    and not (self.chunk and cell.pos < pos - pos % self.chunk)
                    and cell.pos >= pos - self.window
                )
        return seen

    def tokens_seen(self, except_: tuple[int, ...] = ()) -> list[set[tuple[int, int]]]:
        """Return the (token, position) pairs that each row sees."""
        cells = self.cells[self.first : self.first + self.length]
        return [
            {(cell.token, cell.pos) for cell, see in zip(cells, row, strict=True) if see}
            for row in self.mask(except_)
        ]

    def copy_prefix(self, src: int, dst: int, n: int) -> None:
        for cell in self.cells:
            if src != dst:
                cell.seqs.discard(dst)
                if src in cell.seqs and cell.pos < n:
                    cell.seqs.add(dst)
            elif cell.pos >= n:
                cell.seqs.discard(dst)
        self.dropped[dst] = {pos for pos in self.dropped.get(src, ()) if pos < n}
        if not self.of(dst):
            self.dropped.pop(dst)

    def can_resume(self, seq: int, pos: int) -> bool:
        if not self.sliding:
            return True
        held = [cell.pos for cell in self.of(seq)]
        return bool(held) and max(0, pos - self.window) >= min(held) and pos <= max(held) + 1

    def is_broken(self, seq: int) -> bool:
        """Return whether the window of the next token reaches a dropped position."""
        return max(self.dropped.get(seq, ()), default=-INF) >= self.last(seq) + 1 - self.window

    def remove(self, seq: int, begin: int, end: int | None, can_shift: bool = True) -> int:
        """Remove or raise; return the shift of later cells, 0 for none."""
        later = [cell for cell in self.of(seq) if end is not None and cell.pos >= end]
        offset = begin - end if end is not None and later else 0
        if offset:
            if any(cell.seqs != {seq} for cell in later):
                raise Shared
            if not can_shift:
                raise Refused("no shift function")
            window = max(cell.pos for cell in later) + offset + 1 - self.window
            assert end is not None
            if any(
                (pos < begin and pos >= window) or (pos >= end and pos + offset >= window)
                for pos in self.dropped.get(seq, ())
            ):
                raise Refused("the window would cover dropped tokens")
        limit = INF if end is None else end
        for cell in self.of(seq):
            if begin <= cell.pos < limit:
                cell.seqs.remove(seq)
        for cell in later:
            cell.pos += offset
        lost = self.dropped.get(seq, set())
        self.dropped[seq] = {p for p in lost if p < begin} | {
            p + offset for p in lost if p >= limit
        }
        if not self.of(seq):
            self.dropped.pop(seq)
        return offset

    def shift_calls(self, seq: int, begin: int, offset: int) -> list[list[int]]:
        """Return the shifts of a removal that was made: by chunks, their ends trimmed."""
        where = [i for i, cell in enumerate(self.cells) if seq in cell.seqs]
        calls = []
        for start in range(where[0], where[-1] + 1, self.max_batch):
            shifts = [
                offset if seq in cell.seqs and cell.pos >= begin else 0
                for cell in self.cells[start : min(start + self.max_batch, where[-1] + 1)]
            ]
            moved = [i for i, shift in enumerate(shifts) if shift]
            if moved:
                calls.append(shifts[moved[0] : moved[-1] + 1])
        return calls
