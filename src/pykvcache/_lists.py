"""What counts as a list of things."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["as_list"]

_T = TypeVar("_T")


def as_list(values: Iterable[_T], what: str, of: str) -> list[_T]:
    """Return what is iterated over.

    Raises
    ------
    TypeError
        Nothing can be; an array without dimensions says that it can.
    """
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise TypeError(f"{what} must be a sequence of {of}, not {type(values).__name__}")
    return list(values)
