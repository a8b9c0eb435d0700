"""Checks on arguments that several of the thin classes share."""

from __future__ import annotations

import math
from array import array as c_array
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pykvcache._integers import as_int
from pykvcache._paths import as_path
from pykvcache.errors import ArgumentError
from pykvcache.errors._shown import shown

__all__ = [
    "IntArray",
    "TokenInput",
    "as_bool",
    "as_float",
    "as_int",
    "as_path",
    "as_token_array",
    "choose",
]

IntArray = npt.NDArray[np.int32]
#: What is accepted as tokens: an integer array, or a sequence of integers.
TokenInput = npt.NDArray[np.integer[Any]] | Sequence[SupportsIndex]

_MESSAGES = ": model.apply_chat_template makes text of messages, model.tokenize tokens of text"

E = TypeVar("E", bound=IntEnum)
INT32 = np.iinfo(np.int32)
INT32_DTYPE = np.dtype(np.int32)


def as_bool(value: object, what: str) -> bool:
    """Return a flag; 0, 1 and "no" are not flags."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{what} must be True or False, not {type(value).__name__}")
    return bool(value)


def as_float(value: object, what: str, lo: float, hi: float) -> float:
    """Return a finite number in ``[lo, hi]``; a ``bool`` or a text is not one."""
    # Arrays have __float__ too, whatever their size; asking a protocol takes 20 us.
    if type(value) not in (float, int) and (
        isinstance(value, (bool, np.bool_, str, np.ndarray)) or not isinstance(value, SupportsFloat)
    ):
        raise TypeError(f"{what} must be a number, not {type(value).__name__}: {shown(value)}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer past 1e308
        number = math.inf
    if not math.isfinite(number) or not lo <= number <= hi:
        raise ArgumentError(
            f"{what} is {shown(value)}: it must be in [{lo:g}, {hi:g}]", what, value, (lo, hi)
        )
    return number


def as_token_array(tokens: TokenInput, what: str = "tokens") -> IntArray:
    """Return a contiguous int32 vector, without a copy where it already is one.

    Raises
    ------
    TypeError
        For floats, booleans, strings and other things that hold no integers.
    ValueError
        For arrays of another rank, and values that do not fit an int32.
    """
    if isinstance(tokens, np.ndarray):
        if (
            type(tokens) is np.ndarray
            and tokens.dtype is INT32_DTYPE
            and tokens.ndim == 1
            and tokens.flags.c_contiguous
        ):
            return cast(IntArray, tokens)
        array = tokens
    else:
        if isinstance(tokens, (str, bytes)):
            raise TypeError(
                f"{what} must be integers, not {type(tokens).__name__}: tokenize it first"
            )
        if isinstance(tokens, (list, tuple)) and set(map(type, tokens)) == {int}:
            # Many times faster than one after the other.
            try:
                return np.frombuffer(c_array("i", tokens), np.int32)
            except OverflowError:
                pass  # said below with the value
        if isinstance(tokens, Mapping):
            raise TypeError(f"{what} must be integers, not a mapping{_MESSAGES}")
        if isinstance(tokens, Set):
            raise TypeError(f"{what} must be integers in order, not a {type(tokens).__name__}")
        try:
            items = list(tokens)
        except TypeError:
            kind = type(tokens).__name__
            raise TypeError(f"{what} must be a sequence of integers, not {kind}") from None
        values: list[int] = []
        for token in items:
            try:
                values.append(as_int(token, what, INT32.min, INT32.max))
            except TypeError:
                hint = _MESSAGES if isinstance(token, Mapping) else ""
                kind, at = type(token).__name__, len(values)
                raise TypeError(f"{what} must be integers, not {kind} (at {at}){hint}") from None
        return np.array(values, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} must have an integer dtype, not {array.dtype}")
    if array.ndim != 1:
        raise ArgumentError(
            f"{what} must have one dimension, not {array.ndim}", what, array.ndim, 1
        )
    if array.dtype != np.int32:
        if array.size and (int(array.max()) > INT32.max or int(array.min()) < INT32.min):
            raise ArgumentError(
                f"{what} hold values that do not fit an int32",
                what=what,
                limit=(int(INT32.min), int(INT32.max)),
            )
        return np.ascontiguousarray(array, dtype=np.int32)
    return np.ascontiguousarray(array)


def choose(value: str | int, kind: type[E], what: str, names: Mapping[str, E]) -> E:
    """Return an enum member from itself, its value or its name; ``ValueError`` lists the names."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        found = names.get(value.lower())
        if found is not None:
            return found
    elif isinstance(value, int) and not isinstance(value, bool):
        if value in kind.__members__.values():
            return kind(value)
    else:
        raise TypeError(f"{what} must be a string or a {kind.__name__}, not {type(value).__name__}")
    raise ArgumentError(
        f"{what} is {shown(value)}: it must be one of {', '.join(sorted(names))}",
        what,
        value,
        tuple(sorted(names)),
    )
