"""What the methods of a store are given: keys, buffers, sizes, times and texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pykvcache._integers import as_int
from pykvcache._lists import as_list
from pykvcache.errors import StoreError
from pykvcache.errors._shown import shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "KEY_SIZE",
    "MAX_LEASE",
    "check_items",
    "check_keys",
    "check_max_bytes",
    "check_seconds",
    "check_text",
    "flat",
    "writable",
]

#: Length of a key in bytes, that of SHA-256.
KEY_SIZE = 32

#: The longest that a lease may last, in seconds.
MAX_LEASE = 3600.0

# In the format of a buffer: a field's name, and what stands for a pointer or a character.
_FIELD_NAME = re.compile(":[^:]*:")
_NOT_NUMBERS = frozenset("OPX&uw")

_NOT_GIVEN: Any = object()


def check_keys(keys: Sequence[bytes], buffers: Sequence[Buffer] = _NOT_GIVEN) -> list[bytes]:
    """Return the keys as a list; raise if one is not 32 bytes, or has no buffer."""
    found = as_list(keys, "keys", "bytes")
    for key in found:
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        if len(key) != KEY_SIZE:
            raise StoreError(
                f"a key has {KEY_SIZE} bytes, this one {len(key)}", value=len(key), limit=KEY_SIZE
            )
    if buffers is _NOT_GIVEN:
        return found
    if not isinstance(buffers, Sequence):
        raise TypeError(f"buffers must be a sequence of buffers, not {type(buffers).__name__}")
    if len(buffers) != len(found):
        raise StoreError(
            f"{len(found)} keys need as many buffers, not {len(buffers)}",
            value=len(buffers),
            limit=len(found),
        )
    return found


def check_items(items: Iterable[tuple[bytes, Buffer]]) -> list[tuple[bytes, memoryview]]:
    """Return the items with their contents as flat bytes; of a key that comes twice, the first."""
    found: dict[bytes, memoryview] = {}
    for item in as_list(items, "items", "(key, content)"):
        try:
            key, data = item
        except (TypeError, ValueError):
            kind = type(item).__name__
            raise TypeError(f"an item is a pair of key and content, not this {kind}") from None
        check_keys([key])
        found.setdefault(key, flat(data))
    return list(found.items())


def flat(data: Buffer) -> memoryview:
    """Return a contiguous buffer as bytes, without a copy."""
    try:
        view = memoryview(data)
    except ValueError as error:  # NumPy's dates and times are no buffers
        raise TypeError(f"a block's content must be a buffer of bytes: {error}") from None
    except TypeError:
        kind = type(data).__name__
        raise TypeError(f"a block's content must be a buffer of bytes, not {kind}") from None
    if not _NOT_NUMBERS.isdisjoint(_FIELD_NAME.sub("", view.format)):
        # Python would follow what was read into it as pointers.
        raise TypeError(
            "a block's content must be a buffer of bytes or numbers, not of objects or characters "
            f"(format {shown(view.format)})"
        )
    if not view.c_contiguous:
        raise StoreError("a block's buffer is not contiguous", value=view.strides)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def writable(buffer: Buffer) -> memoryview:
    """Return a contiguous writable buffer as bytes, without a copy."""
    view = flat(buffer)
    if view.readonly:
        raise StoreError("blocks are read into writable buffers, and this one is read-only")
    return view


def check_max_bytes(value: int, least: int = 0) -> int:
    """Return a size in bytes; raise if it is not an integer, or too small."""
    return as_int(value, "max_bytes", least, error=StoreError)


def check_seconds(value: float, name: str = "seconds", limit: float = MAX_LEASE) -> float:
    """Return a time in seconds; raise unless it is above 0 and at most the limit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, not {type(value).__name__}")
    if not 0 < value <= limit:
        raise StoreError(f"{name} is {shown(value)}: above 0, at most {limit}", name, value, limit)
    return float(value)


def check_text(value: str, name: str) -> str:
    """Return a text; raise if it is none, or holds what UTF-8 cannot."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = error.start
        text = f"{name} is not Unicode text: character {at}"
        raise StoreError(text, name, value, at) from None
    return value
