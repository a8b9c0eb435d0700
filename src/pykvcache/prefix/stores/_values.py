"""What stands in the index of a FolderStore: SQLite keeps any value in any column."""

from __future__ import annotations

import re

from pykvcache.prefix.stores._arguments import KEY_SIZE

__all__ = ["LARGEST", "is_byte", "is_key", "is_number", "is_owner", "is_size", "time_of"]

#: No block is counted as larger: sums of such stay within 8 bytes.
LARGEST = 1 << 48
# The latest time in nanoseconds, of the year 2116: a file may claim to be of any.
_LATEST = 1 << 62
# A writer's token becomes a part of a path.
_TOKEN = re.compile("[0-9a-f]{16}")


def is_number(value: object) -> bool:
    """Whether this is an integer."""
    return type(value) is int


def is_size(value: object) -> bool:
    """Whether this is the size of a block."""
    return isinstance(value, int) and 0 <= value <= LARGEST


def is_key(value: object) -> bool:
    """Whether this is the key of a block."""
    return isinstance(value, bytes) and len(value) == KEY_SIZE


def is_byte(value: object) -> bool:
    """Whether this is the first byte of a key."""
    return isinstance(value, bytes) and len(value) == 1


def is_owner(value: object) -> bool:
    """Whether this is the token of a writer, or None."""
    return value is None or (isinstance(value, str) and _TOKEN.fullmatch(value) is not None)


def time_of(used: int) -> int:
    """Return a time as the index keeps it."""
    return max(0, min(used, _LATEST))
