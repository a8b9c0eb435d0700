"""RemoteStore: handles servers that are slow, full or gone, or that refuse a request."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from pykvcache.errors import StoreError
from pykvcache.prefix.stores.base import BlockStore, check_process

__all__ = ["Breaker", "RemoteStore"]

_log = logging.getLogger("pykvcache.prefix")

_T = TypeVar("_T")
_R = TypeVar("_R")

# The first pause after a failure, and the longest, in seconds.
_FIRST, _LONGEST = 0.5, 30.0


class Breaker:
    """A circuit breaker: a failure stops requests for a pause, which doubles each time."""

    def __init__(self) -> None:
        self._pause = self._until = self._failed_at = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last request failed."""
        return self._pause > 0

    def allow(self) -> bool:
        """Return whether to make a request; a single one after a pause."""
        now = time.monotonic()
        if now < self._until:
            return False
        self._until = now + self._pause
        return True

    def succeeded(self) -> None:
        """Reset the pause after an answer."""
        self._pause = self._until = 0.0

    def failed(self, began: float) -> bool:
        """Start a pause; return whether this failure is the first. Concurrent ones count as one."""
        is_first = self._pause == 0.0
        if is_first or began >= self._failed_at:
            self._failed_at = time.monotonic()
            self._pause = min(max(2 * self._pause, _FIRST), _LONGEST)
            self._until = self._failed_at + self._pause
        return is_first


class RemoteStore(BlockStore):
    """A store on a server: failed requests are counted and logged once, not raised.

    A subclass makes its requests through `_ask`, in parallel through `_map`, and classifies errors
    in `_kind_of`. ``name`` is the server's name in messages, without a password.
    """

    def __init__(self, name: str, n_parallel: int) -> None:
        self._name = name
        self._pid = os.getpid()
        self._closed = False
        # One for each server, and one for all writes.
        self._breakers: defaultdict[str, Breaker] = defaultdict(Breaker)
        self._writes = Breaker()
        self._pool = ThreadPoolExecutor(n_parallel, "pykvcache-store")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @abstractmethod
    def _kind_of(self, error: Exception) -> str:
        """Return the kind of a request's error.

        "missing": there is no such block. "refused": this request alone failed. "denied", "full":
        writes fail. "timed_out", "failed": all requests do.
        """

    def _check_server(self, probe: Callable[[], object]) -> None:
        """Make a first request; raise `StoreError` if the server refuses it, so will never work."""
        began = time.monotonic()
        try:
            probe()
        except Exception as error:
            kind = self._kind_of(error)
            if kind in ("denied", "refused"):
                self.close()
                text = f"{self._name} refused a request: {type(error).__name__}: {error}"
                raise StoreError(text, "url", self._name) from error
            self._note(error, kind, "", began)

    def _ask(self, work: Callable[[], _T], node: str = "", *, is_write: bool = False) -> _T | None:
        """Make a request; return None if it failed, or was not made because earlier ones failed.

        ``node`` is the server, each with its own circuit breaker. If a server is full or read-only,
        only writes are stopped.
        """
        check_process(self._pid)
        if self._closed:
            return None
        breaker = self._breakers[node]
        if not breaker.allow() or (is_write and not self._writes.allow()):
            self.counters.add(skipped=1)
            return None
        began = time.monotonic()
        try:
            result = work()
        except Exception as error:  # from the client, its parser or its socket
            self._note(error, self._kind_of(error), node, began, is_write=is_write)
            return None
        breaker.succeeded()
        if is_write:
            self._writes.succeeded()
        return result

    def _note(
        self, error: Exception, kind: str, node: str, began: float, *, is_write: bool = False
    ) -> None:
        """Count a failure, open the circuit breaker, and log the first one."""
        breaker = self._breakers[node]
        if kind == "missing":
            breaker.succeeded()
            return
        if kind == "refused":
            self.counters.add(failed=1, error=error)
            breaker.succeeded()
            return
        self.counters.add(error=error, **{kind: 1})
        text = "%s does not answer: its blocks are misses until it does (%s)"
        if is_write and kind in ("denied", "full"):
            breaker.succeeded()
            breaker, text = self._writes, "%s is read, but not written (%s)"
        if breaker.failed(began):
            _log.warning(text, f"{self._name}, {node}" if node else self._name, error)

    def _map(self, work: Callable[[_T], _R], things: Sequence[_T]) -> list[_R]:
        """Return the results of a function for each thing; calls run in parallel, and all end."""
        check_process(self._pid)
        if len(things) < 2:
            return [work(thing) for thing in things]
        futures: list[Future[_R]] = []
        with contextlib.suppress(RuntimeError):  # another thread has closed the store
            futures += (self._pool.submit(work, thing) for thing in things)
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Finish pending work and close connections, in the process that opened them."""
        if not self._closed and self._pid == os.getpid():
            self._finish()
            self._pool.shutdown(wait=False)
        self._closed = True

    @abstractmethod
    def _finish(self) -> None:
        """Finish pending work and close connections; must not raise."""
