"""What a forked child must know: another thread may have held any lock when it was made."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import Any, Protocol

from pykvcache._threads import Lock, take

__all__ = ["Forked", "watch_forks", "watch_locks"]

#: For how many seconds a fork waits for other threads at most.
PATIENCE = 5.0


class Forked(Protocol):
    """What has to change in a forked child."""

    def _after_fork(self) -> None:
        """Replace locks and let go of what the parent goes on using; called twice."""


_watched: dict[int, weakref.ref[Forked]] = {}
_locked: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}
_kept: dict[int, tuple[weakref.ref[Any], str]] = {}
_changing = threading.RLock()
# By the thread that forks: what it took, and whether it did.
_taken: dict[int, list[tuple[Lock, list[bool]]]] = {}


def watch_forks(thing: Forked, kept: str | None = None) -> None:
    """Call ``thing._after_fork()`` in every forked child for as long as the thing lives.

    Parameters
    ----------
    thing
        Whose method.
    kept
        Name of an RLock of it that no other thread may have when this process is forked. What is
        done meanwhile may hold locks that nobody can free in the child, as SQLite's own.
    """
    name = id(thing)
    _watched[name] = weakref.ref(thing, lambda _: _watched.pop(name, None))
    if kept is not None:
        with _changing:  # none comes while a fork is under way
            _kept[name] = weakref.ref(thing, lambda _: _kept.pop(name, None)), kept


def watch_locks(thing: object, *names: str) -> None:
    """Free the locks of these attributes in every forked child: who held them is not there."""
    name = id(thing)
    _locked[name] = weakref.ref(thing, lambda _: _locked.pop(name, None)), names


def _take_kept() -> None:
    until = time.monotonic() + PATIENCE
    mine = _taken.setdefault(threading.get_ident(), [])
    _take(_changing, mine, until)
    for thing, name in list(_kept.values()):
        if (found := thing()) is not None:
            _take(getattr(found, name), mine, until)


def _take(lock: Lock, mine: list[tuple[Lock, list[bool]]], until: float) -> None:
    taken: list[bool] = []
    mine.append((lock, taken))
    take(lock, taken, max(0.0, until - time.monotonic()))


def _give_back() -> None:
    mine = _taken.get(threading.get_ident(), [])
    while mine:
        lock, taken = mine[-1]
        with contextlib.suppress(RuntimeError):  # Ctrl-C came just after it was given back
            if True in taken:
                lock.release()
        mine.pop()
    _taken.pop(threading.get_ident(), None)


def _renew(thing: object, name: str) -> None:
    lock = getattr(thing, name)
    if isinstance(lock, threading.Condition):
        if not lock._is_owned():  # type: ignore[attr-defined]
            # In place: finalizers know it, too.
            lock._at_fork_reinit()  # type: ignore[attr-defined]
    else:
        # Whether it is taken cannot be asked: a thread may have it, and wait for the GIL to say so.
        setattr(thing, name, threading.Lock())


def _after_fork_in_child() -> None:
    global _changing
    _give_back()
    _changing = threading.RLock()
    for thing, names in list(_locked.values()):
        if (found := thing()) is not None:
            for name in names:
                _renew(found, name)
    for reference in list(_watched.values()):
        if (watched := reference()) is not None:
            watched._after_fork()


if hasattr(os, "register_at_fork"):
    # Twice: Python reports what a call raises, Ctrl-C too, and goes on with the next one.
    for before in (_take_kept, lambda: None):
        os.register_at_fork(
            before=before, after_in_parent=_give_back, after_in_child=_after_fork_in_child
        )
