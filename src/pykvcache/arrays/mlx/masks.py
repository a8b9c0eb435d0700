"""Boolean attention masks: True = visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import BaseCache, Mask, as_caches
from pykvcache.errors import CacheValueError

__all__ = ["create_attention_mask", "create_causal_mask"]

MOST = 2**40
"""Booleans that no machine has."""

Padding: TypeAlias = NDArray[Any] | Sequence[int]


def create_causal_mask(
    n: SupportsIndex,
    offset: SupportsIndex = 0,
    window_size: SupportsIndex | None = None,
    right_padding: Padding | None = None,
    left_padding: Padding | None = None,
) -> NDArray[np.bool_]:
    """Return which of ``offset + n`` keys each of the last `n` queries may see.

    Query `i` sits at ``offset + i`` and sees the keys up to itself, as in mlx-lm.

    Parameters
    ----------
    n : int
        Queries, at least 1.
    offset : int
        Keys before the first query.
    window_size : int, optional
        Keys that a query sees at most, its own included; at least 1. (Ollama's window W,
        that of ``SWACache``, lets a query see W + 1.)
    right_padding, left_padding : array of int, shape (batch,), optional
        Columns at the end and at the beginning of each row that hold no token.

    Returns
    -------
    ndarray of bool
        `(n, offset + n)`; with padding `(batch, 1, n, offset + n)`.

    Raises
    ------
    CacheValueError
        A number is below its minimum, or padding has another shape.
    """
    n = as_int("n", n, minimum=1)
    offset = as_int("offset", offset, minimum=0)
    columns = offset + n
    if columns + n > MOST:
        raise CacheValueError(
            f"a mask of {n} rows and {columns} columns is too large", "mask", (n, columns), MOST
        )
    # Whether a key is visible depends on its distance alone, so every row is a window of
    # one line of booleans; copying rows is several times faster than comparing indices.
    line = np.zeros(columns + n - 1, np.bool_)
    first = 0 if window_size is None else columns - as_int("window_size", window_size, minimum=1)
    line[max(first, 0) : columns] = True
    mask: NDArray[np.bool_] = sliding_window_view(line, columns)[::-1].copy()
    if right_padding is None and left_padding is None:
        return mask
    seen = np.arange(columns)
    rows = mask[None, None]
    if right_padding is not None and left_padding is not None:
        right, left = np.size(right_padding), np.size(left_padding)
        if right != left:
            raise CacheValueError(
                f"padding of {right} rows on the right, of {left} on the left",
                "padding",
                (right, left),
            )
    if right_padding is not None:
        rows = rows & (seen < columns - _per_row("right_padding", right_padding))
    if left_padding is not None:
        rows = rows & (seen >= _per_row("left_padding", left_padding))
    return rows


def create_attention_mask(
    h: NDArray[Any],
    cache: BaseCache | None = None,
    window_size: SupportsIndex | None = None,
    return_array: bool = False,
) -> Mask:
    """Return the mask for hidden states `h`, `(batch, n_tokens, ...)`.

    That of the cache if there is one; else None for a single token, an array if
    `return_array` or if the window is shorter than `h`, and ``"causal"`` otherwise.
    """
    if np.ndim(h) < 2:
        raise CacheValueError(
            f"h has shape {np.shape(h)}; expected (batch, n_tokens, ...)", "h", np.shape(h), 2
        )
    n = np.shape(h)[1]
    if cache is not None:
        as_caches("cache", [cache])
        return cache.make_mask(n, window_size=window_size, return_array=return_array)
    if n == 1:
        return None
    if return_array or (window_size is not None and n > as_int("window_size", window_size)):
        return create_causal_mask(n, window_size=window_size)
    return "causal"


def history_mask(
    n: SupportsIndex, offset: int, window_size: SupportsIndex | None, return_array: bool
) -> Mask:
    """Return the mask of a cache that keeps `offset` tokens and hides none of them."""
    n = as_int("n", n, minimum=1)
    if window_size is not None:
        return create_causal_mask(n, offset, window_size)
    if n == 1:
        return None
    return create_causal_mask(n, offset) if return_array else "causal"


def _per_row(name: str, padding: Padding) -> NDArray[np.int64]:
    counts = np.asarray(padding)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise CacheValueError(
            f"{name} must be one integer per row, shape (batch,)", name, counts.shape, 1
        )
    per_row: NDArray[np.int64] = counts.astype(np.int64)[:, None, None, None]
    return per_row
