"""Argument checks that every array cache shares."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache import _integers
from pykvcache.errors import CacheDTypeError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = [
    "MOST",
    "as_float_dtype",
    "as_int",
    "as_ints",
    "as_kind",
    "as_storable",
    "check_shape",
    "check_size",
    "converted",
]

T = TypeVar("T")

MOST = 2**31 - 1
"""Tokens, cells or places that any one array may have."""

# Names that llama.cpp's world uses; NumPy reads "f16" as a 16-byte float.
_DTYPE_NAMES = {"f16": np.float16, "f32": np.float32}


def _name(dtype: np.dtype[Any]) -> str:
    """Return a dtype's text, which may be as long as the names of its fields."""
    name = str(dtype)
    return name if len(name) <= 80 else shown(name)


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
    return _integers.as_int(value, name, minimum, maximum, CacheValueError)


def as_ints(name: str, values: Iterable[SupportsIndex]) -> NDArray[np.int64]:
    """Return `values` as a new one-dimensional int64 array.

    Raises
    ------
    TypeError
        `values` cannot be iterated, or holds something that is not an integer.
    CacheValueError
        `values` is an array of another dimension, or a number does not fit int64.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise CacheValueError(
                f"{name} has shape {values.shape}; one dimension is needed", name, values.shape, 1
            )
        if values.dtype.kind not in "iu" and values.size:
            raise TypeError(f"{name} must hold integers, not {_name(values.dtype)}")
        if values.dtype.kind == "u" and values.size and int(values.max()) >= 2**63:
            raise CacheValueError(
                f"{name} holds {values.max()}; it must be below 2**63",
                name,
                int(values.max()),
                2**63 - 1,
            )
        return values.astype(np.int64)
    items: list[Any] = list(values)
    if not {int}.issuperset(map(type, items)):
        items = [as_int(f"{name}[{i}]", item) for i, item in enumerate(items)]
    try:
        return np.array(items, np.int64)
    except OverflowError:
        raise CacheValueError(
            f"{name} holds a number outside int64", what=name, limit=2**63 - 1
        ) from None


def as_kind(name: str, one: object, kind: type[T]) -> T:
    """Return `one`; raise `CacheDTypeError` unless it is of this class."""
    if not isinstance(one, kind):
        found, wanted = type(one).__name__, kind.__name__
        raise CacheDTypeError(f"{name} is a {found}; expected a {wanted}", name, found, wanted)
    return one


def check_size(what: str, found: int, expected: int) -> None:
    """Raise `CacheValueError` unless two counts or lengths are the same."""
    if found != expected:
        raise CacheValueError(f"{what}: {found}; expected {expected}", what, found, expected)


def check_shape(what: str, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[int, ...]:
    """Return a shape; raise `CacheValueError` if no address reaches over such an array.

    Whether the machine has the memory is another question, which NumPy answers by `MemoryError`.
    """
    size = np.dtype(dtype).itemsize
    for n in shape:
        # NumPy leaves zeros out of this product, too.
        size *= n or 1
    if size > sys.maxsize:
        raise CacheValueError(
            f"{what} has shape ({', '.join(map(shown, shape))}): "
            f"an array has at most {sys.maxsize} bytes",
            what,
            shape,
            sys.maxsize,
        )
    return shape


def as_float_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `dtype` as float16, float32 or float64; "f16" and "f32" count in bits.

    Raises
    ------
    CacheDTypeError
        It is not one of the three.
    """
    name = _DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        raise CacheDTypeError(
            f"dtype is {shown(dtype)}, which NumPy does not know", "dtype", dtype
        ) from None
    # np.dtype(None) is float64, which nobody means.
    if dtype is None or found not in (np.float16, np.float32, np.float64):
        raise CacheDTypeError(
            f"dtype is {shown(dtype)}; float16, float32 or float64 is needed",
            "dtype",
            dtype,
            ("float16", "float32", "float64"),
        )
    return found


def as_storable(name: str, array: Any, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Return `array` as an array of numbers that a cache of `dtype` can store.

    Floats of another width and integers are converted when they are stored; booleans,
    complex numbers, strings and objects are refused.

    Raises
    ------
    CacheDTypeError
        `array` cannot be stored.
    """
    try:
        given = np.asarray(array)
    except ValueError as error:
        raise CacheDTypeError(
            f"{name} is not an array: {error}", name, type(array).__name__
        ) from None
    # "V" is the kind of bfloat16 and its like, which other packages add, and of raw bytes.
    if (
        given.dtype.kind not in "fiuV"
        or given.dtype.type is np.void
        or (dtype is not None and not np.can_cast(given.dtype, dtype, "same_kind"))
    ):
        raise CacheDTypeError(
            f"{name} has dtype {_name(given.dtype)}; numbers like {dtype} are needed",
            name,
            str(given.dtype),
            None if dtype is None else str(dtype),
        )
    return given


def converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `array` in this dtype, what is too large as infinite whatever `np.seterr` says."""
    if array.dtype == dtype:
        return array
    check_shape("the converted array", array.shape, dtype)  # it may need more bytes
    with np.errstate(all="ignore"):
        return array.astype(dtype)
