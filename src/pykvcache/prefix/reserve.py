"""Memory for blocks, used again: the first write to new memory takes longer than all else."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._threads import Flag, Worker, has_started
from pykvcache.prefix.pace import Pace

__all__ = ["Reserve"]

Memory = npt.NDArray[np.uint8]

#: Most bytes that are kept free.
MOST_BYTES = 64 << 20
#: Smaller blocks are left to the allocator, which uses their memory again itself.
LEAST_BLOCK = 128 << 10
#: After so many bytes were evicted, or an eighth of the budget, free memory goes to the system.
TRIMMED_BYTES = 4 << 20
#: Most bytes that caches which were closed leave to later ones of their process.
SPARE_BYTES = 16 << 20
# How much of what is lent is looked at per block that is asked for.
_PER_ASKED = 8
# Priority of the thread that writes to new memory: a decode goes on beside it.
_NICE = 19


_spare: deque[Memory] = deque()


class _Lent(weakref.ref[Any]):
    """Knows which memory is free when nothing refers to what was lent any more."""

    __slots__ = ("memory",)
    memory: Memory


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
        # How much may be free so that the budget is kept: from one `release` to the next.
        self._limit = self.max_bytes
        self._free: deque[Memory] = deque()
        self._lent: dict[int, _Lent] = {}
        self._n_asked = 0  # since all that is lent was looked at
        self._filling = threading.Lock()
        self._closed = Flag()
        self._pid = os.getpid()

    @property
    def n_bytes(self) -> int:
        """Bytes that are free."""
        return len(self._free) * self.size

    def take(self, size: int) -> memoryview:
        """Return memory of that many bytes, whatever they are."""
        return self._lend(size) if self._lends(size) else _new(size).data

    def _lend(self, size: int) -> memoryview:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _left_over(self.size)
        # Whatever is made of a memoryview refers to the very array that it is of: to this one.
        array = memory[:size]
        lent = self._lent[id(memory)] = _Lent(array, self._back)
        lent.memory = memory
        return array.data

    def arrays(self, size: int, n: int) -> list[Memory]:
        """Return n arrays of so many bytes each, whatever they are."""
        # Of small ones a memoryview would be a large part. Others come back here whenever they are
        # free, so that `wipe` finds them.
        if not self._lends(size):
            return [_new(size) for _ in range(n)]
        self._n_asked += n
        if _PER_ASKED * self._n_asked >= len(self._lent):
            self._n_asked = 0
            self._take_back()
        return [np.frombuffer(self._lend(size), np.uint8) for _ in range(n)]

    def _lends(self, size: int) -> bool:
        # What is lent has the size of a whole block, and counts as what is asked for.
        return self.max_bytes > 0 and 0.99 * self.size < size <= self.size

    def _back(self, lent: weakref.ref[Any]) -> None:
        """Take memory back; any thread, in the middle of anything."""
        assert isinstance(lent, _Lent)
        if self._lent.pop(id(lent.memory), None) is lent:  # nobody else takes it back
            self._add(lent.memory)

    def _take_back(self) -> None:
        """Take back what is free already: an interrupt came just when it was to come back."""
        for lent in list(self._lent.values()):
            if lent() is None:
                self._back(lent)

    def _add(self, memory: Memory) -> bool:
        """Keep memory if there is room for it; whether there is."""
        if self.n_bytes + self.size > min(self.max_bytes, self._limit):
            return False
        self._free.append(memory)
        if self.n_bytes <= self._limit:
            return True
        with contextlib.suppress(IndexError):  # another thread has lowered it meanwhile
            self._free.pop()
        return False

    def release(self, excess: int) -> bool:
        """Keep a budget that is exceeded by so many bytes; whether memory went to the system.

        Where it is negative, so much more may be kept until this is called again.
        """
        # What is evicted leaves holes in the allocator's memory, as far as all of it.
        self._evicted += max(0, self._excess - max(0, excess))
        self._excess = max(0, excess)
        if self._evicted > self._trimmed_bytes:
            self._evicted = 0
            self._trim()
        n = max(0, self.n_bytes - max(0, excess)) // max(1, self.size)
        self._limit = n * self.size if excess > 0 else self.n_bytes - excess
        had = len(self._free)
        while excess > 0 and len(self._free) > n:
            with contextlib.suppress(IndexError):  # a thread took it meanwhile
                self._free.pop()
        return len(self._free) < had

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
        has_started(Worker(self._fill, "pykvcache-memory", n, progress))

    def _fill(self, n: int, progress: Callable[[], int]) -> None:
        if not self._filling.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            pace = Pace(progress)
            for _ in range(n):
                began = time.thread_time()
                memory = _new(self.size)
                memory.fill(0)
                if not self._add(memory):
                    return
                self._closed.wait(pace.pause(time.thread_time() - began))
        except MemoryError:
            return  # it is there for speed alone
        finally:
            self._filling.release()

    def wipe(self) -> None:
        """Write over what is free: what a tenant's blocks held does not stay in it."""
        for memory in list(self._free):
            memory.fill(0)

    def close(self) -> None:
        """Give back what is free, most of it to the system, and later what is lent."""
        most = min(self.max_bytes, SPARE_BYTES)
        self.max_bytes = 0
        self._closed.set()
        self._take_back()
        while self._free:
            memory = self._free.pop()
            if memory.size <= most:
                most -= memory.size
                memory.fill(0)
                _spare.append(memory)
        while sum(memory.size for memory in _spare.copy()) > SPARE_BYTES:
            with contextlib.suppress(IndexError):  # another thread was faster
                _spare.popleft()


def _left_over(size: int) -> Memory:
    """Return memory that a closed cache has left, new memory where it had other sizes."""
    try:
        memory = _spare.pop()
    except IndexError:
        return _new(size)
    return memory if memory.size == size else _new(size)


def _new(size: int) -> Memory:
    return np.empty(size, np.uint8)
