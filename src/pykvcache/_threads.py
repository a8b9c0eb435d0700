"""Starting threads, where the system may refuse them, or have no memory left for them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, cast
from weakref import ref

from pykvcache.errors import ThreadRefused

__all__ = ["Flag", "Lock", "Worker", "has_started", "start", "take", "work_together"]

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Seconds after which a thread that was made and does nothing is given up.
PATIENCE = 10.0
# So often who waits looks whether somebody was interrupted while waking it.
_LOOK_SECONDS = 0.5


class Flag:
    """As `threading.Event`, which Ctrl-C can leave with its lock taken: then all others hang.

    It takes its lock in a method written in Python, and an interrupt may come before that returns.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._is_set = True
        self._wake()

    def clear(self) -> None:
        """Set it no more."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False where that takes longer."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = min(until - time.monotonic(), _LOOK_SECONDS)
            if left <= 0:
                return False
            with contextlib.suppress(Empty):
                self._wakes.get(timeout=left)
        self._wake()  # others may wait, too
        return True

    def _wake(self) -> None:
        if self._wakes.empty():
            self._wakes.put(None)


class _Call:
    """What a new thread calls; gone when the thread has ended, unless a hook keeps it."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._turn = [True]  # whoever takes it decides: the thread, or who gives it up
        self.is_over = False

    def __call__(self) -> None:
        try:
            if self.take():
                self._call()
        finally:
            self.is_over = True

    def take(self) -> bool:
        try:
            return self._turn.pop()
        except IndexError:
            return False


class _Begun(threading.Event):
    """What `Thread.start` waits for; it does not wait for a thread that has ended already.

    Nor does it wait in an Event's way: Ctrl-C there can become a RuntimeError of a lock.
    """

    call: Callable[[], _Call | None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        super().set()
        self._wakes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        find = self.call
        if find is None:
            return super().wait(timeout)  # a Python whose `start` asks for something else
        until = time.monotonic() + PATIENCE
        while not self.is_set():
            with contextlib.suppress(Empty):
                self._wakes.get(timeout=0.05)
            call = find()
            if call is None or call.is_over or (time.monotonic() > until and call.take()):
                break
            del call  # it would be kept here
        if not self.is_set():
            raise MemoryError("a thread ended before it began")
        return True


class Worker(threading.Thread):
    """A daemon thread whose `start` comes back where memory is too short for the thread to begin.

    CPython's waits for ever then: the thread dies before it says that it is there.
    """

    def __init__(self, target: Callable[..., object], name: str, *args: object) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _Begun()

    @property
    def has_ended(self) -> bool:
        """Whether it has begun, and is not there any more."""
        return self.ident is not None and not self.is_alive()

    @property
    def _bootstrap(self) -> _Call:
        # Whoever asks is `start`, which hands it to the new thread and keeps nothing.
        call = _Call(super()._bootstrap)  # type: ignore[misc]
        self._started.call = ref(call)
        return call


class Lock(Protocol):
    """A lock of `threading`, whether one thread can take it twice or not."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it."""

    def release(self) -> None:
        """Give it back."""


def take(lock: Lock, taken: list[bool], seconds: float = 0.0) -> bool:
    """Take a lock if it can be had in that time, and note in a list whether it was.

    No interrupt comes between the two: compiled code does both. Who calls it gives the lock back
    where True is in the list, in a `finally` of a `try` that this call is in.
    """
    taken.extend(map(lock.acquire, (True,), (seconds,)))
    return taken[-1]


def has_started(thread: Worker) -> bool:
    """Start a thread; False where the system gives none: too many, or no memory for one."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        # A thread that has not begun is not listed among those that run.
        getattr(threading, "_limbo", {}).pop(thread, None)
        return False
    return True


def start(thread: Worker) -> None:
    """Start a thread that something cannot be done without."""
    if not has_started(thread):
        raise ThreadRefused(f"the system gives no thread for {thread.name}", thread.name)


def work_together(work: Callable[[_T], _R], things: Sequence[_T], name: str) -> list[_R]:
    """Work on each of some things in a thread of its own, this one included.

    With fewer threads where the system gives no more. Nothing is under way when it returns.
    """
    results: list[_R | None] = [None] * len(things)
    left, errors = deque(range(len(things))), deque[BaseException]()

    def run() -> None:
        try:
            while True:
                try:
                    i = left.popleft()
                except IndexError:
                    return
                results[i] = work(things[i])
        except BaseException as error:
            left.clear()
            errors.append(error)

    workers: list[Worker] = []
    try:
        for _ in things[1:]:
            worker = Worker(run, name)
            if not left or not has_started(worker):
                break
            workers.append(worker)
        run()
    finally:
        left.clear()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return cast("list[_R]", results)
