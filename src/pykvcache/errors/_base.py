"""What every error of this package is, and what several of them have in common."""

from __future__ import annotations

__all__ = ["CacheFullError", "KvCacheError", "UnsupportedError"]


class KvCacheError(Exception):
    """Base class of every error of this package."""


class CacheFullError(KvCacheError, RuntimeError):
    """There is no room: a `NoKvCacheSlot` (context), `KvCacheFull` or `NoSlot` (array caches)."""


class UnsupportedError(KvCacheError, RuntimeError):
    """Not possible here: an `UnsupportedOperation` (context) or `NotSupported` (array caches)."""
