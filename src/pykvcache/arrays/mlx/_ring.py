"""Rings of keys and values: in which order the rows of a rotated buffer were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import meta_ints
from pykvcache.arrays.mlx._growth import TokenPair, joined
from pykvcache.arrays.mlx.masks import create_causal_mask
from pykvcache.errors import CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["RingTrim", "ordered", "refuse_sizes", "ring_mask", "ring_meta", "roll_columns"]


class RingTrim:
    """`trim` of caches whose columns lie in a ring, which goes back only while it is not full."""

    _pair: TokenPair
    _offset: int
    _index: int

    def is_trimmable(self) -> bool:
        """Tell whether nothing was dropped yet."""
        raise NotImplementedError

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or as many as there are; 0 if not trimmable."""
        dropped = min(as_int("n", n, minimum=0), self._offset)
        if not self.is_trimmable():
            return 0
        self._pair.length -= dropped
        self._offset -= dropped
        self._index -= dropped
        return dropped


def ordered(
    pair: TokenPair,
    index: int,
    keep: int = 0,
    drop: int = 0,
    more: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> TokenPair:
    """Return the tokens of a ring from old to new, in buffers of exactly that size.

    Parameters
    ----------
    pair : TokenPair
        Rows ``[0, keep)`` hold the first tokens; the ring after them was last written at
        ``index - 1``, or is not rotated if `index` is the number of rows.
    drop : int
        Leave out this many of the oldest tokens after the kept ones.
    more : (keys, values), optional
        Append these.
    """
    rows = pair.length
    keep = min(keep, rows)
    head, old, new = (0, keep), (index, rows), (keep, index)
    in_old = min(drop, rows - index)
    pieces = (head, (old[0] + in_old, old[1]), (new[0] + drop - in_old, new[1]))
    made = []
    for i, buffer in enumerate((pair.keys, pair.values)):
        parts = [buffer[:, :, a:b] for a, b in pieces if a < b]
        if more is not None:
            parts.append(more[i])
        made.append(joined(parts) if parts else buffer[:, :, :0].copy())
    return TokenPair(made[0], made[1])


def ring_mask(
    n: int, stored: int, max_size: int, window_size: int | None, keep: int = 0
) -> NDArray[np.bool_]:
    """Return which tokens `n` new ones may see after a ring made room, from old to new.

    `(n, min(stored, max_size - 1) + n)`: room is made for one token, the others come on top.
    The first `keep` stay visible to all after them.
    """
    offset = min(stored, max(max_size - 1, 0))
    mask = create_causal_mask(n, offset, max(max_size, 1) if window_size is None else window_size)
    if keep:
        kept = mask[:, :keep]
        kept |= np.arange(kept.shape[1]) <= np.arange(offset, offset + n)[:, None]
    return mask


def roll_columns(pair: TokenPair, shifts: NDArray[np.int64]) -> TokenPair:
    """Return a copy in which the last ``shifts[i]`` columns of row `i` come first."""
    keys, values = pair.view()
    keys, values = keys.copy(), values.copy()
    for row in np.flatnonzero(shifts):
        keys[row] = np.roll(keys[row], shifts[row], axis=1)
        values[row] = np.roll(values[row], shifts[row], axis=1)
    return TokenPair(keys, values)


def ring_meta(meta: Sequence[Any], rows: int) -> tuple[int, int, int, int, tuple[Any, ...]]:
    """Return what the meta state of a `BatchRotatingKVCache` of `rows` columns says.

    That is max_size, offset, index, the columns that count, and the rest: the padding of an
    empty batch as texts.
    """
    names = ("max_size", "offset", "index")
    meta = tuple(meta)  # a scalar of NumPy's would raise an IndexError
    max_size, offset, index = meta_ints("BatchRotatingKVCache", names, meta[:3])
    if len(meta) < 4 or meta[3] not in ("True", "False"):
        message = f"rotated of a BatchRotatingKVCache is {shown(meta[3:4])}, no flag"
        raise CacheValueError(message, "rotated", meta[3:4], ("True", "False"))
    rotated = meta[3] == "True"
    given = {"max_size": max_size, "offset": offset, "index": index, "rotated": rotated}
    given["columns"] = rows
    why = ""
    if rows == 0:
        why = "an empty ring has offset 0 and index 0" if offset or index or rotated else ""
    elif len(meta) > 4 or max_size == 0 or index > rows or rows > offset:
        why = "columns, index and offset of a ring do not fit"
    elif rotated and rows != max_size:
        why = "a rotated ring is full"
    elif not rotated and (index == 0 or (offset < max_size and index != offset)):
        why = "a ring that is not rotated holds `index` columns"
    if why:
        raise CacheValueError(f"{why}; got {given}", "meta_state", given)
    return max_size, offset, index, rows if rotated else index, meta[4:]


def refuse_sizes(sizes: list[int]) -> None:
    """Raise `CacheValueError` unless all rings have one size."""
    if len(set(sizes)) != 1:
        raise CacheValueError(
            f"rings of max_size {shown(sorted(set(sizes)))} cannot share a batch; "
            "expected one size",
            "max_size",
            sorted(set(sizes)),
        )
