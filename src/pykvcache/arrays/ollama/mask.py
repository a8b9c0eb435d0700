"""The attention mask over cells: 0 where a row sees a cell, -inf elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.ollama.batch import UNLIMITED, Batch
from pykvcache.arrays.ollama.cache import CacheConfig
from pykvcache.arrays.ollama.cells import CellTable

__all__ = ["batch_mask"]


def batch_mask(
    cells: CellTable,
    batch: Batch,
    history: slice,
    ahead: list[int],
    window: int,
    chunk: int,
    config: CacheConfig,
) -> NDArray[Any]:
    """Build the read-only mask of a batch over the cells `history`.

    Parameters
    ----------
    ahead : list of int
        Batch rows that also see later positions.
    window, chunk : int
        Number of earlier positions that a row sees, and the chunk size; 0 for no chunks.

    Returns
    -------
    ndarray, shape (rows, history)
        One row per token, rounded up to the padding of `config`.
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
    """Build the mask of a batch of one sequence, which has the cells `member`.

    Columns that every row sees need no comparison per row, so a causal mask needs comparisons
    only within the batch, not with the history.
    """
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
