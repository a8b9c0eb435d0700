"""What a forked child must know: another thread may have held any lock when it was made."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forked", "watch_forks"]


class Forked(Protocol):
    """What has to change in a forked child."""

    def _after_fork(self) -> None:
        """Replace locks and let go of what the parent goes on using."""


_watched: dict[int, weakref.ref[Forked]] = {}


def watch_forks(thing: Forked) -> None:
    """Call ``thing._after_fork()`` in every forked child for as long as the thing lives."""
    name = id(thing)
    _watched[name] = weakref.ref(thing, lambda _: _watched.pop(name, None))


def _after_fork_in_child() -> None:
    for reference in list(_watched.values()):
        thing = reference()
        if thing is not None:
            thing._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
