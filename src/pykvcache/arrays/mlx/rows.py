"""Rows of a batch: counts per row, selecting rows, stacking rows of unequal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_ints
from pykvcache.arrays.mlx.token_pair import TokenPair
from pykvcache.errors import CacheDTypeError, CacheValueError, shown

if TYPE_CHECKING:
    from pykvcache.arrays.mlx.base import BaseCache

__all__ = [
    "LARGEST",
    "LARGEST_SIZE",
    "Counts",
    "Rows",
    "announced",
    "right_justified",
    "roll_columns",
    "row_counts",
    "row_indices",
    "summed",
    "take_rows",
]

#: Limit of positions and counts in arguments and files, so that sums fit int64.
LARGEST = 2**60
#: Limit of ring and chunk sizes; ``sys.maxsize`` means "no limit".
LARGEST_SIZE = 2**63 - 1
#: One number per row, from a caller.
Counts: TypeAlias = Sequence[int] | NDArray[Any]
#: One number per row, inside a cache; never changed in place.
Rows: TypeAlias = NDArray[np.int64]


def _numbers(name: str, given: Counts) -> Rows:
    """Return the integers of a sequence or array; refuse iterators, which can be read only once."""
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, bytes):
        kind = type(given).__name__
        raise CacheDTypeError(f"{name} is {kind}; integers in a list are needed", name, kind)
    return as_ints(name, given)


def row_counts(
    name: str, counts: Counts, batch: int | None = None, *, signed: bool = False
) -> Rows:
    """Return `counts` as a new int64 array, one per row, not negative unless `signed`.

    Refuses numbers above `LARGEST`, so that sums do not wrap around.
    """
    array = _numbers(name, counts)
    if array.size and max(abs(int(array.min())), abs(int(array.max()))) > LARGEST:
        message = f"{name} is {shown(array.tolist())}; no number may be beyond {LARGEST}"
        raise CacheValueError(message, name, array.tolist(), LARGEST)
    if batch is not None and array.size != batch:
        message = f"{name} has {array.size} numbers for {batch} rows"
        raise CacheValueError(message, name, array.size, batch)
    if not signed and array.size and array.min() < 0:
        message = f"{name} is {shown(array.tolist())}; no number may be negative"
        raise CacheValueError(message, name, array.tolist(), 0)
    return array


def summed(name: str, counts: Rows, more: Rows) -> Rows:
    """Return a sum of counts; raise if it exceeds `LARGEST`."""
    return row_counts(name, counts + more, signed=True)


def announced(
    cache: BaseCache,
    batch: int | None,
    left: Counts | None,
    lengths: Counts | None,
    right: Counts | None,
) -> tuple[Rows | None, Rows | None, Rows | None]:
    """Return the checked arguments of a cache's `prepare`."""
    given = (("left_padding", left), ("lengths", lengths), ("right_padding", right))
    checked = [None if c is None else row_counts(name, c, batch) for name, c in given]
    if left is not None and not cache.is_empty():
        message = f"left padding can only be added to an empty {type(cache).__name__}"
        raise CacheValueError(message, "left_padding")
    return checked[0], checked[1], checked[2]


def row_indices(indices: Counts, batch: int | None) -> Rows:
    """Return `indices` as an array of rows of a batch; rows may repeat.

    `batch` is None if the number of rows is not known yet.
    """
    array = _numbers("batch_indices", indices)
    if array.size and not (array.min() >= 0 and (batch is None or array.max() < batch)):
        limit = "any number of rows" if batch is None else batch
        message = f"batch_indices {shown(array.tolist())} are not all in [0, {limit})"
        raise CacheValueError(message, "batch_indices", array.tolist(), limit)
    return array


def take_rows(pair: TokenPair, rows: Rows, first: int = 0) -> TokenPair:
    """Return copies of `rows` of `pair`, starting at column `first`."""
    keys, values = pair.view()
    return TokenPair(keys[:, :, first:][rows], values[:, :, first:][rows])


def roll_columns(pair: TokenPair, shifts: Rows) -> TokenPair:
    """Return a copy with row `i` rolled right by ``shifts[i]`` columns."""
    keys, values = (array.copy() for array in pair.view())
    for row in np.flatnonzero(shifts):
        keys[row] = np.roll(keys[row], shifts[row], axis=1)
        values[row] = np.roll(values[row], shifts[row], axis=1)
    return TokenPair(keys, values)


def right_justified(parts: Sequence[tuple[int, TokenPair]]) -> TokenPair:
    """Stack caches so that their newest tokens share the last column.

    `parts` are ``(rows, pair)``; shorter and empty ones are padded with zeros in front. Layouts
    and dtypes must agree.
    """
    filled = [pair.view() for _, pair in parts if pair.count]
    if not filled:
        return TokenPair()
    rows, columns = sum(count for count, _ in parts), max(keys.shape[2] for keys, _ in filled)
    stacked = []
    for i in (0, 1):
        first = filled[0][i]
        for other in (pair[i] for pair in filled):
            if (other.shape[1], other.shape[3]) != (first.shape[1], first.shape[3]):
                message = f"caches of shapes {first.shape} and {other.shape} differ"
                raise CacheValueError(message, "shape", other.shape, first.shape)
            if other.dtype != first.dtype:
                message = f"caches of dtypes {first.dtype} and {other.dtype} differ"
                raise CacheDTypeError(message, "dtype", str(other.dtype), str(first.dtype))
        together = np.zeros((rows, first.shape[1], columns, first.shape[3]), first.dtype)
        top = 0
        for count, part in parts:
            if part.count:
                together[top : top + count, :, columns - part.count :] = part.view()[i]
            top += count
        stacked.append(together)
    return TokenPair(*stacked)
