"""What is wrong with a file begins with its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pykvcache.errors import StateError

__all__ = ["naming"]


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Let what is wrong with a state in the body name its file; class and facts stay."""
    try:
        yield
    except StateError as error:
        # Errors of the system have the name already.
        if not isinstance(error, OSError) and not str(error).startswith(f"{path}: "):
            error.args = (f"{path}: {error}", *error.args[1:])
        raise
