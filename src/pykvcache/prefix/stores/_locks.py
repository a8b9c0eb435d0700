"""Locks between processes that the system drops when their holder dies."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import time
from collections.abc import Iterator

from pykvcache._paths import open_into

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Owner", "shared_or_exclusive"]

#: Without file locks, an owner whose file is older than this many seconds counts as dead.
_OLD = 3600.0
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


def _try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Return whether the lock is ours; a file system that has none gives it to everybody."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _has_locked(descriptor: int, *, exclusive: bool, seconds: float) -> bool:
    """Wait for the lock; False where another process keeps it for that long."""
    end = time.monotonic() + seconds
    while not _try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


@contextlib.contextmanager
def shared_or_exclusive(path: str, *, exclusive: bool, seconds: float) -> Iterator[None]:
    """Hold a file's lock; TimeoutError where another process keeps it for that long."""
    opened: list[int] = []
    try:
        descriptor = open_into(opened, path, os.O_RDWR | os.O_CREAT | _CLOEXEC)
        if not _has_locked(descriptor, exclusive=exclusive, seconds=seconds):
            raise TimeoutError(f"{path} is locked by another process")
        yield
    finally:
        if opened:
            os.close(*opened)


class Owner:
    """One open store: a name that others can ask whether its process still runs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        while True:
            self.token = secrets.token_hex(8)
            path = self._path(self.token)
            # An object closes its file when it is gone, wherever an interrupt comes.
            self._file = io.FileIO(path, "x+")
            # Between creation and lock a sweep may have taken it for a dead one.
            if _try_lock(self._file.fileno(), exclusive=True) and os.path.exists(path):
                break
            self._file.close()

    def _path(self, token: str) -> str:
        return os.path.join(self._folder, f"{token}.lock")

    def is_alive(self, token: str) -> bool:
        """Return whether the store of that name is still open somewhere."""
        if token == self.token:
            return True
        opened: list[int] = []
        try:
            try:
                descriptor = open_into(opened, self._path(token), os.O_RDWR | _CLOEXEC)
            except OSError:
                return False
            if fcntl is None:
                return time.time() - os.fstat(descriptor).st_mtime < _OLD
            if not _try_lock(descriptor, exclusive=True):
                return True
            with contextlib.suppress(OSError):
                os.unlink(self._path(token))
            return False
        finally:
            if opened:
                os.close(*opened)

    def others(self) -> list[str]:
        """Return the names of all other stores that were opened here and not closed."""
        names = (name.removesuffix(".lock") for name in os.listdir(self._folder))
        return [name for name in names if name != self.token]

    def close(self) -> None:
        """Say that this one is closed."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._path(self.token))
            self.forget()

    def forget(self) -> None:
        """Close this process's handle alone, after a fork."""
        self._file.close()
