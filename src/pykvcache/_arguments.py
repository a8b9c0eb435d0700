"""Argument checks: integers, flags, lists, tokens, file names."""

from __future__ import annotations

import contextlib
import errno
import math
import operator
import os
import secrets
import stat
from array import array as c_array
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import IntEnum
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pykvcache.errors import ArgumentError, DetailedError, shown

ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]
#: Accepted as tokens: an integer array, or a sequence of integers.
TokenInput = npt.NDArray[np.integer[Any]] | Sequence[SupportsIndex]
#: Size, modification time, device, inode.
FileId: TypeAlias = tuple[int, int, int, int]

_MESSAGES = ": model.apply_chat_template turns messages into text, model.tokenize text into tokens"

_T = TypeVar("_T")
E = TypeVar("E", bound=IntEnum)
INT32 = np.iinfo(np.int32)
INT32_DTYPE = np.dtype(np.int32)


def check_kind(value: object, kind: type, what: str, order: str = "") -> None:
    """Raise TypeError for a value of another type; the error shows `order`, the argument order."""
    if not isinstance(value, kind):
        raise _wrong_type(value, what, f"a {kind.__name__}", order)


def _wrong_type(value: object, what: str, wanted: str, order: str) -> TypeError:
    hint = f": the argument order is {order}" if order else ""
    return TypeError(f"{what} must be {wanted}, not {type(value).__name__}{hint}")


def as_index(value: SupportsIndex, what: str) -> int:
    """Return an integer of any size; a ``bool`` or ``float`` is refused."""
    if type(value) is int:
        return value
    # bool has __index__, but is not meant as a number.
    if not isinstance(value, (bool, np.bool_)) and hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except TypeError:  # all arrays have __index__
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
    """Return an integer in ``[lo, hi]`` (None: no limit); raise `error` with value and limit."""
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


def as_list(values: Iterable[_T], what: str, of: str) -> list[_T]:
    """Return an iterable as a list; raise TypeError for others, and arrays without dimensions."""
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise TypeError(f"{what} must be a sequence of {of}, not {type(values).__name__}")
    return list(values)


def as_path(
    value: str | os.PathLike[str],
    what: str = "path",
    order: str = "",
    error: type[DetailedError] = ArgumentError,
) -> str:
    """Return a path as text; the error shows `order`, the argument order of a method."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise _wrong_type(value, what, "a str or an os.PathLike", order)
    raw = value if isinstance(value, (str, bytes)) else type(value).__fspath__(value)
    if not isinstance(raw, (str, bytes)):
        raise TypeError(
            f"{what} must be a str or an os.PathLike, not {type(value).__name__}, "
            f"whose __fspath__() returns {type(raw).__name__}"
        )
    name = os.fsdecode(raw)
    try:
        os.fsencode(name)
    except UnicodeEncodeError as found:
        raise _not_in_names(what, name, found.start, error) from None
    return name


def as_file_name(
    value: str | os.PathLike[str], what: str = "path", error: type[DetailedError] = ArgumentError
) -> str:
    """Return a valid file name as text: `as_path` without NUL."""
    name = as_path(value, what, error=error)
    if "\0" in name:
        raise _not_in_names(what, name, name.index("\0"), error)
    return name


def _not_in_names(what: str, name: str, at: int, error: type[DetailedError]) -> DetailedError:
    return error(
        f"{what} is {shown(name)}: character {at} cannot be part of a file name", what, name, at
    )


def check_regular(path: str) -> int:
    """Return the permissions of a regular file; refuse others, such as pipes and devices."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "a file name must not contain NUL")
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return stat.S_IMODE(mode)


class Places(NamedTuple):
    """Paths of an atomic write: temporary file, target, and the target's permissions."""

    temporary: str
    target: str
    mode: int | None


def places(path: str) -> Places:
    """Return the paths of an atomic write."""
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = check_regular(path)
    # A symbolic link stays; its target is replaced.
    target = os.path.realpath(path) if os.path.islink(path) else path
    folder, name = os.path.split(target)
    # 40 characters are at most 160 bytes; names may have 255.
    temporary = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.tmp")
    return Places(temporary, target, mode)


def file_id(path: str) -> FileId:
    """Return attributes that change when a file is written or replaced."""
    facts = os.stat(path)
    return facts.st_size, facts.st_mtime_ns, facts.st_dev, facts.st_ino


def as_bool(value: object, what: str) -> bool:
    """Return a bool; 0, 1 and "no" are refused."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{what} must be True or False, not {type(value).__name__}")
    return bool(value)


def as_text(value: str, what: str, error: type[DetailedError] = ArgumentError) -> str:
    """Return a text; raise if it is not a str, or not valid Unicode."""
    check_kind(value, str, what)
    try:
        value.encode()
    except UnicodeEncodeError as found:
        at = found.start
        raise error(f"{what} is not Unicode text: character {at}", what, value, at) from None
    return value


def as_float(value: object, what: str, lo: float, hi: float) -> float:
    """Return a finite number in ``[lo, hi]``; a ``bool`` or text is refused."""
    # All arrays have __float__, and an isinstance check with a protocol takes 20 us.
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


def as_bytes(buffer: Any, what: str, *, writable: bool = False, order: str = "") -> ByteArray:
    """View a C-contiguous buffer as bytes; `order` is the argument order shown in errors."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError):  # NumPy's dates and times export no buffer
        raise _wrong_type(buffer, what, "a buffer of bytes", order) from None
    if "O" in view.format:
        raise TypeError(f"{what} holds Python objects, not bytes")
    if not view.c_contiguous:
        raise ArgumentError(f"{what} must be C-contiguous", what)
    if writable and view.readonly:
        raise ArgumentError(f"{what} is read-only", what)
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    flat: npt.NDArray[Any] = np.frombuffer(view, np.uint8)
    return flat


def as_token_array(tokens: TokenInput, what: str = "tokens") -> IntArray:
    """Return a contiguous int32 vector, without a copy if possible.

    Raises
    ------
    TypeError
        For floats, booleans, strings and anything else without integers.
    ValueError
        For arrays that are not one-dimensional, and values that do not fit int32.
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
            # Many times faster than item by item.
            try:
                return np.frombuffer(c_array("i", tokens), np.int32)
            except OverflowError:
                pass  # reported below with the value
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


def choose(value: str | int, kind: type[E], what: str) -> E:
    """Return an enum member, given itself, its value or its name; ``ValueError`` lists names."""
    names = {one.name.lower(): one for one in kind}
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        found = names.get(value.lower())
        if found is not None:
            return found
    elif isinstance(value, int) and not isinstance(value, bool):
        if value in names.values():
            return kind(value)
    else:
        raise TypeError(f"{what} must be a string or a {kind.__name__}, not {type(value).__name__}")
    raise ArgumentError(
        f"{what} is {shown(value)}: it must be one of {', '.join(sorted(names))}",
        what,
        value,
        tuple(sorted(names)),
    )
