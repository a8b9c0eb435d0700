"""Memory for blocks, used again: the first write to new memory takes longer than all else."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pykvcache._native.memory_pool import MemoryPool
from pykvcache.prefix.pace import Pace

__all__ = ["Reserve"]

Memory = npt.NDArray[np.uint8]

#: Most bytes that are kept free.
MOST_BYTES = 64 << 20
#: Smaller blocks are left to the allocator, which uses their memory again itself.
LEAST_BLOCK = 128 << 10
#: After so many bytes were evicted, or an eighth of the budget, free memory goes to the system.
TRIMMED_BYTES = 4 << 20
# Priority of the thread that writes to new memory: a decode goes on beside it.
_NICE = 19


class Reserve:
    """Lend memory of one size, and take it back when nothing refers to it any more.

    The system clears new memory page by page as it is first written to: for 25 MB that takes 20 ms
    where reading a file into memory that was used before takes 2.

    Parameters
    ----------
    size
        Bytes of the blocks.
    budget
        Bytes of all that is kept: free memory is an eighth of it at most, and `MOST_BYTES`.
    trim
        Gives what the allocator keeps of small blocks back to the system.
    """

    def __init__(self, size: int, budget: int, trim: Callable[[], object] = lambda: None) -> None:
        self.size = size
        self._trim, self._evicted, self._excess = trim, 0, 0
        self._trimmed_bytes = max(budget // 8, TRIMMED_BYTES)
        self.max_bytes = min(budget // 8, MOST_BYTES) if size >= LEAST_BLOCK else 0
        self._pool = MemoryPool(max(1, size), self.max_bytes)
        self._kept_bytes = 0  # when the budget was looked at last
        self._filling = threading.Lock()
        self._closed = threading.Event()
        self._pid = os.getpid()

    @property
    def n_bytes(self) -> int:
        """Bytes that are free."""
        return self._pool.n_bytes

    def take(self, size: int) -> memoryview:
        """Return memory of that many bytes, whatever they are."""
        return self._pool.lend_view(size) if self._lends(size) else np.empty(size, np.uint8).data

    def arrays(self, size: int, n: int) -> list[Memory]:
        """Return n arrays of so many bytes each, whatever they are."""
        # Others come back here whenever they are free, so that `wipe` finds them.
        if self._lends(size):
            return self._pool.lend_arrays(size, n)
        return [np.empty(size, np.uint8) for _ in range(n)]

    def expect(self, n: int) -> None:
        """Keep memory for n blocks that count already, until it is lent."""
        if self.max_bytes:
            self._pool.expect(n)

    def _lends(self, size: int) -> bool:
        # What is lent has the size of a whole block, and counts as what is asked for.
        return self.max_bytes > 0 and 0.99 * self.size < size <= self.size

    def release(self, excess: int) -> bool:
        """Keep a budget that is exceeded by so many bytes; whether memory went to the system.

        Where it is negative, so much more may be kept until this is called again.
        """
        pool, had = self._pool, self._pool.n_bytes
        self._note_evicted(max(0, excess))
        if excess <= 0:
            pool.most_bytes = min(self.max_bytes, had - excess)
            return False
        pool.most_bytes = min(self.max_bytes, max(0, had - excess))
        if had:
            pool.shrink(pool.most_bytes)
        return pool.n_bytes < had

    def _note_evicted(self, excess: int) -> None:
        """Let the allocator give back the holes that are left by what was evicted, now and then."""
        kept = self._pool.kept_bytes
        left, self._excess = self._excess - excess - (kept - self._kept_bytes), excess
        self._kept_bytes = kept
        if left > 0:
            self._evicted += left
            if self._evicted > self._trimmed_bytes:
                self._evicted = 0
                self._trim()

    def fill(self, room: int, progress: Callable[[], int] = lambda: 0) -> None:
        """Let a thread get memory in advance, up to half of what may be kept; nobody waits for it.

        Parameters
        ----------
        room
            How many bytes there may be more.
        progress
            Returns a number that changes when tokens are evaluated: that goes first.
        """
        n = (min(self.max_bytes // 2, self.n_bytes + room) - self.n_bytes) // max(1, self.size)
        if n <= 0 or self._filling.locked() or os.getpid() != self._pid:
            return
        given = n, progress
        threading.Thread(
            target=self._fill, name="pykvcache-memory", args=given, daemon=True
        ).start()

    def _fill(self, n: int, progress: Callable[[], int]) -> None:
        if not self._filling.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            pace = Pace(progress)
            for _ in range(n):
                began = time.thread_time()
                if not self._pool.add():
                    return
                self._closed.wait(pace.pause(time.thread_time() - began))
        except MemoryError:
            return  # it is there for speed alone
        finally:
            self._filling.release()

    def wipe(self) -> None:
        """Write over what is free: what a tenant's blocks held does not stay in it."""
        self._pool.wipe()

    def close(self) -> None:
        """Give back what is free, most of it to the system, and later what is lent."""
        self.max_bytes = 0
        self._closed.set()
        self._pool.close()
