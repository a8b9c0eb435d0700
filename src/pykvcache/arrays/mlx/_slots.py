"""The arrays of an `ArraysCache`: checked, stacked, and what its meta state says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.mlx._growth import plain_numbers
from pykvcache.arrays.mlx._rows import Rows, row_counts
from pykvcache.errors import CacheDTypeError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["checked_slot", "common_rows", "slot_counts", "slot_number", "stacked"]


def checked_slot(array: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return a copy of what may be put into a slot."""
    if array is None:
        return None
    array = plain_numbers("slot", array)
    if array.ndim < 1:
        raise CacheValueError(
            "a slot holds arrays whose first axis is the batch; got a scalar",
            "slot",
            array.shape,
            1,
        )
    copied: NDArray[Any] = array.copy()
    return copied


def common_rows(parts: Sequence[NDArray[Any] | None]) -> int | None:
    """Return the rows that all parts have; None where there is no part."""
    sizes = {int(part.shape[0]) for part in parts if part is not None}
    if len(sizes) > 1:
        raise CacheValueError(
            f"slots, left_padding and lengths are of {shown(sorted(sizes))} rows",
            "rows",
            sorted(sizes),
        )
    return next(iter(sizes), None)


def stacked(arrays: Sequence[NDArray[Any] | None], rows: Sequence[int]) -> NDArray[Any] | None:
    """Stack arrays along the batch, zeros of as many rows where there is none."""
    first = next((array for array in arrays if array is not None), None)
    if first is None:
        return None
    for array in arrays:
        if array is not None and array.shape[1:] != first.shape[1:]:
            raise CacheValueError(
                f"arrays of shapes {first.shape} and {array.shape} differ",
                "shape",
                array.shape,
                first.shape,
            )
        if array is not None and array.dtype != first.dtype:
            raise CacheDTypeError(
                f"arrays of dtypes {first.dtype} and {array.dtype} differ",
                "dtype",
                str(array.dtype),
                str(first.dtype),
            )
    parts = [
        np.zeros((count, *first.shape[1:]), first.dtype) if array is None else array
        for array, count in zip(arrays, rows, strict=True)
    ]
    return np.concatenate(parts)


def slot_number(text: str) -> int:
    """Return the number that a text of the meta state holds."""
    if not (text.removeprefix("-").isdigit() and text.isascii() and len(text) < 20):
        raise CacheValueError(
            f"the meta state of an ArraysCache holds {shown(text)}; expected a number",
            "meta_state",
            text,
        )
    return int(text)


def slot_counts(text: str) -> Rows | None:
    """Return the numbers that a text of the meta state holds with commas; None if it is empty."""
    if not text:
        return None
    return row_counts(
        "counts of rows", [slot_number(part) for part in text.split(",")], signed=True
    )
