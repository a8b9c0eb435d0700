"""One evaluation among many: who evaluates what is missing, and who waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from pykvcache.prefix.tiers.tier import Tier

__all__ = ["Lease", "lease_seconds"]

#: Evaluations that take less are made by everybody.
LEAST_SECONDS = 0.25

#: No lease is shorter: the first estimates of a process are too low.
SHORTEST = 2.0

# How often who waits looks again: at first, and at most.
_FIRST, _LONGEST = 0.01, 0.1
# Of a lease, the part after which what others may wait for is written without pauses.
_DUE = 2 / 3


def lease_seconds(evaluation: float) -> float:
    """Return for how long to hold a lease for an evaluation that takes so many seconds; or 0."""
    return min(3600.0, max(SHORTEST, 3 * evaluation)) if evaluation >= LEAST_SECONDS else 0.0


class Lease:
    """The right to evaluate what begins with one missing block, in all tiers.

    Attributes
    ----------
    held
        The tiers that gave it to this process.
    follows
        The tier in which somebody else has it; None where nobody has.
    holder
        The thread that has it, where that is one of this process.
    due
        When it should be released at the latest, on the monotonic clock.
    """

    def __init__(self, tiers: Sequence[Tier], key: bytes, seconds: float, thread: int) -> None:
        self.key, self.seconds, self.thread = key, seconds, thread
        self.due = time.monotonic() + _DUE * seconds
        self._pid = os.getpid()
        self.held: list[Tier] = []
        self.follows: Tier | None = None
        self.holder: int | None = None
        for tier in tiers:
            if not tier.lease(key, seconds, thread):
                self.follows, self.holder = tier, tier.holder(key, thread)
                self.release()
                break
            self.held.append(tier)

    def wait(
        self, is_there: Callable[[], bool], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the other process has released it or died, as long as a lease may be held.

        Parameters
        ----------
        is_there
            Whether the block has come.
        is_over
            Whether nobody waits any more.
        """
        tier, pause = self.follows, _FIRST
        until = time.monotonic() + self.seconds
        looks = 0
        while tier is not None and time.monotonic() < until and not is_over():
            if looks % 4 == 0:
                tier.ring(self.key)
            time.sleep(pause)
            pause = min(_LONGEST, 1.5 * pause)
            looks += 1
            # Asking for the lease is a write: not each time.
            if (looks % 4 == 0 or is_there()) and tier.lease(self.key, self.seconds, self.thread):
                self.held, self.follows = [tier], None
                self.due = time.monotonic() + _DUE * self.seconds
                return

    def release(self) -> None:
        """Release the lease, if this process holds it."""
        held, self.held = self.held, []
        if os.getpid() != self._pid:
            return  # in a forked child: it is the parent who evaluates
        for tier in held:
            tier.release(self.key)
