"""What every error of this package is."""

from __future__ import annotations

__all__ = ["KvCacheError"]


class KvCacheError(Exception):
    """Base class of every error of this package."""
