"""Writing behind: what a cache learns goes down to a tier in a thread of its own."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pykvcache.prefix.pace import Pace
from pykvcache.prefix.tiers.notices import Place
from pykvcache.prefix.tiers.tier import Tier

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Chain", "WriteBehind"]

Item = tuple[bytes, "Buffer"]

# How much is written before the queue is looked at again: where it is waited for, and else.
_AT_ONCE, _AT_ONCE_BYTES = 64, 8 << 20
_STEP_BYTES = 1 << 19
# How often to look, in seconds, whether somebody waits for what has a lease.
_LOOK_SECONDS = 0.1


@dataclass(eq=False)
class Chain:
    """Blocks of one prompt, the first one first, that belong to a namespace.

    Attributes
    ----------
    items
        Keys and contents.
    namespace
        Whose they are.
    leases
        Keys to release once everything is written.
    due
        From when on their release must not wait, on the monotonic clock.
    removes
        Keys to remove instead.
    written
        Keys of what the thread has taken.
    blocks
        The places of those that are full blocks.
    """

    items: list[Item] = field(default_factory=list)
    namespace: str = ""
    leases: list[bytes] = field(default_factory=list)
    due: float = 0.0
    removes: list[bytes] = field(default_factory=list)
    written: list[bytes] = field(default_factory=list)
    blocks: dict[bytes, Place] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of all contents."""
        return sum(memoryview(data).nbytes for _, data in self.items)


class WriteBehind:
    """The queue in front of one tier, and the thread that empties it.

    Nobody waits for it: where the queue is full, the ends of chains are dropped and counted. While
    tokens are evaluated the thread pauses most of the time, unless somebody waits for what it
    writes, or too much waits.

    Parameters
    ----------
    tier
        Where it goes.
    max_bytes
        Most bytes that may wait.
    progress
        Returns a number that changes when tokens are evaluated.
    urgent_bytes
        Where more are waiting there are no pauses: a quarter of the queue at most.
    """

    def __init__(
        self,
        tier: Tier,
        max_bytes: int,
        progress: Callable[[], int] = lambda: 0,
        urgent_bytes: int | None = None,
    ) -> None:
        self.tier = tier
        self.max_bytes = max_bytes
        most = max_bytes // 4
        self.urgent_bytes = most if urgent_bytes is None else min(most, urgent_bytes)
        self._pace = Pace(progress)
        self._n_waiting = self._n_leased = self._n_removals = 0  # who waits here; chains
        self._is_awaited = False  # by another process
        self.dropped = 0
        self.n_bytes = self.n_items = 0
        self._queue: deque[Chain] = deque()
        # Taken by itself: an interrupt in a Condition's `__enter__` leaves it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        self._closed = self._retired = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def offer(self, chain: Chain) -> int:
        """Queue what there is room for; returns how many items that is."""
        if os.getpid() != self._pid:
            return 0  # a forked child has no such thread
        with self._lock:
            taken: list[Item] = []
            n_bytes = self.n_bytes
            for item in chain.items:
                size = memoryview(item[1]).nbytes
                if n_bytes + size > self.max_bytes:
                    break
                n_bytes += size
                taken.append(item)
            is_work = bool(taken or chain.leases or chain.removes)
            if is_refused := is_work and (self._closed or not self._has_thread()):
                # There is none, or it is about to end: what would be written is lost.
                self.dropped += len(chain.items)
            else:
                n_items, dropped = self.n_items + len(taken), len(chain.items) - len(taken)
                leases, removes = list(chain.leases), list(chain.removes)
                n_leased, n_removals = (
                    self._n_leased + bool(leases),
                    self._n_removals + bool(removes),
                )
                is_awaited = self._is_awaited or (bool(leases) and chain.due <= time.monotonic())
                queued = Chain(
                    taken, chain.namespace, leases, chain.due, removes, blocks=chain.blocks
                )
                # No interrupt can come between these.
                self.dropped += dropped
                if is_work:
                    self.n_bytes, self.n_items, self._is_awaited = n_bytes, n_items, is_awaited
                    self._n_leased, self._n_removals = n_leased, n_removals
                    self._queue.append(queued)
                self._changed.notify_all()
        if is_refused:
            # What was cleared must go all the same, and others wait for leases.
            if chain.removes:
                self.tier.discard(chain.removes)
            for key in chain.leases:
                self.tier.release(key)
        return 0 if is_refused else len(taken)

    def cancel(self, namespace: str | None) -> None:
        """Forget what waits of a namespace, or everything; what is being written is waited for."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._cancel(namespace)

    def _cancel(self, namespace: str | None) -> None:
        for chain in self._queue:
            if namespace is None or chain.namespace == namespace:
                n_bytes = self.n_bytes - chain.n_bytes
                n_items = self.n_items - len(chain.items)
                self.n_bytes, self.n_items, chain.items = n_bytes, n_items, []

    @property
    def is_mine(self) -> bool:
        """Whether the thread that asks is the one that writes."""
        return self._thread is threading.current_thread()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until everything is written; False if that takes longer than the timeout."""
        if os.getpid() != self._pid or self.is_mine:
            return False  # it would wait for itself
        until = math.inf if seconds is None else time.monotonic() + seconds
        with self._lock:
            self._n_waiting += 1
            try:
                self._changed.notify_all()
                return self._is_written(until)
            finally:
                self._n_waiting -= 1

    def _is_written(self, until: float) -> bool:
        """Wait for that; False where it takes longer, or there is no thread."""
        while self._queue or self._busy:
            left = until - time.monotonic()
            if left <= 0 or not self._has_thread():
                return False
            self._changed.wait(min(left, 0.5))
        return True

    def close(self, seconds: float) -> bool:
        """Write what waits, and end the thread; False where that takes longer: the rest is lost."""
        if os.getpid() != self._pid:
            return False
        if self.is_mine:  # a subscriber closes: the rest is written once it has returned
            self.retire()
            return False
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + seconds
        done = self.flush(seconds)
        with self._lock:
            thread = self._thread
            for chain in self._queue:
                self.dropped += len(chain.items)
            self._queue.clear()
            self.n_bytes = self.n_items = self._n_leased = self._n_removals = 0
            self._changed.notify_all()
        if thread is not None and thread.is_alive():  # an interrupt may come before it has begun
            thread.join(max(0.0, until - time.monotonic()))
        return done

    def retire(self) -> None:
        """Accept no more blocks; the thread closes the tier once everything is written."""
        with self._lock:
            self._closed = self._retired = True
            if self._thread is None:
                self.tier.close()
            self._changed.notify_all()

    # In the thread ----------------------------------------------------------------------------

    def _has_thread(self) -> bool:
        """Whether there is the thread, or it can be started now; the lock is held."""
        if self._thread is not None and not self._thread.is_alive():
            # Memory may have ended in the middle of it, and what it was writing is lost; or an
            # interrupt came before it began.
            self._thread, self._busy = None, False
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="pykvcache-write-behind", daemon=True
            )
            self._thread.start()
        return True

    def _work(self) -> None:
        # Linux has a niceness per thread: who decodes goes first.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return  # an interrupt came while it was started, and it was given up
                self._busy = False
                self._changed.notify_all()
                if not self._has_work():
                    return
            self._ask_waiters()
            with self._lock:
                if not self._queue:
                    continue  # closed meanwhile
                chain = self._queue[0]
                items = self._take(chain)
                self._busy = True
                if is_last := not chain.items:
                    self._queue.popleft()
                    self._n_leased -= bool(chain.leases)
                    self._n_removals -= bool(chain.removes)
            began = time.thread_time()
            if chain.removes:
                self.tier.discard(chain.removes)
            if items:
                self.tier.put(items, chain.blocks)
            del items  # its memory can be used again
            if is_last:
                self._finish(chain)
            self._pause(time.thread_time() - began)

    def _has_work(self) -> bool:
        """Wait for something to write; False where nothing will come. The lock is held."""
        while not self._queue:
            if self._closed:
                if self._retired:
                    self.tier.close()
                return False
            self._changed.wait()
        return True

    def _is_urgent(self) -> bool:
        """Whether somebody waits for what is in the queue, or it grows; the lock is held."""
        return (
            self._closed
            or self._n_waiting > 0
            or self.n_bytes > self.urgent_bytes
            or self._n_removals > 0
            or self._is_awaited
        )

    def _ask_waiters(self) -> None:
        """Find out whether another process waits, or a lease is about to end; no lock is held."""
        with self._lock:
            queue = list(self._queue) if self._n_leased else []
        now = time.monotonic()
        self._is_awaited = any(
            chain.due <= now or any(map(self.tier.is_wanted, chain.leases))
            for chain in queue
            if chain.leases
        )

    def _pause(self, worked: float) -> None:
        """Let those go first who evaluate, where somebody does."""
        until = time.monotonic() + self._pace.pause(worked)
        while (left := until - time.monotonic()) > 0:
            with self._lock:
                pause = min(left, _LOOK_SECONDS) if self._n_leased else left
                if self._changed.wait_for(lambda: not self._queue or self._is_urgent(), pause):
                    return
            self._ask_waiters()

    def _take(self, chain: Chain) -> list[Item]:
        """Take the next items of a chain: not all at once, so that it can be cancelled."""
        size = n = 0
        most = _AT_ONCE_BYTES if self._is_urgent() else _STEP_BYTES
        for _, data in chain.items[:_AT_ONCE]:
            size += memoryview(data).nbytes
            if n and size > most:
                break
            n += 1
        items, chain.items = chain.items[:n], chain.items[n:]
        self._count_off(items)
        chain.written += [key for key, _ in items]
        return items

    def _count_off(self, items: list[Item]) -> None:
        self.n_bytes -= sum(memoryview(data).nbytes for _, data in items)
        self.n_items -= len(items)

    def _finish(self, chain: Chain) -> None:
        # The first one last: the end of a chain goes first.
        if chain.written:
            self.tier.touch(chain.written)
        for key in chain.leases:
            self.tier.release(key)
