"""Write-behind: a queue and a thread per tier."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pykvcache.prefix.block_hash import NamedPrompt
from pykvcache.prefix.tiers.tier import Tier

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Chain", "Writer"]

Item = tuple[bytes, "Buffer"]

# Records and bytes written per step while a flush waits; bytes per step otherwise.
_AT_ONCE, _AT_ONCE_BYTES = 64, 8 << 20
_STEP_BYTES = 1 << 19

#: Share of one CPU that writing takes while tokens are evaluated. The threads of a decode wait for
#: each other, so a busy writer delays a decode by at least its own share.
_SHARE: Final = 0.005
# Upper bound on a pause in seconds.
_LONGEST_PAUSE: Final = 0.5

#: Uses are sent to the store after this many seconds or keys, or before the next write.
_TOUCH_SECONDS, _TOUCH_KEYS = 20.0, 1 << 12


@dataclass(eq=False)
class Chain:
    """The records of one prompt, in order: keys and contents.

    ``uses`` are the keys of all records that the prompt uses, in the order of `BlockStore.touch`;
    ``removes`` are keys to remove. The prompt has the hashes of full blocks, for events.
    """

    items: list[Item] = field(default_factory=list)
    space: str = ""
    uses: list[bytes] = field(default_factory=list)
    removes: list[bytes] = field(default_factory=list)
    prompt: NamedPrompt | None = None
    n_bytes: int = 0
    has_begun: bool = False

    def add(self, key: bytes, data: Buffer) -> None:
        """Append a record."""
        self.items.append((key, data))
        self.n_bytes += memoryview(data).nbytes


class Writer:
    """The queue of at most ``max_bytes`` in front of one tier, and the thread that empties it.

    Requests never wait for it: if the queue is full, the ends of chains are dropped and counted.
    While tokens are evaluated (``progress()`` changes), the thread pauses most of the time, unless
    a flush waits or more than ``urgent_bytes``, at most a quarter, are queued.

    Uses are sent in batches: before a chain is written, which may evict records, and otherwise
    after a while. A path is touched as a whole, and again after its end was written, so no record
    becomes less recent than one that needs it.
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
        self.dropped = 0
        self.n_bytes = self.n_items = 0
        self._progress, self._seen = progress, progress()
        self._queue: deque[Chain] = deque()
        self._uses: dict[tuple[bytes, ...], None] = {}  # used paths, the latest last
        self._touch_at = math.inf
        self._changed = threading.Condition()
        self._n_waiting = 0  # flushes
        self._is_busy = self._is_closed = self._is_retired = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def offer(self, chain: Chain) -> None:
        """Queue as many records of a chain as fit."""
        with self._changed:
            if self._thread is None and not self._is_closed:
                name = "pykvcache-write-behind"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._thread = thread
            chain.items, offered = [], chain.items
            for item in offered:
                size = memoryview(item[1]).nbytes
                if self._is_closed or self.n_bytes + size > self.max_bytes:
                    break
                self.n_bytes += size
                self.n_items += 1
                chain.items.append(item)
            self.dropped += len(offered) - len(chain.items)
            if self._is_closed or not (chain.items or chain.uses or chain.removes):
                return
            self._queue.append(chain)
            self._changed.notify_all()

    def cancel(self, space: str | None) -> None:
        """Drop the queued records of a space, or of all."""
        with self._changed:
            for chain in self._queue:
                if space is None or chain.space == space:
                    self._count_off(chain.items)
                    chain.items = []

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until everything is written; False if that takes longer than the timeout."""
        if self._thread is threading.current_thread():
            return False  # it would wait for itself
        with self._changed:
            self._n_waiting += 1
            try:
                self._changed.notify_all()
                return self._changed.wait_for(
                    lambda: not (self._queue or self._uses or self._is_busy),
                    min(seconds, threading.TIMEOUT_MAX),
                )
            finally:
                self._n_waiting -= 1

    def close(self, seconds: float) -> bool:
        """Write the queue and end the thread; after a timeout drop the rest and return False."""
        if os.getpid() != self._pid:
            return False
        if self._thread is threading.current_thread():
            self.retire()  # called by an event callback: the rest is written after its return
            return False
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        until = time.monotonic() + seconds
        is_done = self.flush(seconds)
        with self._changed:
            self.dropped += self.n_items
            self.n_bytes = self.n_items = 0
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return is_done

    def retire(self) -> None:
        """Accept no more records; the thread closes the tier once everything is written."""
        with self._changed:
            self._is_closed = self._is_retired = True
            if self._thread is None:
                self.tier.close()
            self._changed.notify_all()

    # In the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        # On Linux a thread has its own niceness, so decodes take precedence.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                if not self._has_work():
                    return
                self._is_busy = True
                chain = self._queue[0] if self._queue else Chain()
                is_first, chain.has_begun = not chain.has_begun, True
                items = self._take(chain)
                is_last = not chain.items
                if is_last and self._queue:
                    self._queue.popleft()
            began = time.thread_time()
            if chain.removes:
                self.tier.discard(chain.removes)
            if is_first:
                self._note_use(chain.uses)
            if self._uses and (items or self._is_touch_due()):
                # Before the write, which might otherwise evict the path's beginning. In one call,
                # the most recent key first.
                paths, self._uses = reversed(self._uses), {}
                self.tier.touch(list(dict.fromkeys(itertools.chain.from_iterable(paths))))
            if items:
                self.tier.put(items, chain.prompt)
                if is_last:
                    self._note_use(chain.uses)  # the path must be as recent as its new end
            del items  # frees the memory
            self._pause(time.thread_time() - began)

    def _has_work(self) -> bool:
        """Wait for work; return False if there will be none. The caller holds the lock."""
        while not (self._queue or (self._uses and self._is_touch_due())):
            if self._is_closed:
                if self._is_retired:
                    self.tier.close()
                return False
            self._changed.wait(self._touch_at - time.monotonic() if self._uses else None)
        return True

    def _note_use(self, path: list[bytes]) -> None:
        if path:
            if not self._uses:
                self._touch_at = time.monotonic() + _TOUCH_SECONDS
            self._uses.pop(tuple(path), None)
            self._uses[tuple(path)] = None

    def _is_touch_due(self) -> bool:
        """Return whether to send uses although nothing is written."""
        if self._is_closed or self._n_waiting or time.monotonic() >= self._touch_at:
            return True
        return sum(map(len, self._uses)) > _TOUCH_KEYS

    def _is_urgent(self) -> bool:
        """Return whether a flush waits or the queue is large. The caller holds the lock."""
        return self._is_closed or self._n_waiting > 0 or self.n_bytes > self.urgent_bytes

    def _pause(self, worked: float) -> None:
        """Pause in proportion to the time worked, if tokens were evaluated since the last step."""
        seen, self._seen = self._seen, self._progress()
        if seen == self._seen:
            return
        seconds = min(worked / _SHARE, _LONGEST_PAUSE)
        with self._changed:
            self._changed.wait_for(self._is_urgent, seconds)

    def _take(self, chain: Chain) -> list[Item]:
        """Take the next items of a chain, not all at once, so that the rest can be cancelled."""
        size = n = 0
        most = _AT_ONCE_BYTES if self._is_urgent() else _STEP_BYTES
        for _, data in chain.items[:_AT_ONCE]:
            size += memoryview(data).nbytes
            if n and size > most:
                break
            n += 1
        items, chain.items = chain.items[:n], chain.items[n:]
        self._count_off(items)
        return items

    def _count_off(self, items: list[Item]) -> None:
        self.n_bytes -= sum(memoryview(data).nbytes for _, data in items)
        self.n_items -= len(items)
