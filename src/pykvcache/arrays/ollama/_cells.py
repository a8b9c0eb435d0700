"""Which position and which sequences each cell of a cache holds, as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.ollama._batch import Batch

__all__ = ["Before", "CellTable", "Cut", "Write", "commit"]

#: ``array[index] = value``, with nothing left to compute.
Write: TypeAlias = tuple[NDArray[Any], Any, Any]

_EXTENTS = ("lo", "hi", "first", "last", "dropped")

# A row of the membership matrix that no sequence ever owns: what unknown sequences hold.
_NOBODY = 0
# `first` of a sequence without cells: above every position.
_NONE = np.int64(2**62)


class Cut(NamedTuple):
    """Positions ``[begin, end)`` of a sequence, as boolean arrays ``(n_cells,)``.

    Attributes
    ----------
    row : int
        The sequence.
    gone, later, kept : ndarray of bool
        Its cells in the range, after it, and outside it.
    """

    row: int
    begin: int
    end: int
    gone: NDArray[np.bool_]
    later: NDArray[np.bool_]
    kept: NDArray[np.bool_]


class Before(NamedTuple):
    """What a batch is about to change in a table.

    Attributes
    ----------
    ids : list of int
        The sequences of the batch.
    slot : slice
        The cells that it gets.
    losing, expired : ndarray
        What the sliding window takes; see `CellTable.expired`.
    pos : ndarray
        Of the cells in `slot`.
    refs : ndarray or None
        Of all cells; None if the window takes none.
    rows, extents : ndarray, list of ndarray
        Sequences, and their `lo`, `hi`, `first`, `last` and `dropped`.
    """

    ids: list[int]
    slot: slice
    losing: NDArray[np.intp]
    expired: NDArray[np.bool_]
    pos: NDArray[np.int32]
    refs: NDArray[np.int32] | None
    rows: NDArray[np.intp]
    extents: list[NDArray[np.int64]]


def commit(writes: list[Write]) -> None:
    """Write all of it. A Ctrl-C in between is raised once all is written."""
    try:
        for array, index, value in writes:
            array[index] = value
    except BaseException:
        # From the beginning: to write the same again changes nothing, half of it would be wrong.
        for array, index, value in writes:
            array[index] = value
        raise


class CellTable:
    """Metadata of the cells, one column each, and of the sequences, one row each.

    Sequence ids are mapped to rows of a boolean matrix, so that they may be any number and
    that every operation is a few NumPy calls however many tokens there are.

    Attributes
    ----------
    pos : ndarray of int32, shape (n_cells,)
        Position of the token in the cell; meaningless in a free cell.
    refs : ndarray of int32, shape (n_cells,)
        Number of sequences that share the cell; 0 in a free cell.
    member : ndarray of bool, shape (n_rows, n_cells)
        Whether the sequence of that row has the cell.
    lo, hi : ndarray of int64, shape (n_rows,)
        First and last cell of the sequence.
    first, last : ndarray of int64, shape (n_rows,)
        Lowest and highest position of the sequence; `last` is -1 without cells.
    dropped : ndarray of int64, shape (n_rows,)
        The sequence had tokens below this position which the sliding window gave up.
    """

    def __init__(self, n_cells: int) -> None:
        self.pos = np.zeros(n_cells, np.int32)
        self.refs = np.zeros(n_cells, np.int32)
        self.member = np.zeros((1, n_cells), np.bool_)
        self.lo = np.array([n_cells], np.int64)
        self.hi = np.array([-1], np.int64)
        self.first = np.array([_NONE], np.int64)
        self.last = np.array([-1], np.int64)
        self.dropped = np.zeros(1, np.int64)
        self._row_of: dict[int, int] = {}
        self._unused: list[int] = []

    @property
    def size(self) -> int:
        """Number of cells."""
        return self.refs.size

    @property
    def in_use(self) -> int:
        """Number of cells that some sequence has."""
        return int(np.count_nonzero(self.refs))

    def row(self, seq: int) -> int:
        """Return the row of a sequence, one without cells if it is unknown."""
        return self._row_of.get(seq, _NOBODY)

    def rows(self, ids: list[int]) -> NDArray[np.intp]:
        """Return the rows of several sequences."""
        return np.array([self._row_of.get(seq, _NOBODY) for seq in ids], np.intp)

    def copy(self) -> CellTable:
        """Return an independent table of the same contents."""
        other = CellTable.__new__(CellTable)
        for name in ("pos", "refs", "member", *_EXTENTS):
            setattr(other, name, getattr(self, name).copy())
        other._row_of, other._unused = self._row_of.copy(), self._unused.copy()
        return other

    def own_rows(self, ids: list[int]) -> NDArray[np.intp]:
        """Return the rows of several sequences, new ones for those that have none."""
        return np.array([self._own_row(seq) for seq in ids], np.intp)

    def before(
        self, batch: Batch, start: int, losing: NDArray[np.intp], expired: NDArray[np.bool_]
    ) -> Before:
        """Return what `restore` needs once the window has moved and the batch has its cells."""
        slot = slice(start, start + len(batch))
        rows = self.rows(batch.ids)
        if losing.size:
            rows = np.union1d(rows, losing)
        return Before(
            batch.ids,
            slot,
            losing,
            expired,
            self.pos[slot].copy(),
            self.refs.copy() if losing.size else None,
            rows,
            [getattr(self, name)[rows] for name in _EXTENTS],
        )

    def restore(self, before: Before) -> None:
        """Take back what was changed since, all of it or a part; allocates next to nothing."""
        self.member[:, before.slot] = False
        for row, cells in zip(before.losing, before.expired, strict=True):
            self.member[row] |= cells
        if before.refs is None:
            self.refs[before.slot] = 0
        else:
            self.refs[:] = before.refs
        self.pos[before.slot] = before.pos
        for name, extents in zip(_EXTENTS, before.extents, strict=True):
            getattr(self, name)[before.rows] = extents

    def claim(self, start: int, batch: Batch) -> None:
        """Write a batch into the free cells that begin at `start`."""
        end = start + len(batch)
        rows = self.own_rows(batch.ids)[batch.which]
        cells = np.arange(start, end)
        self.pos[start:end] = batch.positions
        self.refs[start:end] = 1
        self.member[rows, cells] = True
        np.minimum.at(self.lo, rows, cells)
        np.maximum.at(self.hi, rows, cells)
        np.minimum.at(self.first, rows, batch.positions)
        np.maximum.at(self.last, rows, batch.positions)

    def expired(
        self, rows: NDArray[np.intp], lowest: NDArray[np.int64], memory: int
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Find what a sliding window of `memory` tokens gives up before a batch.

        `rows` and `lowest` are the sequences of the batch and their lowest positions in it;
        every other sequence is about to store the position after its last.

        Returns
        -------
        rows : ndarray of intp, shape (n,)
            Sequences that lose cells.
        cells : ndarray of bool, shape (n, n_cells)
            The cells that each of them loses.
        """
        limit = self.last + (1 - memory)
        limit[rows] = lowest - memory
        losing = np.flatnonzero(self.first < limit)
        # int32 like `pos`, which halves the time of the comparison.
        limits = limit[losing, None].astype(np.int32)
        return losing, self.member[losing] & (self.pos < limits)

    def expire(self, rows: NDArray[np.intp], cells: NDArray[np.bool_]) -> None:
        """Drop what ``expired`` found, and remember up to where tokens are missing."""
        if rows.size:
            newest = np.where(cells, self.pos, -1).max(1)
            self.dropped[rows] = np.maximum(self.dropped[rows], newest + 1)
            self.drop(rows, cells)

    def drop(self, rows: NDArray[np.intp], cells: NDArray[np.bool_]) -> None:
        """Take cells ``(len(rows), n_cells)`` from sequences; what nobody has is free."""
        self.member[rows] &= ~cells
        self.refs -= cells.sum(0, dtype=np.int32)
        self.recount(rows)

    def cut(self, seq: int, begin: int, end: int) -> Cut | None:
        """Return what ``[begin, end)`` takes out of a sequence, None if it is nothing."""
        row = self.row(seq)
        if self.last[row] < begin or begin == end:
            return None
        member = self.member[row]
        later = member & (self.pos >= end)
        gone = member & (self.pos >= begin) & ~later
        return Cut(row, begin, end, gone, later, member & ~gone)

    def dropped_after(self, cut: Cut) -> int:
        """Return what `dropped` of the sequence is once the cut is made."""
        dropped = int(self.dropped[cut.row])
        return dropped - (cut.end - cut.begin) if dropped > cut.end else min(dropped, cut.begin)

    def taken(self, cut: Cut) -> list[Write]:
        """Return what takes a cut out of its sequence and closes the gap."""
        row, later = cut.row, np.flatnonzero(cut.later)
        pos = self.pos[later] - np.int32(cut.end - cut.begin)
        moved = self.pos.copy()
        moved[later] = pos
        gone = np.flatnonzero(cut.gone)
        return [
            (self.dropped, row, self.dropped_after(cut)),
            (self.pos, later, pos),
            (self.refs, gone, self.refs[gone] - np.int32(1)),
            *self._writes(row, cut.kept, moved),
        ]

    def shared(self, src_seq: int, dst_seq: int, n: int) -> list[Write]:
        """Return what makes `dst_seq` the tokens of `src_seq` below position `n`, and no others."""
        src = self.row(src_seq)
        cells = self.member[src] & (self.pos < n)
        refs = self.refs + cells - self.member[self.row(dst_seq)]
        dropped = min(int(self.dropped[src]), n)
        # Last, as a table that has no row to spare grows.
        dst = self._own_row(dst_seq) if cells.any() else self.row(dst_seq)
        if dst == _NOBODY:
            return []
        writes: list[Write] = [(self.refs, slice(None), refs), (self.dropped, dst, dropped)]
        return writes + self._writes(dst, cells, self.pos)

    def _writes(self, row: int, member: NDArray[np.bool_], pos: NDArray[np.int32]) -> list[Write]:
        """Return what gives a sequence the cells `member`, and the extents that they have."""
        cells = np.flatnonzero(member)
        extents: tuple[Any, ...] = (self.size, -1, _NONE, -1)
        if cells.size:
            own = pos[cells]
            extents = cells[0], cells[-1], own.min(), own.max()
        names = ("lo", "hi", "first", "last")
        writes: list[Write] = [
            (getattr(self, name), row, n) for name, n in zip(names, extents, strict=True)
        ]
        writes.append((self.member, row, member))
        return writes

    def forget(self, seq: int) -> None:
        """Give back the row of a sequence that has no cells left."""
        row = self._row_of.get(seq)
        if row is not None and self.last[row] < 0:
            del self._row_of[seq]
            self.dropped[row] = 0
            self._unused.append(row)

    def compact(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Fill the holes at the front with cells from the end.

        Holes are filled in ascending order, each with the last cell in use. Where neighbours
        go to neighbours, such a run moves as one block and so keeps its order.

        Returns
        -------
        dst, src : ndarray of intp
            The moves, for the data to follow: ``data[dst] = data[src]``.
        """
        in_use = self.in_use
        dst = np.flatnonzero(self.refs[:in_use] == 0)
        src = in_use + np.flatnonzero(self.refs[in_use:])[::-1]
        breaks = (np.diff(dst) != 1) | (np.diff(src) != -1)
        begins = np.concatenate(([0], np.flatnonzero(breaks) + 1, [dst.size]))
        # Reverse `src` within each run: index i of the run [b, e) becomes b + e - 1 - i.
        flip = np.repeat(begins[:-1] + begins[1:] - 1, np.diff(begins))
        src = src[flip - np.arange(dst.size)]
        for array in (self.pos, self.refs):
            array[dst] = array[src]
        self.member[:, dst] = self.member[:, src]
        self.refs[in_use:] = 0
        self.member[:, in_use:] = False
        self.recount(np.arange(self.lo.size))
        return dst, src

    def recount(self, rows: NDArray[Any]) -> None:
        """Bring the extents of sequences in line with their cells."""
        member = self.member[rows]
        last = np.where(member, self.pos, -1).max(1)
        empty = last < 0
        self.lo[rows] = np.where(empty, self.size, member.argmax(1))
        self.hi[rows] = np.where(empty, -1, self.size - 1 - member[:, ::-1].argmax(1))
        self.first[rows] = np.where(
            empty, _NONE, np.where(member, self.pos, np.iinfo(np.int32).max).min(1)
        )
        self.last[rows] = last

    def _own_row(self, seq: int) -> int:
        row = self._row_of.get(seq)
        if row is None:
            if not self._unused:
                self._grow()
            row = self._row_of[seq] = self._unused.pop()
        return row

    def _grow(self) -> None:
        count = self.lo.size
        old: list[NDArray[Any]] = [getattr(self, name) for name in ("member", *_EXTENTS)]
        # A new row is as empty as the row that nobody owns. All are made before one is used.
        grown = [np.concatenate((array, np.repeat(array[:1], count, 0))) for array in old]
        self.member, self.lo, self.hi, self.first, self.last, self.dropped = grown
        self._unused.extend(range(2 * count - 1, count - 1, -1))
