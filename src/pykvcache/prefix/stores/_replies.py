"""Values of a Redis server, received where they belong: no copy of a block is made on the way.

Only what the server says to GET is understood: a string of a known length, none, or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Ended", "NotUnderstood", "place", "receive"]

# Bytes that are looked through for the line before a value: few, because the rest is moved.
_AHEAD = 512
#: The longest line, and the longest number in one.
_LONGEST_LINE = 64
_DIGITS = frozenset(b"0123456789")


class NotUnderstood(Exception):
    """Something else than a value: an error, for the client's own parser."""


class Ended(ConnectionError):
    """The connection has ended."""


class _Reader:
    """A socket, and what of its bytes was read ahead."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._ahead = memoryview(bytearray(_AHEAD))
        self._begin = self._end = 0

    def _more(self, view: memoryview) -> int:
        n: int = self._socket.recv_into(view)
        if n <= 0:
            raise Ended("the server has closed the connection")
        return n

    def line(self) -> bytes:
        """Return the next line, without its end."""
        line = b""
        while True:
            ahead = bytes(self._ahead[self._begin : self._end])
            line, had = line + ahead, len(line)
            end = line.find(b"\r\n")
            if end >= 0:
                self._begin += end + 2 - had
                return line[:end]
            if len(line) > _LONGEST_LINE:
                raise NotUnderstood
            self._begin, self._end = 0, self._more(self._ahead)

    def into(self, view: memoryview) -> None:
        """Read as many bytes as the view has."""
        n = min(len(view), self._end - self._begin)
        view[:n] = self._ahead[self._begin : self._begin + n]
        self._begin += n
        while n < len(view):
            n += self._more(view[n:])


def receive(socket: Any, views: Sequence[memoryview]) -> tuple[list[int], bool]:
    """Read one reply for each view, each value into the front of its view.

    Returns
    -------
    list of int
        The lengths of the leading run of values that are there and fit.
    bool
        Whether it ended because a value is longer than its view; then, as after any exception, the
        connection is of no use any more.
    """
    reader = _Reader(socket)
    sizes: list[int] = []
    is_run = True
    for view in views:
        line = reader.line()
        if line in (b"$-1", b"_"):
            is_run = False
            continue
        number = line[1:]
        if line[:1] != b"$" or not number or not _DIGITS.issuperset(number):
            raise NotUnderstood
        size = int(number)
        if size > len(view):
            return sizes, True
        reader.into(view[:size])
        if reader.line():
            raise NotUnderstood
        if is_run:
            sizes.append(size)
    return sizes, False


def place(values: Sequence[Any], views: Sequence[memoryview]) -> tuple[list[int], bool]:
    """Copy values that redis-py has received to where they belong; see `receive`."""
    sizes: list[int] = []
    for value, view in zip(values, views, strict=True):
        if not isinstance(value, bytes):
            break
        if len(value) > len(view):
            return sizes, True
        view[: len(value)] = value
        sizes.append(len(value))
    return sizes, False
