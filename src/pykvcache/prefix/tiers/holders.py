"""Which leases this process holds, for which of its threads, over all caches."""

from __future__ import annotations

import threading
import time

__all__ = ["HOLDERS", "Holders"]


class Holders:
    """Leases by key of the block, by the tier that gave it."""

    def __init__(self) -> None:
        self._held: dict[bytes, dict[int, tuple[int, float]]] = {}
        self._lock = threading.Lock()

    def note(self, key: bytes, tier: int, thread: int, seconds: float) -> None:
        """Note that a thread has a lease."""
        now = time.monotonic()
        with self._lock:
            self._forget_ended(now)
            self._held.setdefault(key, {})[tier] = thread, now + seconds

    def _forget_ended(self, now: float) -> None:
        for key, leases in list(self._held.items()):
            if all(until <= now for _, until in leases.values()):
                del self._held[key]

    def forget(self, key: bytes, tier: int) -> None:
        """Note that a lease has ended."""
        with self._lock:
            leases = self._held.get(key, {})
            leases.pop(tier, None)
            if not leases:
                self._held.pop(key, None)

    def holder(self, key: bytes, tier: int, thread: int) -> int | None:
        """Return which thread has the lease of a block from that tier; None where none has.

        A thread that has it through another cache is named, too: it cannot wait for itself.
        """
        now = time.monotonic()
        with self._lock:
            held = self._held.get(key, {}).copy()
        leases = {at: holder for at, (holder, until) in held.items() if until > now}
        return leases.get(tier, thread if thread in leases.values() else None)


#: Those of this process.
HOLDERS = Holders()
