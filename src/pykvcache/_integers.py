"""What counts as an integer argument: the one rule of the binding and the array caches."""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np

from pykvcache.errors import ArgumentError, DetailedError
from pykvcache.errors._shown import shown

__all__ = ["as_index", "as_int"]


def as_index(value: SupportsIndex, what: str) -> int:
    """Return an integer, of any size; a ``bool`` or ``float`` is not one.

    Raises
    ------
    TypeError
        It is a truth value, or has no ``__index__``.
    """
    if type(value) is int:
        return value
    # bool has __index__, but a truth value is never meant as a number.
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}: {shown(value)}")
    try:
        return operator.index(value)
    except TypeError:  # arrays have __index__, whatever is in them
        if not isinstance(value, np.ndarray):
            raise
    raise TypeError(f"{what} must be an integer, not {type(value).__name__}: {shown(value)}")


def as_int(
    value: SupportsIndex,
    what: str,
    lo: int | None = None,
    hi: int | None = None,
    error: type[DetailedError] = ArgumentError,
) -> int:
    """Return an integer in ``[lo, hi]``, None for no limit; `error` names value and limit."""
    number = value if type(value) is int else as_index(value, what)
    if (lo is not None and number < lo) or (hi is not None and number > hi):
        limit = (
            f"at least {lo}"
            if hi is None
            else f"at most {hi}"
            if lo is None
            else f"in [{lo}, {hi}]"
        )
        passed = hi if lo is None or number >= lo else lo
        raise error(
            f"{what} is {shown(number)}: it must be {limit}", what=what, value=number, limit=passed
        )
    return number
