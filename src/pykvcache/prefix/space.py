"""Spaces: a namespace, under the adapters that a context computes with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["adapters_digest", "namespace_of", "space_of", "split_space"]

_MARK, _SIZE = "\0", 64
_NO_ADAPTERS = "-" * _SIZE


def adapters_digest(names: Sequence[str]) -> bytes:
    """Return the digest of adapters with their scales; empty where there are none."""
    return hashlib.sha256("\n".join(names).encode()).digest() if names else b""


def space_of(namespace: str, adapters: bytes = b"") -> str:
    """Return what keys and values of a namespace under some adapters are kept under.

    Without adapters the namespace itself, unless it looks like a space with some.
    """
    if adapters:
        return f"{_MARK}{adapters.hex()}{namespace}"
    return f"{_MARK}{_NO_ADAPTERS}{namespace}" if namespace.startswith(_MARK) else namespace


def split_space(space: str) -> tuple[str, bytes]:
    """Return the namespace of a space, and the digest of its adapters."""
    if not space.startswith(_MARK):
        return space, b""
    digest, namespace = space[1 : 1 + _SIZE], space[1 + _SIZE :]
    return namespace, b"" if digest == _NO_ADAPTERS else bytes.fromhex(digest)


def namespace_of(space: str) -> str:
    """Return the namespace of a space."""
    return split_space(space)[0]
