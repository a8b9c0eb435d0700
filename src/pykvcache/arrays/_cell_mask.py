"""The attention mask over cells: who sees what, as 0 and -inf."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._batch import UNLIMITED, Batch
from pykvcache.arrays._cells import CellTable
from pykvcache.arrays.protocol import CacheConfig

__all__ = ["batch_mask"]


def batch_mask(
    cells: CellTable,
    batch: Batch,
    history: slice,
    ahead: frozenset[int],
    window: int,
    chunk: int,
    config: CacheConfig,
) -> NDArray[Any]:
    """Build the read-only mask of a batch over the cells `history`.

    Parameters
    ----------
    ahead : set of int
        Batch rows to which later positions are visible.
    window, chunk : int
        How many positions back a row sees, and in which chunks; 0 for none.

    Returns
    -------
    ndarray, shape (rows, history)
        As many rows as the batch, up to the multiple that `config` asks for.
    """
    if len(batch.ids) == 1:
        member = cells.member[cells.row(batch.ids[0]), history][None]
    else:
        member = cells.member[cells.rows(batch.ids), history][batch.which]
    newest, oldest = batch.positions, batch.positions - np.int32(window)
    if chunk:
        oldest = np.maximum(oldest, batch.positions // chunk * chunk)
    if ahead:
        newest = newest.copy()
        newest[sorted(ahead)] = UNLIMITED
    padding = config.mask_batch_padding
    mask = _cell_mask(
        member,
        cells.pos[history],
        newest,
        oldest,
        -(-len(batch) // padding) * padding,
        np.dtype(config.mask_dtype),
    )
    mask.flags.writeable = False
    return mask


def _cell_mask(
    member: NDArray[np.bool_],
    pos: NDArray[np.int32],
    newest: NDArray[np.int32],
    oldest: NDArray[np.int32],
    n_rows: int,
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Build a mask over a range of cells.

    A batch row sees the cells of its sequence from position `oldest` to `newest`. Most columns
    look the same to every row, so only the others are compared row by row: a causal mask costs
    the triangle of the batch, not the history.

    Parameters
    ----------
    member : ndarray of bool, shape (1 or n_tokens, history)
        Whether a cell belongs to the row's sequence; one row where all rows are of one sequence.
    pos : ndarray of int32, shape (history,)
    newest, oldest : ndarray of int32, shape (n_tokens,)
    n_rows : int
        Rows of the mask, at least ``n_tokens``; the ones beyond see nothing.
    dtype : dtype
        Of the mask.

    Returns
    -------
    ndarray, shape (n_rows, history)
    """
    n_tokens = newest.size
    # Zeros come from the system untouched: columns that everyone sees cost nothing here.
    mask = np.zeros((n_rows, pos.size), dtype)
    mask[n_tokens:] = -np.inf
    seen_by_all = member.all(0) & (pos <= newest.min()) & (pos >= oldest.max())
    columns = np.flatnonzero(~seen_by_all)
    if columns.size:
        first, last = int(columns[0]), int(columns[-1])
        where: Any = slice(first, last + 1) if last - first < 2 * columns.size else columns
        hidden = pos[where] > newest[:, None]
        hidden |= ~member[:, where]
        if oldest.max() > 0:
            hidden |= pos[where] < oldest[:, None]
        # A product of bool and float would be NaN: pick, do not multiply.
        mask[:n_tokens, where] = np.where(hidden, dtype.type(-np.inf), dtype.type(0))
    return mask
