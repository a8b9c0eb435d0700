"""Where a batch goes among the cells, and what has to leave before."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.ollama._batch import UNLIMITED, Batch
from pykvcache.arrays.ollama._cells import CellTable, Cut
from pykvcache.errors import CacheValueError, KvCacheFull, NotSupported, SharedCellsError

__all__ = ["Placement", "check_shift", "effective_memory", "find_room", "needed_cells"]


class Placement(NamedTuple):
    """A plan that has changed nothing yet.

    Attributes
    ----------
    start : int or None
        First cell of the batch; None if the cells must be defragmented to make a block.
    losing : ndarray of intp, shape (n,)
        Rows of the sequences from which the sliding window takes cells.
    expired : ndarray of bool, shape (n, n_cells)
        The cells that it takes from them.
    """

    start: int | None
    losing: NDArray[np.intp]
    expired: NDArray[np.bool_]


def effective_memory(window: int, memory: int, max_sequences: int, capacity: int) -> int:
    """Return how many tokens a sliding window keeps, `UNLIMITED` if it never slides.

    Raises
    ------
    CacheValueError
        `memory` is below `window`.
    """
    # Room for the stop token, over which the next turn steps back. A single sequence finds
    # it in the part that is sized for the batch.
    if UNLIMITED not in (memory, window) and max_sequences > 1:
        memory = max(memory, window + 1)
    if memory >= capacity:
        return UNLIMITED
    if memory < window:
        raise CacheValueError(
            f"sliding window memory ({memory}) must be at least as large as "
            f"the window ({'unlimited' if window == UNLIMITED else window})",
            "sliding window memory",
            memory,
            window,
        )
    return memory


def find_room(cells: CellTable, batch: Batch, memory: int) -> Placement:
    """Plan where a batch goes.

    Raises
    ------
    KvCacheFull
        Too few cells are free, even after the sliding window has moved on.
    """
    n, refs = len(batch), cells.refs
    losing, expired = np.empty(0, np.intp), np.empty((0, cells.size), np.bool_)
    if memory != UNLIMITED:
        losing, expired = cells.expired(cells.rows(batch.ids), batch.lowest, memory)
        refs = refs - expired.sum(0, dtype=np.int32)
    start = _first_block(refs, n)
    if start is None and np.count_nonzero(refs) > refs.size - n:
        raise KvCacheFull(
            f"could not find a kv cache slot (cache: {refs.size} batch: {n})",
            capacity=refs.size,
            batch=n,
        )
    return Placement(start, losing, expired)


def _first_block(refs: NDArray[np.int32], n: int) -> int | None:
    """Return the start of the first run of `n` zeros in `refs`, or None."""
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


def needed_cells(cells: CellTable, batch: Batch, window: int, memory: int) -> tuple[int, int]:
    """Return the first and last stored cell to which the batch may attend.

    They are ``cells.size`` and -1 if there is none.
    """
    rows = cells.rows(batch.ids)
    if memory == UNLIMITED:
        return int(cells.lo[rows].min()), int(cells.hi[rows].max())
    oldest = (batch.lowest - window).astype(np.int32)
    near = np.flatnonzero((cells.member[rows] & (cells.pos >= oldest[:, None])).any(0))
    return (int(near[0]), int(near[-1])) if near.size else (cells.size, -1)


def check_shift(cells: CellTable, cut: Cut, window: int, can_shift: bool) -> None:
    """Refuse a cut after which later tokens would be wrong.

    Raises
    ------
    SharedCellsError
        Another sequence shares a token after the cut.
    NotSupported
        The window of the next token would reach tokens that were dropped, or keys cannot be
        shifted at all.
    """
    if (cells.refs[cut.later] > 1).any():
        raise SharedCellsError(
            f"another sequence shares tokens at or after position {cut.end}; "
            "shifting cells shared by multiple sequences is not supported",
            "position",
            cut.end,
        )
    pos = int(cells.last[cut.row]) + 1 - (cut.end - cut.begin)
    oldest, missing = max(0, pos - window), cells.dropped_after(cut)
    if oldest < missing:
        raise NotSupported(
            f"without [{cut.begin}, {cut.end}) a token at {pos} attends back to {oldest}, "
            f"but the tokens below {missing} were dropped",
            f"[{cut.begin}, {cut.end})",
            (pos, oldest),
            missing,
        )
    if not can_shift:
        raise NotSupported(
            f"tokens after {cut.end} cannot be shifted without a shift_fn", "end", cut.end
        )
