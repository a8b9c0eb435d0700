"""What a forked child must know: another thread may have held any lock when it was made."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

__all__ = ["Forked", "watch_forks", "watch_locks"]


class Forked(Protocol):
    """What has to change in a forked child."""

    def _after_fork(self) -> None:
        """Replace locks and let go of what the parent goes on using; called twice."""


_watched: dict[int, weakref.ref[Forked]] = {}
_locked: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}


def watch_forks(thing: Forked) -> None:
    """Call ``thing._after_fork()`` in every forked child for as long as the thing lives."""
    name = id(thing)
    _watched[name] = weakref.ref(thing, lambda _: _watched.pop(name, None))


def watch_locks(thing: object, *names: str) -> None:
    """Free the locks of these attributes in every forked child: who held them is not there."""
    name = id(thing)
    _locked[name] = weakref.ref(thing, lambda _: _locked.pop(name, None)), names


def _renew(thing: object, name: str) -> None:
    lock = getattr(thing, name)
    if isinstance(lock, threading.Condition):
        if not lock._is_owned():  # type: ignore[attr-defined]
            # In place: finalizers know it, too.
            lock._at_fork_reinit()  # type: ignore[attr-defined]
    elif lock.locked():
        setattr(thing, name, threading.Lock())


def _after_fork_in_child() -> None:
    for thing, names in list(_locked.values()):
        if (found := thing()) is not None:
            for name in names:
                _renew(found, name)
    for reference in list(_watched.values()):
        if (watched := reference()) is not None:
            watched._after_fork()


if hasattr(os, "register_at_fork"):
    # Twice: Python reports what a call raises, Ctrl-C too, and goes on with the next one.
    os.register_at_fork(after_in_child=_after_fork_in_child)
    os.register_at_fork(after_in_child=_after_fork_in_child)
