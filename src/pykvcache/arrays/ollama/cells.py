"""Cell metadata: position and sequences of each cell, free cells, defragmenting; the mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.ollama.cache import UNLIMITED, Batch, CacheConfig
from pykvcache.errors import KvCacheFull, NotSupported, SharedCellsError

__all__ = ["CellTable", "Cut", "Room", "batch_mask"]

# Row of the membership matrix for unknown sequences, which have no cells.
_UNKNOWN = 0
# `first` of a sequence without cells.
_NONE = np.int64(2**62)


class Cut(NamedTuple):
    """Cells of a sequence within, after and outside positions ``[begin, end)``."""

    row: int
    begin: int
    end: int
    gone: NDArray[np.bool_]
    later: NDArray[np.bool_]
    kept: NDArray[np.bool_]


class Room(NamedTuple):
    """Room for a batch: its first cell, and the cells that the sliding window drops for it."""

    start: int | None  # None if the cells must be defragmented first
    losing: NDArray[np.intp]  # rows of the sequences that lose cells
    expired: NDArray[np.bool_]  # the cells of each, shape (losing.size, n_cells)


class CellTable:
    """Metadata of the cells, one column each, and of the sequences, one row each.

    Sequence ids, which may be any number, are mapped to rows of a boolean matrix, so that every
    operation is a few NumPy calls, whatever the number of tokens.

    Attributes
    ----------
    pos : ndarray of int32, shape (n_cells,)
        Position of the cell's token; undefined in a free cell.
    refs : ndarray of int32, shape (n_cells,)
        Number of sequences that share the cell; 0 in a free cell.
    member : ndarray of bool, shape (n_rows, n_cells)
        Whether the sequence of that row has the cell.
    lo, hi : ndarray of int64, shape (n_rows,)
        First and last cell of the sequence.
    first, last : ndarray of int64, shape (n_rows,)
        Lowest and highest position of the sequence; `last` is -1 without cells.
    dropped : ndarray of int64, shape (n_rows,)
        The sliding window has dropped tokens below this position.
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
        """Number of cells that belong to any sequence."""
        return int(np.count_nonzero(self.refs))

    def row(self, seq: int) -> int:
        """Return the row of a sequence; an unknown one has an empty row."""
        return self._row_of.get(seq, _UNKNOWN)

    def rows(self, ids: list[int]) -> NDArray[np.intp]:
        """Return the rows of several sequences."""
        return np.array([self._row_of.get(seq, _UNKNOWN) for seq in ids], np.intp)

    def find_room(self, batch: Batch, memory: int) -> Room:
        """Find room for a batch and a window of `memory` tokens, or raise `KvCacheFull`."""
        n, refs = len(batch), self.refs
        losing, expired = np.empty(0, np.intp), np.empty((0, self.size), np.bool_)
        if memory != UNLIMITED:
            # A sequence outside the batch continues at the position after its last.
            limit = self.last + (1 - memory)
            limit[self.rows(batch.ids)] = batch.lowest - memory
            losing = np.flatnonzero(self.first < limit)
            # int32 like `pos`, which halves the comparison's time.
            limits = limit[losing, None].astype(np.int32)
            expired = self.member[losing] & (self.pos < limits)
            refs = refs - expired.sum(0, dtype=np.int32)
        start = _first_block(refs, n)
        if start is None and np.count_nonzero(refs) > refs.size - n:
            message = f"could not find a kv cache slot (cache: {refs.size} batch: {n})"
            raise KvCacheFull(message, capacity=refs.size, batch=n)
        return Room(start, losing, expired)

    def expire(self, room: Room) -> None:
        """Drop the cells that leave the sliding window, and record what is missing."""
        rows, cells = room.losing, room.expired
        if rows.size:
            newest = np.where(cells, self.pos, -1).max(1)
            self.dropped[rows] = np.maximum(self.dropped[rows], newest + 1)
            self.member[rows] &= ~cells
            self.refs -= cells.sum(0, dtype=np.int32)
            self._recount(rows)

    def needed(self, batch: Batch, window: int, memory: int) -> tuple[int, int]:
        """Return the first and last cell to which the batch may attend, or ``size`` and -1."""
        rows = self.rows(batch.ids)
        if memory == UNLIMITED:
            return int(self.lo[rows].min()), int(self.hi[rows].max())
        oldest = (batch.lowest - window).astype(np.int32)
        near = np.flatnonzero((self.member[rows] & (self.pos >= oldest[:, None])).any(0))
        return (int(near[0]), int(near[-1])) if near.size else (self.size, -1)

    def claim(self, start: int, batch: Batch) -> None:
        """Store a batch in the free cells from `start` on."""
        end = start + len(batch)
        rows = np.array([self._own_row(seq) for seq in batch.ids], np.intp)[batch.which]
        cells = np.arange(start, end)
        self.pos[start:end] = batch.positions
        self.refs[start:end] = 1
        self.member[rows, cells] = True
        np.minimum.at(self.lo, rows, cells)
        np.maximum.at(self.hi, rows, cells)
        np.minimum.at(self.first, rows, batch.positions)
        np.maximum.at(self.last, rows, batch.positions)

    def share(self, src_seq: int, dst_seq: int, n: int) -> None:
        """Replace `dst_seq` by the tokens of `src_seq` below position `n`."""
        src, dst = self.row(src_seq), self._own_row(dst_seq)
        cells = self.member[src] & (self.pos < n)
        self.refs += cells
        self.refs -= self.member[dst]
        self.member[dst] = cells
        self.dropped[dst] = min(int(self.dropped[src]), n)
        self._recount([dst])
        self._forget(dst_seq)

    def cut(self, seq: int, begin: int, end: int) -> Cut | None:
        """Return the cells of a sequence in ``[begin, end)``; None if empty."""
        row = self.row(seq)
        if self.last[row] < begin or begin == end:
            return None
        member = self.member[row]
        later = member & (self.pos >= end)
        gone = member & (self.pos >= begin) & ~later
        return Cut(row, begin, end, gone, later, member & ~gone)

    def check_shift(self, cut: Cut, window: int, can_shift: bool) -> None:
        """Raise `SharedCellsError` or `NotSupported` if later tokens would be wrong after a cut."""
        if not cut.later.any():
            return
        if (self.refs[cut.later] > 1).any():
            message = (
                f"another sequence shares tokens at or after position {cut.end}; "
                "shifting cells shared by multiple sequences is not supported"
            )
            raise SharedCellsError(message, "position", cut.end)
        pos = int(self.last[cut.row]) + 1 - (cut.end - cut.begin)
        oldest, missing = max(0, pos - window), self._dropped_after(cut)
        if oldest < missing:
            message = (
                f"without [{cut.begin}, {cut.end}) a token at {pos} attends back to {oldest}, "
                f"but the tokens below {missing} were dropped"
            )
            raise NotSupported(message, f"[{cut.begin}, {cut.end})", (pos, oldest), missing)
        if not can_shift:
            message = f"tokens after {cut.end} cannot be shifted without a shift_fn"
            raise NotSupported(message, "end", cut.end)

    def take(self, seq: int, cut: Cut) -> None:
        """Remove a cut from its sequence and close the gap."""
        self.dropped[cut.row] = self._dropped_after(cut)
        self.pos[cut.later] -= np.int32(cut.end - cut.begin)
        self.refs[cut.gone] -= 1
        self.member[cut.row] = cut.kept
        self._recount([cut.row])
        self._forget(seq)

    def compact(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Fill the holes at the front with cells from the end.

        Holes are filled in ascending order, each with the last used cell. A contiguous run that
        moves to contiguous cells keeps its order. Returns the moves to apply to the data,
        ``data[dst] = data[src]``.
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
        self._recount(range(self.lo.size))
        return dst, src

    def _dropped_after(self, cut: Cut) -> int:
        """Return the sequence's `dropped` after the cut."""
        dropped = int(self.dropped[cut.row])
        return dropped - (cut.end - cut.begin) if dropped > cut.end else min(dropped, cut.begin)

    def _recount(self, rows: Iterable[Any]) -> None:
        """Recompute the extents of sequences from their cells."""
        for row in rows:
            cells = np.flatnonzero(self.member[row])
            extents: tuple[Any, ...] = self.size, -1, _NONE, -1
            if cells.size:
                own = self.pos[cells]
                extents = cells[0], cells[-1], own.min(), own.max()
            self.lo[row], self.hi[row], self.first[row], self.last[row] = extents

    def _own_row(self, seq: int) -> int:
        """Return the row of a sequence, a new one if unknown."""
        row = self._row_of.get(seq)
        if row is None:
            if not self._unused:
                self._grow()
            row = self._row_of[seq] = self._unused.pop()
        return row

    def _forget(self, seq: int) -> None:
        """Free the row of a sequence without cells."""
        row = self._row_of.get(seq)
        if row is not None and self.last[row] < 0:
            del self._row_of[seq]
            self.dropped[row] = 0
            self._unused.append(row)

    def _grow(self) -> None:
        count = self.lo.size
        for name in ("member", "lo", "hi", "first", "last", "dropped"):
            array = getattr(self, name)
            # A new row is empty, like that of unknown sequences.
            setattr(self, name, np.concatenate((array, np.repeat(array[:1], count, 0))))
        self._unused.extend(range(2 * count - 1, count - 1, -1))


def _first_block(refs: NDArray[np.int32], n: int) -> int | None:
    """Return the start of the first run of `n` free cells, or None."""
    free = refs == 0
    start = int(free.argmax())
    if free[start : start + n].sum() == n:
        return start
    used = np.flatnonzero(refs)
    starts = np.concatenate(([0], used + 1))
    lengths = np.concatenate((used, [refs.size])) - starts
    fits = lengths >= n
    best = int(fits.argmax())
    return int(starts[best]) if fits[best] else None


# The attention mask over cells: 0 where a row sees a cell, -inf elsewhere ----------------------


def batch_mask(
    cells: CellTable,
    batch: Batch,
    history: slice,
    ahead: list[int],
    window: int,
    chunk: int,
    config: CacheConfig,
) -> NDArray[Any]:
    """Build the read-only mask of a batch over the cells `history`, a row per token and padding.

    Rows in `ahead` also see later positions. `window` is the number of earlier positions that a
    row sees, `chunk` the chunk size or 0.
    """
    newest, oldest = batch.positions, batch.positions - np.int32(window)
    if chunk:
        oldest = np.maximum(oldest, batch.positions // chunk * chunk)
    if ahead:
        newest = newest.copy()
        newest[ahead] = UNLIMITED
    member, pos = cells.member[:, history], cells.pos[history]
    padding = config.mask_batch_padding
    dtype = np.dtype(config.mask_dtype)
    rows = -(-len(batch) // padding) * padding
    shape = rows, history.stop - history.start
    if len(batch.ids) == 1:
        mask = _mask_of_one(shape, dtype, member[cells.row(batch.ids[0])], pos, newest, oldest)
    else:
        mask = np.full(shape, -np.inf, dtype)
        order = np.argsort(batch.which, kind="stable")
        ends = np.cumsum(np.bincount(batch.which))
        for row, tokens in zip(cells.rows(batch.ids), np.split(order, ends[:-1]), strict=True):
            own = np.flatnonzero(member[row])
            hidden = _hidden(pos[own], newest[tokens], oldest[tokens])
            mask[np.ix_(tokens, own)] = _as_mask(hidden, dtype)
    mask.flags.writeable = False
    return mask


def _mask_of_one(
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    member: NDArray[np.bool_],
    pos: NDArray[np.int32],
    newest: NDArray[np.int32],
    oldest: NDArray[np.int32],
) -> NDArray[Any]:
    """Build the mask of a batch of one sequence; compare only columns that not every row sees."""
    # Fresh zero pages are free, so columns that every row sees cost nothing.
    mask = np.zeros(shape, dtype)
    mask[newest.size :] = -np.inf
    columns = np.flatnonzero(~(member & (pos <= newest.min()) & (pos >= oldest.max())))
    if columns.size:
        first, last = int(columns[0]), int(columns[-1])
        where: Any = slice(first, last + 1) if last - first < 2 * columns.size else columns
        hidden = _hidden(pos[where], newest, oldest)
        hidden |= ~member[where]
        mask[: newest.size, where] = _as_mask(hidden, dtype)
    return mask


def _hidden(
    pos: NDArray[np.int32], newest: NDArray[np.int32], oldest: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return which positions are outside ``[oldest, newest]``, ``(n_tokens, len(pos))``."""
    hidden = pos > newest[:, None]
    if oldest.max() > 0:
        hidden |= pos < oldest[:, None]
    return hidden


def _as_mask(hidden: NDArray[np.bool_], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return -inf for hidden cells, 0 for others."""
    # Multiplying the bits of -inf is several times faster than np.where.
    minus_inf = np.array(-np.inf, dtype).view(f"i{dtype.itemsize}")
    bits: NDArray[Any] = np.multiply(hidden, minus_inf)
    return bits.view(dtype)
