"""A circuit breaker: a server that does not answer is left alone for a while."""

from __future__ import annotations

import threading
import time

__all__ = ["Breaker"]


class Breaker:
    """Say whether a request should be made, from how the ones before went.

    After a failure nothing is asked for ``first`` seconds, then one request is let through; each
    further failure doubles the pause up to ``longest``.

    Parameters
    ----------
    first, longest : float
        Seconds of the first and of the longest pause.
    """

    def __init__(self, first: float = 0.5, longest: float = 30.0) -> None:
        self._first = first
        self._longest = longest
        self._pause = 0.0
        self._until = 0.0
        self.reset_lock()

    def reset_lock(self) -> None:
        """Replace the lock, after a fork."""
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether requests are held back just now."""
        return time.monotonic() < self._until

    @property
    def has_failed(self) -> bool:
        """Whether the last request failed, held back or not."""
        return self._pause > 0

    def allow(self) -> bool:
        """Return whether to make a request; what follows is `succeeded` or `failed`."""
        if not self._pause:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._until:
                return False
            # One request finds out; the others wait for what it finds.
            self._until = now + self._pause
            return True

    def succeeded(self) -> None:
        """Note that the server answered."""
        if self._pause:
            with self._lock:
                self._pause = self._until = 0.0

    def failed(self) -> None:
        """Note that the server did not answer, or not in time."""
        with self._lock:
            self._pause = min(max(2 * self._pause, self._first), self._longest)
            self._until = time.monotonic() + self._pause
