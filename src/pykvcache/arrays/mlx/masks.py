"""Boolean attention masks: True = visible."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, check_shape
from pykvcache.arrays.mlx.base import BaseCache, Counts, Mask, as_caches, row_counts
from pykvcache.errors import CacheDTypeError, CacheValueError

__all__ = ["create_attention_mask", "create_causal_mask"]


def create_causal_mask(
    n: SupportsIndex,
    offset: SupportsIndex = 0,
    window_size: SupportsIndex | None = None,
    right_padding: Counts | None = None,
    left_padding: Counts | None = None,
) -> NDArray[np.bool_]:
    """Return which of ``offset + n`` keys each of the last `n` queries sees.

    Query `i` is at ``offset + i`` and sees the keys up to itself, as in mlx-lm.

    Parameters
    ----------
    n : int
        Queries, at least 1.
    offset : int
        Keys before the first query.
    window_size : int, optional
        Maximum number of keys that a query sees, including its own; at least 1. (Ollama's window
        W of ``SWACache`` shows W + 1 keys.)
    right_padding, left_padding : array of int, shape (batch,), optional
        Columns at the end and at the beginning of each row that hold no token.

    Returns
    -------
    ndarray of bool
        `(n, offset + n)`; with padding `(batch, 1, n, offset + n)`.

    Raises
    ------
    CacheValueError
        A number is below its minimum, the mask would exceed the address space, or padding has
        another shape.
    """
    n = as_int("n", n, minimum=1)
    offset = as_int("offset", offset, minimum=0)
    columns = offset + n
    check_shape("the mask", (n, columns), np.bool_)
    # Visibility depends only on distance, so every row is a window of one line of booleans.
    # Copying rows is several times faster than comparing indices.
    line = np.zeros(columns + n - 1, np.bool_)
    first = 0 if window_size is None else columns - as_int("window_size", window_size, minimum=1)
    line[max(first, 0) : columns] = True
    mask: NDArray[np.bool_] = sliding_window_view(line, columns)[::-1].copy()
    if right_padding is None and left_padding is None:
        return mask
    seen = np.arange(columns)
    rows = mask[None, None]
    right = None if right_padding is None else _per_row("right_padding", right_padding)
    left = None if left_padding is None else _per_row("left_padding", left_padding)
    if right is not None and left is not None and right.size != left.size:
        message = f"padding of {right.size} rows on the right, of {left.size} on the left"
        raise CacheValueError(message, "padding", (right.size, left.size))
    if right is not None:
        rows = rows & (seen < columns - right)
    if left is not None:
        rows = rows & (seen >= left)
    return rows


def create_attention_mask(
    h: NDArray[Any],
    cache: BaseCache | None = None,
    window_size: SupportsIndex | None = None,
    return_array: bool = False,
) -> Mask:
    """Return the mask for hidden states `h`, `(batch, n_tokens, ...)`.

    With a cache, the cache's mask. Otherwise None for a single token, an array if `return_array`
    is set or the window is shorter than `h`, else ``"causal"``.
    """
    try:
        shape = np.shape(h)
    except ValueError as error:  # rows of unequal length
        raise CacheDTypeError(f"h is not an array: {error}", "h", type(h).__name__) from None
    if len(shape) < 2:
        message = f"h has shape {shape}; expected (batch, n_tokens, ...)"
        raise CacheValueError(message, "h", shape, 2)
    n = shape[1]
    if cache is not None:
        as_caches("cache", [cache])
        return cache.make_mask(n, window_size=window_size, return_array=return_array)
    if n == 1:
        return None
    if return_array or (window_size is not None and n > as_int("window_size", window_size)):
        return create_causal_mask(n, window_size=window_size)
    return "causal"


def _per_row(name: str, padding: Counts) -> NDArray[np.int64]:
    # mlx-lm has negative padding after it has left a ring: treat as 0.
    try:
        per_row: NDArray[np.int64] = row_counts(name, padding, signed=True)[:, None, None, None]
    except CacheDTypeError as error:
        raise CacheValueError(str(error), error.what, error.value, error.limit) from None
    return per_row
