"""One tier: a sealed store, its known keys, its speed, its counters and its events."""

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
from pykvcache._ranges import Range, union
from pykvcache.errors import StoreError, shown
from pykvcache.prefix.block_hash import NamedPrompt
from pykvcache.prefix.events import BlockRemoved, CacheEvent, Stored
from pykvcache.prefix.stores.base import BlockStore
from pykvcache.prefix.stores.envelope import Envelope, SealedStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["EvaluationTime", "Notices", "Rate", "Sink", "Tier", "TierSpeed", "TierStats"]

_T = TypeVar("_T")

_log = logging.getLogger("pykvcache.prefix")

#: Bytes per read request.
GROUP_BYTES = 2 << 20

#: How many keys of a store are remembered as present, and for how many seconds.
KNOWN, KNOWN_SECONDS = 1 << 15, 60.0

# Number of blocks sampled to find out why none can be used.
_N_SAMPLES = 8

# Initial estimates: seconds per request, and per byte. Optimistic: waiting in vain costs a request
# a twentieth of its evaluation, not reading costs it all.
_SPEED = {"disk": (5e-4, 1 / 1.5e9), "remote": (1e-3, 1 / 1e9)}


#: Maximum number of announced blocks per tier; forgetting one publishes `BlockRemoved` for it.
MAX_BLOCKS = 1 << 15

#: Number of announced blocks whose presence is checked at once.
LOOK = 64

_MEDIA = {"disk": "DISK"}

#: A function that receives events.
Sink: TypeAlias = Callable[[CacheEvent | Stored], object]


@dataclass(frozen=True)
class TierStats:
    """Counters of one tier since the cache was created. They count records unless stated otherwise.

    ``rejected`` are damaged, truncated, foreign or forged; ``refused`` are intact, but hold values
    such as NaN.
    """

    medium: str  # "disk" or "remote"
    store: str  # the store's repr
    read: int = 0
    read_bytes: int = 0
    written: int = 0  # records that the store lacked
    written_bytes: int = 0
    pending: int = 0  # records queued for writing
    pending_bytes: int = 0
    dropped: int = 0  # not written because the queue was full
    rejected: int = 0
    refused: int = 0
    failed: int = 0  # requests
    timed_out: int = 0  # requests
    skipped: int = 0  # requests not made because others had failed
    too_slow: int = 0  # prompts that are evaluated faster than the tier is read
    full: int = 0  # not written because the disk or the server is full
    denied: int = 0  # not written because it denies access


class Tier:
    """A store below RAM. Errors of the store are counted and logged once, not raised.

    An ``owned`` store is closed with it. Raises `StoreError` or TypeError if ``medium`` or
    ``n_probes`` of the store is invalid.
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
        self._obstacle: str | None = None  # unknown until the store is sampled
        self._lock = threading.Lock()

    # Reading --------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys the store has."""
        if not keys:
            return 0
        began, failures = time.perf_counter(), self._failures()
        n = self._call(lambda: max(0, min(len(keys), int(self.sealed.contains(keys)))), 0)
        self.speed.note(0, time.perf_counter() - began)
        self._note_missing(keys[n : n + 1], failures)
        return n

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the store has it; only the first `n_probes` are checked."""
        asked, there = keys[: self.n_probes], list[bool]()
        if asked:
            there = self._call(lambda: [bool(one) for one in self.sealed.present(asked)], there)
        self._is_gone(key for key, is_there in zip(asked, there, strict=False) if not is_there)
        return (there + [False] * len(keys))[: len(keys)]

    def get(self, keys: Sequence[bytes], size: int, *, exact: bool = False) -> list[memoryview]:
        """Return the contents of the leading run of intact records of at most ``size`` bytes."""
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
        """Note that blocks are missing, unless the store has failed since."""
        if keys and self._failures() == failures:
            self.notices.removed(keys)
            self._is_gone(keys)

    def obstacle(self) -> str:
        """Return why no block of a folder can be used, as a text; empty if some may be.

        Only folders are sampled: listing a server may take long.
        """
        if self._obstacle is None:
            self._obstacle, none = "", set[str]()
            if self.medium == "disk":
                found = self._call(lambda: self.sealed.differences(_N_SAMPLES), none)
                if found and "" not in found:
                    self._obstacle = "a folder has blocks " + " and ".join(sorted(found))
        return self._obstacle

    def touch(self, keys: Sequence[bytes]) -> None:
        """Refresh the last-use time of records."""
        self._call(lambda: self.sealed.touch(keys), None)

    # Writing --------------------------------------------------------------------------------

    def unknown(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether to write it: False if it was seen in the last minute."""
        now = time.monotonic()
        with self._lock:
            return [abs(self._known.get(key, 0.0)) <= now for key in keys]

    def _is_gone(self, keys: Iterable[bytes]) -> None:
        """Forget all known keys if one of these was known: others may be missing, too."""
        with self._lock:
            if any(self._known.get(key, 0.0) > 0 for key in keys):
                self._known.clear()

    def note_known(self, keys: Iterable[bytes], *, are_there: bool = True) -> None:
        """Remember for a while that keys are present, or (as negative times) were offered."""
        until = (time.monotonic() + KNOWN_SECONDS) * (1 if are_there else -1)
        with self._lock:
            for key in keys:
                self._known[key] = until
                self._known.move_to_end(key)
            for _ in range(len(self._known) - KNOWN):
                self._known.popitem(last=False)

    def put(self, items: Sequence[tuple[bytes, Buffer]], prompt: NamedPrompt | None = None) -> None:
        """Store the missing records; the prompt has the hashes of full blocks, for events."""
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
        # Records that were not stored are offered again only after a while.
        self.note_known(keys, are_there=n == len(new))
        if prompt is not None:
            there = self.present(keys) if n < len(new) else [True] * len(keys)
            found = {key for key, is_there in zip(keys, there, strict=True) if is_there}
            self.notices.stored(prompt, [i for i, x in enumerate(prompt.names) if x in found])
        self._look_around()

    def _look_around(self) -> None:
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
        """Count records with a wrong content, and forget that they are present."""
        self._is_gone(keys)
        with self._lock:
            self.refused += len(keys)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Remove records."""
        self._is_gone(keys)
        self._call(lambda: self.sealed.discard(keys), 0)
        self.notices.removed(keys)

    def close(self) -> None:
        """Close the store if the cache owns it."""
        if self.owned:
            self._call(self.sealed.close, None)

    def _failures(self) -> int:
        """Return the number of failures, after which a missing answer does not mean removal."""
        counters = self.sealed.counters
        return self.raised + counters.failed + counters.timed_out + counters.skipped

    def _call(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        """Call the store; count an exception, which only other packages' stores raise."""
        try:
            return ask()
        except Exception as error:
            self.raised += 1
            if self.raised == 1:
                _log.warning("a store raised: %r: %s", self.sealed.store, error)
            return otherwise

    def stats(self, pending: int, pending_bytes: int, dropped: int) -> TierStats:
        """Return the counters."""
        counters = self.sealed.counters
        own = ("medium", "read", "read_bytes", "written", "written_bytes", "refused", "too_slow")
        shared = ("timed_out", "skipped", "full", "denied")
        return TierStats(
            store=repr(self.sealed.store),
            pending=pending,
            pending_bytes=pending_bytes,
            dropped=dropped,
            rejected=sum(self.sealed.rejections.values()),
            failed=self.raised + counters.failed,
            **{name: getattr(self, name) for name in own},
            **{name: getattr(counters, name) for name in shared},
        )


class Notices:
    """Publishes `BlockStored` once for each block of a tier, and `BlockRemoved` when it is gone.

    Thread-safe. Events of one tier are published in order, by one thread at a time, without a
    lock: a callback may call the cache.
    """

    def __init__(self, medium: str, sink: Sink) -> None:
        self.medium = _MEDIA.get(medium, "EXTERNAL")
        self._sink = sink
        # Block hash -> whether its BlockStored event was withdrawn unread.
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._waiting: deque[CacheEvent | Stored] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def stored(self, prompt: NamedPrompt, blocks: Iterable[int]) -> None:
        """Announce blocks of a prompt, given by index, that were not announced yet."""
        size = prompt.block_size
        with self._lock:
            new = list[Range]()
            for at in blocks:
                if self._known.pop(prompt.names[at], True):
                    new.append((at, at + 1))
                self._known[prompt.names[at]] = False
            for begin, end in union(new):
                parent = prompt.names[begin - 1] if begin else None
                text = prompt.text(begin * size, end * size)
                root = parent or prompt.root
                self._waiting.append(Stored(root, parent, text, size, prompt.space, self.medium))
            old = [self._known.popitem(last=False)[0] for _ in range(len(self._known) - MAX_BLOCKS)]
            if old:
                self._waiting.append(BlockRemoved(tuple(old), self.medium))
        self._send()

    def removed(self, keys: Iterable[bytes]) -> None:
        """Announce the removal of blocks that are missing or wrong."""
        with self._lock:
            gone = tuple(key for key in keys if self._known.pop(key, None) is not None)
            if gone:
                self._waiting.append(BlockRemoved(gone, self.medium))
        self._send()

    def oldest(self) -> list[bytes]:
        """Return the `LOOK` least recently announced or used blocks, and make them the latest."""
        with self._lock:
            keys = list(islice(self._known, LOOK))
            for key in keys:
                self._known.move_to_end(key)
            return keys

    def forget(self) -> None:
        """Forget all announced blocks, after `AllBlocksCleared`."""
        with self._lock:
            self._known.clear()

    def announce_again(self, keys: Iterable[bytes]) -> None:
        """Announce these blocks again at their next use, and announce their removal."""
        wanted = set(keys)
        with self._lock:
            self._known.update((key, True) for key in self._known.keys() & wanted)

    def _send(self) -> None:
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    self._sink(self._waiting.popleft())
            finally:
                self._sending.release()


class Rate:
    """Seconds per unit: the mean over about the last ``span`` units.

    Measurements are weighted by their units, so short ones, dominated by overhead, count little.
    The initial estimate counts as ``n`` units.
    """

    def __init__(self, seconds: float, span: float, n: float = 0.0) -> None:
        self.seconds = seconds
        self.n = n
        self._span = span

    def note(self, units: float, seconds: float) -> None:
        """Add a measurement."""
        self.n = min(self.n + units, self._span)
        self.seconds += min(1.0, units / self.n) * (seconds / units - self.seconds)


class EvaluationTime:
    """How long evaluating tokens takes; the caller holds the sequence pool's lock.

    Long prompts take more time per token, so each power of two of the length has its own rate.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self._unmeasured = seconds_per_token
        self._rates: dict[int, Rate] = {}

    def note(self, begin: int, end: int, seconds: float) -> None:
        """Add the measured time of evaluating the tokens ``[begin, end)``."""
        if end - begin >= 16:
            rate = self._rates.setdefault(end.bit_length(), Rate(0.0, span=4096))
            rate.note(end - begin, seconds)

    @property
    def is_learned(self) -> bool:
        """Whether any evaluation was measured."""
        return bool(self._rates)

    def seconds(self, begin: int, end: int) -> float:
        """Return the estimate for the tokens ``[begin, end)``."""
        if not self._rates:
            return self._unmeasured * (end - begin)
        nearest = min(self._rates, key=lambda bits: abs(bits - end.bit_length()))
        return self._rates[nearest].seconds * (end - begin)


class TierSpeed:
    """How long reading from a store takes: a time per search request, and a time per byte.

    The overhead of requests that read blocks is included in the time per byte.
    """

    def __init__(self, per_request: float, per_byte: float) -> None:
        self._request = Rate(per_request, span=8)
        self._byte = Rate(per_byte, span=16 << 20, n=1 << 20)
        #: Whether any read was timed.
        self.is_measured = False

    def note(self, n_bytes: int, seconds: float) -> None:
        """Add the time of a request that read n_bytes, or of a search if that is 0."""
        if n_bytes:
            self._byte.note(n_bytes, seconds)
            self.is_measured = True
        else:
            self._request.note(1, seconds)

    def seconds(self, n_bytes: int) -> float:
        """Return the estimate for a search, in two requests, and for reading n_bytes."""
        return 2 * self._request.seconds + n_bytes * self._byte.seconds
