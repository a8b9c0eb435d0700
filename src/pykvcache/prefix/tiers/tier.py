"""One tier: a sealed store, what is known to be in it, and how fast it is."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pykvcache._arguments import as_int
from pykvcache.errors import StoreError, shown
from pykvcache.prefix.block_hash import NamedPrompt
from pykvcache.prefix.events import BlockRemoved, CacheEvent, Stored
from pykvcache.prefix.stores.base import BlockStore
from pykvcache.prefix.stores.envelope import Envelope, SealedStore
from pykvcache.prefix.tiers.cost_model import TierSpeed

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Notices", "Sink", "Tier", "TierStats"]

_T = TypeVar("_T")

_log = logging.getLogger("pykvcache.prefix")

#: How much is asked for at once.
GROUP_BYTES = 2 << 20

#: For how many blocks, and for how many seconds, it is remembered that a store has them.
KNOWN, KNOWN_SECONDS = 1 << 15, 60.0

# How many blocks tell what the store is used for.
_N_SAMPLES = 8

# Seconds per request and per byte before anything was measured. Optimistic: a request that waits in
# vain waits a tenth of its evaluation, and one that asks for nothing evaluates it all.
_SPEED = {"disk": (5e-4, 1 / 1.5e9), "remote": (1e-3, 1 / 1e9)}


#: So many blocks are remembered per tier; of those that are forgotten, `BlockRemoved` is sent.
MAX_BLOCKS = 1 << 15

#: How many blocks are looked at again at once: whether they are still there.
LOOK = 64

_MEDIA = {"disk": "DISK"}

#: Takes an event.
Sink: TypeAlias = Callable[[CacheEvent | Stored], object]


@dataclass(frozen=True)
class TierStats:
    """Figures of one tier since the cache was made. Blocks and ends of prompts, unless said.

    Attributes
    ----------
    medium
        ``"disk"`` or ``"remote"``.
    store
        Which store, in words.
    read, read_bytes
        Taken from it.
    written, written_bytes
        Given to it, where it did not have them.
    pending, pending_bytes
        Wait to be written.
    dropped
        Not written, because the queue was full.
    rejected
        Damaged, truncated, foreign or forged: not taken.
    refused
        Whole, and of a content that the memory must not have, such as NaN: not taken.
    failed, timed_out, skipped
        Requests that failed, had no answer in time, or were not made because of those.
    too_slow
        Requests that were not made because evaluating is faster.
    full, denied
        Not written, because the disk or the server is full, or because that is not allowed.
    """

    medium: str
    store: str
    read: int = 0
    read_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    pending: int = 0
    pending_bytes: int = 0
    dropped: int = 0
    rejected: int = 0
    refused: int = 0
    failed: int = 0
    timed_out: int = 0
    skipped: int = 0
    too_slow: int = 0
    full: int = 0
    denied: int = 0


class Tier:
    """A store below a cache's memory. What a store raises ends here, counted and logged once.

    An ``owned`` store is closed with it. Raises `StoreError` or TypeError for a store whose facts
    a cache cannot work with.
    """

    def __init__(
        self, store: BlockStore, envelope: Envelope, *, owned: bool, sink: Sink = lambda event: None
    ) -> None:
        name = type(store).__name__
        self.medium = store.medium
        if self.medium not in _SPEED:
            text = f"{name}.medium is {shown(self.medium)}: it must be one of {', '.join(_SPEED)}"
            raise StoreError(text, "medium", self.medium, tuple(_SPEED))
        self.n_probes = as_int(store.n_probes, f"{name}.n_probes", 0, error=StoreError)
        self.sealed = SealedStore(store, envelope)
        self.owned = owned
        self.notices = Notices(self.medium, sink)
        self.speed = TierSpeed(*_SPEED[self.medium])
        self.read = self.read_bytes = self.written = self.written_bytes = 0
        self.refused = self.raised = self.too_slow = 0
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._obstacle: str | None = None  # unknown until the store is asked
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Tier: {self.sealed.store!r}>"

    # Reading --------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there."""
        if not keys:
            return 0
        began, failures = time.perf_counter(), self._failures()
        n = self._call(lambda: max(0, min(len(keys), int(self.sealed.contains(keys)))), 0)
        self.speed.note(0, time.perf_counter() - began)
        self._note_missing(keys[n : n + 1], failures)
        return n

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; only so many are asked for as is cheap."""
        asked, there = keys[: self.n_probes], list[bool]()
        if asked:
            there = self._call(lambda: [bool(one) for one in self.sealed.present(asked)], there)
        self._is_gone(key for key, is_there in zip(asked, there, strict=False) if not is_there)
        return (there + [False] * len(keys))[: len(keys)]

    def get(self, keys: Sequence[bytes], size: int, *, exact: bool = False) -> list[memoryview]:
        """Return the contents of the leading run that is right.

        ``size`` is that of each content in bytes: an upper bound, or exact.
        """
        began, failures = time.perf_counter(), self._failures()
        nothing = list[memoryview]()
        found = self._call(lambda: self.sealed.get(keys, [size] * len(keys), exact=exact), nothing)
        if found is nothing:
            return found
        n_bytes = sum(map(len, found))
        self.speed.note(n_bytes, time.perf_counter() - began)
        with self._lock:
            self.read += len(found)
            self.read_bytes += n_bytes
        self.note_known(keys[: len(found)])
        self._note_missing(keys[len(found) : len(found) + 1], failures)
        return found

    def _note_missing(self, keys: Sequence[bytes], failures: int) -> None:
        """Note that blocks are not there, unless the store has failed since."""
        if keys and self._failures() == failures:
            self.notices.removed(keys)
            self._is_gone(keys)

    def obstacle(self) -> str:
        """Return why no block of a folder can be of use, in words; empty where some may be.

        Servers and buckets are not asked: listing them may take long.
        """
        if self._obstacle is None:
            self._obstacle, none = "", set[str]()
            if self.medium == "disk":
                found = self._call(lambda: self.sealed.differences(_N_SAMPLES), none)
                if found and "" not in found:
                    self._obstacle = "a folder has blocks " + " and ".join(sorted(found))
        return self._obstacle

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used."""
        self._call(lambda: self.sealed.touch(keys), None)

    # Writing --------------------------------------------------------------------------------

    def unknown(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether it is worth writing: not when it was there just now."""
        now = time.monotonic()
        with self._lock:
            return [abs(self._known.get(key, 0.0)) <= now for key in keys]

    def _is_gone(self, keys: Iterable[bytes]) -> None:
        """Let all be written again where a known one is gone: more may have gone with it."""
        with self._lock:
            if any(self._known.get(key, 0.0) > 0 for key in keys):
                self._known.clear()

    def note_known(self, keys: Iterable[bytes], *, are_there: bool = True) -> None:
        """Remember for a while that blocks are there, or (below 0) that they were offered."""
        until = (time.monotonic() + KNOWN_SECONDS) * (1 if are_there else -1)
        with self._lock:
            for key in keys:
                self._known[key] = until
                self._known.move_to_end(key)
            for _ in range(len(self._known) - KNOWN):
                self._known.popitem(last=False)

    def put(self, items: Sequence[tuple[bytes, Buffer]], prompt: NamedPrompt | None = None) -> None:
        """Store what is not there yet; the prompt has the names of full blocks, for events."""
        keys = [key for key, _ in items]
        there = self.present(keys)
        new = [item for item, known in zip(items, there, strict=True) if not known]
        n = self._call(lambda: max(0, min(len(new), int(self.sealed.put(new)))), -1) if new else 0
        if n < 0:
            return
        with self._lock:
            self.written += n
            size = sum(memoryview(data).nbytes for _, data in new)
            self.written_bytes += size * n // max(1, len(new))
        # What was not stored is offered again after a while, not at each turn.
        self.note_known(keys, are_there=n == len(new))
        if prompt is not None:
            there = self.present(keys) if n < len(new) else [True] * len(keys)
            found = {key for key, is_there in zip(keys, there, strict=True) if is_there}
            self.notices.stored(prompt, [i for i, x in enumerate(prompt.names) if x in found])
        self._look_around()

    def _look_around(self) -> None:
        """Look for known blocks that are gone: a full store evicts."""
        while self.n_probes >= LOOK:
            failures = self._failures()
            keys = self.notices.oldest()
            there = self.present(keys)
            if self._failures() != failures or False not in there:
                return
            gone = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            self.notices.removed(gone)
            self._is_gone(gone)

    def refuse(self, keys: Sequence[bytes]) -> None:
        """Count blocks whose content is wrong; they can be written again once they are removed."""
        self._is_gone(keys)
        with self._lock:
            self.refused += len(keys)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove blocks."""
        self._is_gone(keys)
        self._call(lambda: self.sealed.discard(keys), 0)
        self.notices.removed(keys)

    def close(self) -> None:
        """Close the store, where it is the cache's own."""
        if self.owned:
            self._call(self.sealed.close, None)

    def _failures(self) -> int:
        """Return how often the store gave no answer: then nothing is known to be gone."""
        counters = self.sealed.counters
        return self.raised + counters.failed + counters.timed_out + counters.skipped

    def _call(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        """Ask the store. A store of this package raises nothing; errors of any other end here."""
        try:
            return ask()
        except Exception as error:
            self.raised += 1
            if self.raised == 1:
                _log.warning("a store raised: %r: %s", self.sealed.store, error)
            return otherwise

    def stats(self, pending: int, pending_bytes: int, dropped: int) -> TierStats:
        """Return the figures so far."""
        counters = self.sealed.counters
        return TierStats(
            medium=self.medium,
            store=repr(self.sealed.store),
            read=self.read,
            read_bytes=self.read_bytes,
            written=self.written,
            written_bytes=self.written_bytes,
            pending=pending,
            pending_bytes=pending_bytes,
            dropped=dropped,
            rejected=sum(self.sealed.rejections.values()),
            refused=self.refused,
            failed=self.raised + counters.failed,
            timed_out=counters.timed_out,
            skipped=counters.skipped,
            too_slow=self.too_slow,
            full=counters.full,
            denied=counters.denied,
        )


class Notices:
    """Send `BlockStored` once for what a tier has, and `BlockRemoved` when it is gone.

    Any thread may call. Events of one tier go out in their order, by one thread at a time, and no
    lock is held then: a callback may call the cache.
    """

    def __init__(self, medium: str, sink: Sink) -> None:
        self.medium = _MEDIA.get(medium, "EXTERNAL")
        self._sink = sink
        # And whether its event was withdrawn: it is said again when it is used again.
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._waiting: deque[CacheEvent | Stored] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def stored(self, prompt: NamedPrompt, blocks: Iterable[int]) -> None:
        """Note that blocks of a prompt are there, by their index."""
        with self._lock:
            begin = end = 0
            for at in blocks:
                is_known = self._known.get(prompt.names[at]) is False
                self._known[prompt.names[at]] = False
                self._known.move_to_end(prompt.names[at])
                if is_known:
                    continue
                if at != end:
                    self._note(prompt, begin, end)
                    begin = at
                end = at + 1
            self._note(prompt, begin, end)
            old = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - MAX_BLOCKS)]
            if old:
                self._waiting.append(BlockRemoved(tuple(old), self.medium))
        self._send()

    def _note(self, prompt: NamedPrompt, begin: int, end: int) -> None:
        if begin < end:
            size = prompt.block_size
            parent = prompt.names[begin - 1] if begin else None
            text = prompt.text(begin * size, end * size)
            root = parent or prompt.root
            self._waiting.append(Stored(root, parent, text, size, prompt.namespace, self.medium))

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are not there, or not right."""
        with self._lock:
            gone = tuple(key for key in keys if self._known.pop(key, None) is not None)
            if gone:
                self._waiting.append(BlockRemoved(gone, self.medium))
        self._send()

    def oldest(self) -> list[bytes]:
        """Return some that were noted or used longest ago; the next call returns the next ones."""
        with self._lock:
            keys = list(islice(self._known, LOOK))
            for key in keys:
                self._known.move_to_end(key)
            return keys

    def forget(self) -> None:
        """Forget what was sent, once the events told that everything was cleared."""
        with self._lock:
            self._known.clear()

    def say_again(self, keys: Iterable[bytes]) -> None:
        """Say of some blocks that they are there when they are used again; and if they go."""
        wanted = set(keys)
        with self._lock:
            self._known.update((key, True) for key in self._known.keys() & wanted)

    def _send(self) -> None:
        """Send the waiting events in their order: by one thread at a time, until none is left."""
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    self._sink(self._waiting.popleft())
            finally:
                self._sending.release()
