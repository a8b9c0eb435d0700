"""What every error of this package is, and what several of them have in common."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CacheFullError",
    "DetailedError",
    "KvCacheError",
    "OutOfRangeError",
    "UnsupportedError",
]


class KvCacheError(Exception):
    """Base class of every error of this package."""


class CacheFullError(KvCacheError, RuntimeError):
    """There is no room: a `NoKvCacheSlot` (context), `KvCacheFull` or `NoSlot` (array caches)."""


class UnsupportedError(KvCacheError, RuntimeError):
    """Not possible here: an `UnsupportedOperation` (context) or `NotSupported` (array caches)."""


class DetailedError(KvCacheError):
    """What errors about one thing carry: which thing, what it is, and what it may be.

    Attributes
    ----------
    what : str or None
        The argument or the part that is wrong, where it has a name.
    value : object
        What it is: a number, a shape, a dtype or class by name; several in a tuple or dict.
    limit : object
        What it may be, or what is there: the most, the least, the one value, or all of them.
    """

    # Of subclasses, too, whose facts are those of OSError.
    what: str | None = None
    value: object = None
    limit: object = None

    def __init__(
        self,
        message: str,
        what: str | None = None,
        value: object = None,
        limit: object = None,
    ) -> None:
        super().__init__(message)
        self.what = what
        self.value = value
        self.limit = limit


class ArgumentError(DetailedError, ValueError):
    """An argument has a value that can never be meant; nothing was changed."""


class OutOfRangeError(DetailedError, IndexError):
    """A token, an output or an element with this index does not exist."""
