"""At interpreter exit, caches that were not closed write what they have to their tiers."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class Closable(Protocol):
    """An object with a `close` method."""

    def close(self) -> None:
        """Write what waits."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_pid = os.getpid()


def close_at_exit(thing: Closable) -> None:
    """Close something at the end of the interpreter, if it is still there."""
    _open.add(thing)


@atexit.register
def _close_all() -> None:
    if os.getpid() == _pid:  # a forked child has none of the threads
        for thing in list(_open):
            with contextlib.suppress(Exception):
                thing.close()
