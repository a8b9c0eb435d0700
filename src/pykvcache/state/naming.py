"""Prefix the errors of a file with its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pykvcache.errors import StateError

__all__ = ["naming"]


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Prefix StateErrors of the body with the file's name; class and attributes stay."""
    try:
        yield
    except StateError as error:
        # System errors include the name already.
        if not isinstance(error, OSError) and not str(error).startswith(f"{path}: "):
            error.args = (f"{path}: {error}", *error.args[1:])
        raise
