"""Prefetching: load a prompt's cached prefix from the tiers into RAM ahead of time."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from pykvcache.errors import ArgumentError, shown
from pykvcache.prefix.block_hash import is_on_path
from pykvcache.prefix.tiers.loader import Load

if TYPE_CHECKING:
    from pykvcache.prefix.core import CacheCore

__all__ = ["Prefetch", "Prefetches", "as_seconds"]

#: Maximum number of queued prefetches; further ones end at once.
MAX_WAITING = 1024


class Prefetch:
    """A prefetch of one prompt, returned by `PrefixCache.prefetch`: ``n_tokens`` were loaded."""

    def __init__(self, tokens: bytes, namespace: str) -> None:
        self.n_tokens = 0
        self.tokens, self.namespace = tokens, namespace
        self.load: Load | None = None
        self.is_cancelled = False
        self._done = threading.Event()
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether it has ended: loaded, cancelled or given up."""
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; return False after a timeout."""
        seconds = math.inf if seconds is None else as_seconds(seconds, "seconds")
        if os.getpid() != self._pid:
            return self.is_done  # after os.fork() the child lacks the thread
        return self._done.wait(min(seconds, threading.TIMEOUT_MAX))

    def cancel(self) -> None:
        """Cancel it: stop after the current read, and keep nothing."""
        self.is_cancelled = True
        if self.load is not None:
            self.load.cancel()

    def end(self) -> None:
        """Mark it as done."""
        self._done.set()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self.is_cancelled else "in progress"
        return f"<Prefetch: {state}, {self.n_tokens} tokens loaded>"


class Prefetches:
    """The queued prefetches, and the thread that runs them, which ends with the last one."""

    def __init__(self) -> None:
        self._waiting: deque[Prefetch] = deque()  # the first is in progress
        self._lock = threading.Lock()

    def add(self, one: Prefetch, core: weakref.ref[CacheCore]) -> None:
        """Queue a prefetch; end it at once if the queue is full."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                one.end()
                return
            if not self._waiting:  # no thread is working
                name = "pykvcache-prefetch"
                threading.Thread(target=self._work, args=(core,), name=name, daemon=True).start()
            self._waiting.append(one)

    def cancel(self, tokens: bytes = b"", namespace: str | None = None) -> None:
        """Cancel the prefetches, in one space or in all, of prompts on the path of these tokens."""
        with self._lock:
            for one in self._waiting:
                if namespace in (None, one.namespace) and is_on_path(one.tokens, tokens):
                    one.cancel()

    def _work(self, ref: weakref.ref[CacheCore]) -> None:
        is_last = False
        while not is_last:
            with self._lock:
                one = self._waiting[0]
            try:
                if (core := ref()) is not None and not one.is_cancelled:
                    core.load(one)
                del core
            except Exception:  # a prefetch is only a hint
                one.cancel()
            finally:
                with self._lock:
                    self._waiting.popleft()
                    is_last = not self._waiting
                one.end()


def as_seconds(value: float, name: str, most: float = math.inf) -> float:
    """Return a time in [0, most]; raise TypeError or ValueError otherwise, and for NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= most:
        raise ArgumentError(
            f"{name} is {shown(value)}: it must be in [0, {most}]", name, value, most
        )
    return math.inf if value > sys.float_info.max else float(value)
