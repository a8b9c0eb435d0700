"""Argument checks that every array cache shares."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np

from pykvcache.errors import CacheValueError

__all__ = ["as_int"]


def as_int(
    name: str, value: SupportsIndex, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return `value` as an int within ``[minimum, maximum]``.

    Raises
    ------
    TypeError
        `value` is a bool, or has no ``__index__``.
    CacheValueError
        `value` is out of range.
    """
    # bool has __index__, but a truth value is never meant as a number here.
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    number = operator.index(value)
    if minimum is not None and number < minimum:
        raise CacheValueError(f"{name} is {number}; it must be at least {minimum}")
    if maximum is not None and number > maximum:
        raise CacheValueError(f"{name} is {number}; it must be at most {maximum}")
    return number
