"""The attention mask over cells: who sees what, as 0 and -inf."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import check_shape
from pykvcache.arrays.ollama._batch import UNLIMITED, Batch
from pykvcache.arrays.ollama._cells import CellTable
from pykvcache.arrays.ollama.protocol import CacheConfig

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
    newest, oldest = batch.positions, batch.positions - np.int32(window)
    if chunk:
        oldest = np.maximum(oldest, batch.positions // chunk * chunk)
    if ahead:
        newest = newest.copy()
        newest[sorted(ahead)] = UNLIMITED
    member, pos = cells.member[:, history], cells.pos[history]
    padding = config.mask_batch_padding
    dtype = np.dtype(config.mask_dtype)
    rows = -(-len(batch) // padding) * padding
    shape = rows, history.stop - history.start
    check_shape("mask", shape, dtype)
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

    Most columns look the same to every row, so only the others are compared row by row: a
    causal mask costs the triangle of the batch, not the history.
    """
    # Zeros may come from the system untouched: columns that everyone sees then cost nothing.
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
    """Tell which positions lie outside ``[oldest, newest]``, ``(n_tokens, len(pos))``."""
    hidden = pos > newest[:, None]
    if oldest.max() > 0:
        hidden |= pos < oldest[:, None]
    return hidden


def _as_mask(hidden: NDArray[np.bool_], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return -inf where something is hidden, 0 elsewhere."""
    # On the bits of -inf as an integer: several times faster than picking one of two floats.
    minus_inf = np.array(-np.inf, dtype).view(f"i{dtype.itemsize}")
    bits: NDArray[Any] = np.multiply(hidden, minus_inf)
    return bits.view(dtype)
