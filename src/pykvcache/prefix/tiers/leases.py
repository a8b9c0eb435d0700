"""One evaluation among many: who evaluates what is missing, and who waits for it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pykvcache.prefix.tiers.tier import Tier

__all__ = ["Held", "Lease", "Leases", "lease_seconds"]

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


@dataclass(eq=False)
class Held:
    """What tiers gave for one block.

    Attributes
    ----------
    key
        The block's.
    tiers
        Those in which this process has the lease.
    due
        When it should be released at the latest, on the monotonic clock.
    until
        When it runs out.
    """

    key: bytes
    tiers: list[Tier] = field(default_factory=list)
    due: float = 0.0
    until: float = math.inf

    def __bool__(self) -> bool:
        return bool(self.tiers)


class Leases:
    """All leases of one cache: none is lost with who took it, and none outlives the cache.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._held: dict[int, Held] = {}
        self._lost: deque[Held] = deque()
        self._asking: set[object] = set()
        self._closed = False
        # Taken by itself: an interrupt in a Condition's `__enter__` leaves it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def is_closed(self) -> bool:
        """Whether no more are taken."""
        return self._closed

    def ask(self, held: Held, tier: Tier, seconds: float, thread: int) -> bool:
        """Ask a tier for a lease; False where somebody has it. A closed cache takes none."""
        me = object()
        try:
            with self._lock:
                if self._closed:
                    return True
                self._asking.add(me)
            until = time.monotonic() + seconds
            given = tier.lease(held.key, seconds, thread)
            if given:
                held.tiers.append(tier)
                held.until = until
                self._held[id(held)] = held
                if self._closed:
                    self.release(held)
        finally:
            with self._lock:
                self._asking.discard(me)
                self._changed.notify_all()
        return given

    @property
    def are_mine(self) -> bool:
        """Whether this is the process that took them: in a forked child they are its parent's."""
        return os.getpid() == self._pid

    def forget(self, held: Held) -> None:
        """Forget what was given back."""
        self._held.pop(id(held), None)

    def release(self, held: Held) -> None:
        """Give a lease back to all that gave it, once; waits for the stores."""
        self.give_back(held, lambda tier: tier.release(held.key))

    def give_back(self, held: Held, give: Callable[[Tier], object]) -> None:
        """Call something with each tier that gave a lease which still lasts."""
        taken: list[Tier] = []
        try:
            # No interrupt can come between these.
            taken, held.tiers = held.tiers, []
            # A call: Ctrl-C at the end of a loop may pass its `try` by (tests/support/jumps.py).
            self._give_all(held, taken, give)
        except BaseException:
            held.tiers += taken  # given back with the next call, or with `close`
            self.lose(held)
            raise
        self.forget(held)

    def _give_all(self, held: Held, taken: list[Tier], give: Callable[[Tier], object]) -> None:
        while taken:
            # One that ran out may be somebody else's by now.
            if self.are_mine and time.monotonic() < held.until:
                give(taken[0])
            taken.pop(0)

    def lose(self, held: Held) -> None:
        """Note that nobody knows of a lease any more; any thread, in the middle of anything."""
        self._lost.append(held)

    def lost(self) -> Held | None:
        """Return a lease that nobody knows of, each once; None where there is none."""
        if self._lost:
            with contextlib.suppress(IndexError):  # another thread was faster
                return self._lost.popleft()
        return None

    def retire(self, give_back: Callable[[Held], object]) -> None:
        """Take no more, and let something give all back that nobody waits for."""
        self._closed = True
        for held in list(self._held.values()):
            give_back(held)

    def close(self, seconds: float) -> None:
        """Give everything back, and take no more; waits so long for who is just asking."""
        self._closed = True
        if not self.are_mine:
            return
        until = time.monotonic() + seconds
        with self._lock:
            self._changed.wait_for(lambda: not self._asking, max(0.0, until - time.monotonic()))
        self._lost.clear()
        for held in list(self._held.values()):
            self.release(held)


class Lease:
    """The right to evaluate what begins with one missing block, in all tiers.

    Where nobody refers to it any more, `Leases` gives it back.

    Attributes
    ----------
    held
        What this process has of it.
    follows
        The tier in which somebody else has it; None where nobody has.
    holder
        The thread that has it, where that is one of this process.
    """

    def __init__(
        self, leases: Leases, tiers: Sequence[Tier], key: bytes, seconds: float, thread: int
    ) -> None:
        self.key, self.seconds, self.thread = key, seconds, thread
        self._leases = leases
        self.held = Held(key, due=time.monotonic() + _DUE * seconds)
        self.follows: Tier | None = None
        self.holder: int | None = None
        for tier in tiers:
            if not leases.ask(self.held, tier, seconds, thread):
                self.follows, self.holder = tier, tier.holder(key, thread)
                self.release()
                break

    def __del__(self) -> None:
        held = getattr(self, "held", None)
        if held:
            self._leases.lose(held)

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
        while tier is not None and time.monotonic() < until:
            if is_over() or self._leases.is_closed:
                return
            if looks % 4 == 0:
                tier.ring(self.key)
            time.sleep(pause)
            pause = min(_LONGEST, 1.5 * pause)
            looks += 1
            # Asking for the lease is a write: not each time.
            if looks % 4 == 0 or is_there():
                self.held.due = time.monotonic() + _DUE * self.seconds
                if self._leases.ask(self.held, tier, self.seconds, self.thread):
                    self.follows = None
                    return

    def release(self) -> None:
        """Release the lease, if this process holds it."""
        self._leases.release(self.held)
