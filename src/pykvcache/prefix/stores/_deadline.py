"""Sockets that keep a deadline: time-outs of redis-py begin anew with every packet."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

__all__ = ["Deadline", "with_deadline"]


class Deadline(threading.local):
    """Until when the calls of this thread have to be done, in seconds of `time.monotonic`."""

    until = float("inf")

    def left(self) -> float:
        """Return the seconds that are left; TimeoutError where there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise socket.timeout("the server is too slow")  # noqa: UP041 (what redis-py catches)
        return left


class _Socket:
    """A socket whose reads and writes are over at the deadline, whatever time-out is set."""

    def __init__(self, inner: Any, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline
        self._timeout: float | None = inner.gettimeout()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._inner.settimeout(timeout)

    def _shorten(self) -> None:
        left = self._deadline.left()
        if self._timeout is None or left < self._timeout:
            self._inner.settimeout(left)
        else:
            self._inner.settimeout(self._timeout)

    def recv(self, *args: Any) -> Any:
        if self._timeout != 0:  # redis-py looks without waiting whether something has come
            self._shorten()
        return self._inner.recv(*args)

    def recv_into(self, *args: Any) -> Any:
        if self._timeout != 0:
            self._shorten()
        return self._inner.recv_into(*args)

    def sendall(self, *args: Any) -> Any:
        self._shorten()
        return self._inner.sendall(*args)


def with_deadline(kind: type, deadline: Deadline) -> type:
    """Return a class of redis-py's connections whose sockets keep the deadline.

    What is received without redis-py's parser comes from ``socket``.
    """

    def connect(self: Any) -> Any:
        deadline.left()
        self.socket = _Socket(kind._connect(self), deadline)  # type: ignore[attr-defined]
        return self.socket

    return type(kind.__name__, (kind,), {"_connect": connect})
