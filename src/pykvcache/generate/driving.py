"""Run the steps of a `BatchGenerator`, in the thread that waits for tokens or in one of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from pykvcache._closing import Closing
from pykvcache._convert import as_bool
from pykvcache._fork import watch_locks
from pykvcache._threads import Worker, start
from pykvcache.context import LlamaContext
from pykvcache.errors import ClosedError, DecodeAborted, ReentryError
from pykvcache.generate.handle import GenerationHandle
from pykvcache.generate.schedule import Schedule
from pykvcache.generate.step import Stepper
from pykvcache.prefix.cache import PrefixCache
from pykvcache.sequence.pool import pool_of

__all__ = ["Driving"]


class Driving(Closing):
    """The part of `BatchGenerator` that makes steps; not made by itself."""

    def __init__(
        self, context: LlamaContext, max_sequences: int, n_chunk: int, cache: PrefixCache | None
    ) -> None:
        self._ctx, self._native = context, context.native
        self._pool = pool_of(context)
        self._schedule = Schedule(context, self._pool, max_sequences, cache)
        self._stepper = Stepper(self._schedule, n_chunk)
        # Taken by itself: an interrupt in a Condition's `__enter__` leaves it taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        watch_locks(self, "_changed")
        self._driver: int | None = None  # the thread that makes a step now
        self._n_awaiting = 0  # threads that wait for the end of another's step
        self._thread: Worker | None = None
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it, or its context, was closed."""
        return self._closed or self._ctx.is_closed

    def step(self) -> list[tuple[GenerationHandle, int]]:
        """Make one decode for all requests that run.

        Returns
        -------
        list of (GenerationHandle, int)
            The tokens that came of it; empty where nothing is left to do, only parts of prompts
            were evaluated, or all wait for what another process evaluates.

        Raises
        ------
        DecodeAborted
            `LlamaContext.abort` was called meanwhile: nothing is lost, the next step goes on.
        """
        is_waiting = True
        while is_waiting:
            with self._pool as pool:
                self._check_open()
                if pool.depth > 1:
                    raise ReentryError("step() was called in the middle of a step")
                made = self._stepper.step()
            for handle, _ in made:
                if handle._watchers:
                    handle._notify()
            is_waiting = not made and self._schedule.await_tiers()
        if self._n_awaiting or self._thread is not None:
            self._wake()  # who begins to wait looks again, once it is noted here
        return made

    def run(self, *, progress: bool | None = None) -> None:
        """Make steps until no request is left.

        Parameters
        ----------
        progress
            Show a progress bar (needs ``pykvcache[cli]``). Default: where stderr is a terminal
            and rich is installed.

        Raises
        ------
        DecodeAborted, KeyboardInterrupt
            Nothing is lost: the next `run` or `step` goes on.
        ClosedError
            It is closed.
        TypeError
            ``progress`` is neither None nor a flag.
        """
        from pykvcache.generate.progress import watching  # only here: rich is an extra

        self._check_open()
        wanted = None if progress is None else as_bool(progress, "progress")
        with watching(self._schedule.count, wanted) as look:
            self._run_all(look)

    def _run_all(self, look: Callable[[], object]) -> None:
        while len(self._schedule):
            if not self._take_turn():
                self._await_change()
            look()

    def start(self) -> None:
        """Let a thread of its own make the steps, until `close`. Twice does nothing.

        The thread ends, too, when the generator and its handles are dropped.

        Raises
        ------
        ClosedError
            It is closed.
        ThreadRefused
            The system gives no thread: `run` and `step` need none.
        """
        with self._lock:
            self._check_open()
            if not self._has_thread:
                # It must not keep the generator alive, and has to hear of its end.
                ref, changed = weakref.ref(self), self._changed
                thread = Worker(_work, "pykvcache-generate", ref, changed)
                start(thread)
                self._thread = thread
                weakref.finalize(self, _notify, changed).atexit = False

    def close(self) -> None:
        """Abort what is left, and end the thread; twice does nothing."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._pool.hold():
            self._stepper.close()
        self._wake()

    def _check_open(self) -> None:
        if self._native.is_closed:
            raise ClosedError("the context of this generator is closed")
        if self._closed:
            raise ClosedError("the generator is closed")

    def _end_aborted(self) -> None:
        self._stepper.aborted = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _await_change(self) -> None:
        with self._lock:
            self._n_awaiting += 1
            try:
                self._changed.wait(0.05)
            finally:
                self._n_awaiting -= 1

    @property
    def _has_thread(self) -> bool:
        # Without memory a thread can end before it could say so.
        return self._thread is not None and not self._thread.has_ended

    def _take_turn(self) -> bool:
        """Make a step, unless another thread does."""
        me = threading.get_ident()
        try:
            with self._lock:
                if self._has_thread or self._driver not in (None, me):
                    return False
                self._driver = me
            self.step()
        finally:
            # Nothing is called here: an interrupt cannot come in between.
            if self._driver == me:
                self._driver = None
        return True

    def _wait_for(self, handle: GenerationHandle, i: int) -> int | None:
        """Return token i of a handle; None where it ended before."""
        while True:
            if i < len(handle._tokens):
                return handle._tokens[i]
            if handle._finish is not None:
                if handle._error is not None and handle._finish == "error":
                    raise handle._error
                return None
            if not self._take_turn():
                self._check_open()
                self._await_change()

    def _work_once(self) -> bool:
        """Make a step in the thread for it; what fails ends requests. False once it is closed."""
        try:
            self.step()
        except DecodeAborted as error:
            with self._pool.hold():
                self._stepper.abort_all(error)
        except Exception as error:
            if self._closed:
                return False
            with self._pool.hold():
                self._stepper.fail_all(error)
        self._wake()
        return not self._closed


def _work(ref: weakref.ref[Driving], changed: threading.Condition) -> None:
    try:
        _drive(ref, changed)
    finally:
        generator = ref()
        if generator is not None:
            with changed:
                # Others may drive again, if this ended by an error.
                generator._thread = None


def _drive(ref: weakref.ref[Driving], changed: threading.Condition) -> None:
    """Make steps whenever there are requests, as long as the generator lives and is open."""
    while True:
        with changed:
            generator = ref()
            if generator is None or generator._closed:
                return
            if not len(generator._schedule):
                del generator
                changed.wait()
                continue
        if not generator._work_once():
            return
        del generator


def _notify(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()
