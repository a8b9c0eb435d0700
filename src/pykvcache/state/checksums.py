"""Digests of a file's blocks: SHA-256, or XXH3 (20 times faster) if xxhash is installed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from pykvcache.errors import StateVersionError

__all__ = ["best_checksum", "digest", "digest_size", "find_checksum"]

_SIZES = {"xxh3-128": 16, "sha256": 32}


# The constructor of XXH3, or None. Cached, because a failed import is slow.
_found: list[Callable[[], Any] | None] = []


def _xxh3() -> Callable[[], Any] | None:
    if not _found:
        try:
            import xxhash
        except ImportError:
            _found.append(None)
        else:
            _found.append(xxhash.xxh3_128)
    return _found[0]


def best_checksum() -> str:
    """Return the fastest checksum that is installed."""
    return "xxh3-128" if _xxh3() else "sha256"


def find_checksum(name: str) -> str:
    """Return the name if it can be computed here; raise otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"checksum must be a str, not {type(name).__name__}")
    if name not in _SIZES:
        known = ", ".join(_SIZES)
        raise StateVersionError(
            f"the state has checksums of type {name!r}: supported are {known}",
            what="checksum",
            value=name,
            limit=known,
        )
    if name == "xxh3-128" and _xxh3() is None:
        raise StateVersionError(
            "the state has XXH3 checksums, which need xxhash: pip install 'pykvcache[state]'",
            what="checksum",
            value=name,
        )
    return name


def digest_size(name: str) -> int:
    """Return the length of a digest in bytes."""
    return _SIZES[name]


def digest(name: str, data: memoryview) -> bytes:
    """Compute a digest without the GIL."""
    xxh3 = _xxh3() if name == "xxh3-128" else None
    state = xxh3() if xxh3 is not None else hashlib.sha256()
    state.update(data)
    result: bytes = state.digest()
    return result
