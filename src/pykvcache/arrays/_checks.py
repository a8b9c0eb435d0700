"""Argument checks that all array caches share."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache import _arguments
from pykvcache.errors import CacheDTypeError, CacheValueError, shown

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

#: Largest number of tokens or cells of an array.
MOST = 2**31 - 1

# llama.cpp's names; NumPy reads "f16" as a 16-byte float.
_DTYPE_NAMES = {"f16": np.float16, "f32": np.float32}


def _name(dtype: np.dtype[Any]) -> str:
    """Return a dtype's text, shortened."""
    name = str(dtype)
    return name if len(name) <= 80 else shown(name)


def as_int(
    name: str, value: SupportsIndex, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return `value` as an int; `CacheValueError` outside ``[minimum, maximum]``.

    A bool, or a value without ``__index__``, is a `TypeError`.
    """
    return _arguments.as_int(value, name, minimum, maximum, CacheValueError)


def as_ints(name: str, values: Iterable[SupportsIndex]) -> NDArray[np.int64]:
    """Return `values` as a new one-dimensional int64 array."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            message = f"{name} has shape {values.shape}; one dimension is needed"
            raise CacheValueError(message, name, values.shape, 1)
        if values.dtype.kind not in "iu" and values.size:
            message = f"{name} must hold integers, not {_name(values.dtype)}"
            raise CacheDTypeError(message, name, str(values.dtype), "integers")
        if values.dtype.kind == "u" and values.size and (most := int(values.max())) >= 2**63:
            raise CacheValueError(
                f"{name} holds {most}; it must be below 2**63", name, most, 2**63 - 1
            )
        return values.astype(np.int64)
    try:
        items: list[Any] = list(values)
        if not {int}.issuperset(map(type, items)):
            items = [as_int(f"{name}[{i}]", item) for i, item in enumerate(items)]
        return np.array(items, np.int64)
    except TypeError as error:
        raise CacheDTypeError(str(error), name, type(values).__name__, "integers") from None
    except OverflowError:
        message = f"{name} holds a number outside int64"
        raise CacheValueError(message, what=name, limit=2**63 - 1) from None


def as_kind(name: str, one: object, kind: type[T]) -> T:
    """Return `one`; raise `CacheDTypeError` unless it is an instance of `kind`."""
    if not isinstance(one, kind):
        found, wanted = type(one).__name__, kind.__name__
        raise CacheDTypeError(f"{name} is a {found}; expected a {wanted}", name, found, wanted)
    return one


def check_size(what: str, found: int, expected: int) -> None:
    """Raise `CacheValueError` unless two counts or lengths are the same."""
    if found != expected:
        raise CacheValueError(f"{what}: {found}; expected {expected}", what, found, expected)


def check_shape(what: str, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[int, ...]:
    """Return a shape; raise `CacheValueError` if such an array exceeds the address space.

    If only this machine's memory is too small, NumPy raises `MemoryError`.
    """
    size = np.dtype(dtype).itemsize
    for n in shape:
        # NumPy also ignores zeros in this product.
        size *= n or 1
    if size > sys.maxsize:
        message = (
            f"{what} has shape ({', '.join(map(shown, shape))}): "
            f"an array has at most {sys.maxsize} bytes"
        )
        raise CacheValueError(message, what, shape, sys.maxsize)
    return shape


def as_float_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `dtype` as float16, float32 or float64, or raise `CacheDTypeError`.

    "f16" and "f32" mean 16 and 32 bits, not bytes as in NumPy.
    """
    name = _DTYPE_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        message = f"dtype is {shown(dtype)}, which NumPy does not know"
        raise CacheDTypeError(message, "dtype", dtype) from None
    # np.dtype(None) would be float64.
    if dtype is None or found not in (np.float16, np.float32, np.float64):
        message = f"dtype is {shown(dtype)}; float16, float32 or float64 is needed"
        raise CacheDTypeError(message, "dtype", dtype, ("float16", "float32", "float64"))
    return found


def as_storable(name: str, array: Any, dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
    """Return `array` as an array of numbers that a cache of `dtype` can store.

    Floats of another width and integers are converted when they are stored. Booleans, complex
    numbers, strings and objects raise `CacheDTypeError`.
    """
    try:
        given = np.asarray(array)
    except ValueError as error:
        message, kind = f"{name} is not an array: {error}", type(array).__name__
        raise CacheDTypeError(message, name, kind) from None
    # Kind "V" covers raw bytes, and bfloat16 and similar types of other packages.
    if (
        given.dtype.kind not in "fiuV"
        or given.dtype.type is np.void
        or (dtype is not None and not np.can_cast(given.dtype, dtype, "same_kind"))
    ):
        message = f"{name} has dtype {_name(given.dtype)}; numbers like {dtype} are needed"
        limit = None if dtype is None else str(dtype)
        raise CacheDTypeError(message, name, str(given.dtype), limit)
    return given


def converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `array` in this dtype; numbers too large for it become infinite."""
    if array.dtype == dtype:
        return array
    check_shape("the converted array", array.shape, dtype)  # it may need more bytes
    with np.errstate(all="ignore"):
        return array.astype(dtype)
