"""Bringing what the tiers have of a prompt to memory, before it is asked for."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from pykvcache.prefix.arguments import as_seconds
from pykvcache.prefix.block_hash import is_on_path
from pykvcache.prefix.tiers.loader import Load

if TYPE_CHECKING:
    from pykvcache.prefix.core import CacheCore

__all__ = ["Prefetch", "Prefetches"]

#: How many may wait for their turn; more are given up at once.
MAX_WAITING = 1024


class Prefetch:
    """One request to bring a prompt to memory; `PrefixCache.prefetch` returns it.

    Attributes
    ----------
    n_tokens : int
        How many tokens of the prompt came.
    is_cancelled : bool
        Whether it was cancelled.
    tokens, namespace
        The prompt, and whose it is.
    load
        The search, once it has begun.
    """

    def __init__(self, tokens: bytes, namespace: str) -> None:
        self.n_tokens = 0
        self.tokens, self.namespace = tokens, namespace
        self.load: Load | None = None
        self.is_cancelled = False
        self._done = threading.Event()
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing more will come; False where that takes more than so many seconds."""
        seconds = math.inf if seconds is None else as_seconds(seconds, "seconds")
        if os.getpid() != self._pid:
            return self.is_done  # a forked child has no such thread
        return self._done.wait(min(seconds, threading.TIMEOUT_MAX))

    def cancel(self) -> None:
        """Let it end after what is being read; nothing of it is kept."""
        self.is_cancelled = True
        if self.load is not None:
            self.load.cancel()

    def end(self) -> None:
        """Let nothing more come."""
        self._done.set()

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self.is_cancelled else "under way"
        return f"<Prefetch: {state}, {self.n_tokens} tokens came>"


class Prefetches:
    """The prompts that wait to be brought, and the thread for them, which ends with the last."""

    def __init__(self) -> None:
        self._waiting: deque[Prefetch] = deque()
        self._lock = threading.Lock()
        self._is_working = False

    def add(self, one: Prefetch, core: weakref.ref[CacheCore]) -> None:
        """Let a prompt be brought after those that wait; given up where those are many."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                one.end()
                return
            if not self._is_working:
                name = "pykvcache-prefetch"
                threading.Thread(target=self._work, args=(core,), name=name, daemon=True).start()
                self._is_working = True
            self._waiting.append(one)

    def cancel(self, tokens: bytes = b"", namespace: str | None = None) -> None:
        """Cancel the prompts of a namespace, or of all, that some tokens are part of."""
        with self._lock:
            for one in self._waiting:
                if namespace in (None, one.namespace) and is_on_path(one.tokens, tokens):
                    one.cancel()

    def _work(self, ref: weakref.ref[CacheCore]) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_working = False
                    return
                one = self._waiting[0]
            try:
                if (core := ref()) is not None and not one.is_cancelled:
                    core.bring(one)
                del core
            except Exception:  # nothing depends on it
                one.cancel()
            finally:
                with self._lock:
                    self._waiting.popleft()
                one.end()
