"""Events of a cache, as vLLM reports them: what was stored and removed, for routers and replays."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from pykvcache.prefix.block_hash import TOKEN_SIZE, block_names

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheEvent",
    "EventLog",
    "Lookup",
    "Stored",
    "as_dict",
]

_log = logging.getLogger("pykvcache.prefix")
T = TypeVar("T")

#: Bytes of an event without names and tokens, and of a name.
_EVENT_BYTES: Final = 700
_NAME_BYTES: Final = 80
_MEMORY: Final = "CPU"


@dataclass(frozen=True)
class BlockStored:
    """Consecutive blocks were stored.

    Attributes
    ----------
    block_hashes
        Names of the blocks, 32 bytes each.
    parent_block_hash
        Name of the block before the first; None at the beginning of a prompt.
    token_ids
        Their tokens.
    block_size
        Tokens per block.
    medium
        Where they are: ``"CPU"`` is the cache's memory, ``"DISK"`` a tier of this machine,
        ``"EXTERNAL"`` any other tier. A cache reports what it wrote to tiers or took from them,
        once; several caches that share a tier report it each.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = _MEMORY
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks were removed: evicted, forgotten, or cleared with their namespace.

    That a tier has lost blocks is noticed when they are looked for, or with the next write.
    """

    block_hashes: tuple[bytes, ...]
    medium: str = _MEMORY
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is left.

    An iterator over the log also gets it in the place of events that were forgotten.
    """

    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Lookup:
    """A prompt was looked up: what `EventLog.subscribe_lookups` reports.

    Attributes
    ----------
    block_hashes
        Names of its full blocks, known or not; only those before an adapter is activated.
    n_tokens
        Its tokens; those after the last full block have no name.
    block_size
        Tokens per block.
    """

    block_hashes: tuple[bytes, ...]
    n_tokens: int
    block_size: int
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A `BlockStored` whose blocks are named when it is read.

    Attributes
    ----------
    root
        What the first name is computed from: the name of the block before it, or of the root.
    parent
        Name of the block before the first; None at the beginning of a prompt.
    tokens
        Of all the blocks, as little-endian 32-bit integers.
    """

    root: bytes
    parent: bytes | None
    tokens: bytes
    block_size: int
    namespace: str
    medium: str = _MEMORY
    time: float = field(default_factory=time.time)

    @property
    def names(self) -> tuple[bytes, ...]:
        """The names of the blocks."""
        return tuple(block_names(self.root, self.tokens, self.block_size * TOKEN_SIZE))

    def event(self) -> BlockStored:
        """Return the event."""
        ids = tuple(array("I", self.tokens))
        return BlockStored(
            self.names, self.parent, ids, self.block_size, self.medium, time=self.time
        )


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """The last events of a cache: iterate to take them out, or subscribe to be called.

    A callback is called at the end of the call that caused the event, while the cache is locked;
    of events that are about tiers, in any thread. It should note the event and return. It may call
    the cache and its sequences. What it raises is logged, and goes no further.

    Parameters
    ----------
    max_bytes
        Upper bound on the memory of events that wait to be taken out: the oldest are forgotten, and
        `AllBlocksCleared` stands in their place. They are part of the cache's ``ram_bytes``.
    later
        Is given a call, and returns True where it makes it later, when no change is under way.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 20,
        *,
        later: Callable[[Callable[[], object]], bool] = lambda call: False,
    ) -> None:
        self._events: deque[tuple[CacheEvent | Stored, int]] = deque()  # and their bytes
        self._callbacks: list[Callable[[CacheEvent], object]] = []
        self.listeners: list[Callable[[Lookup], object]] = []
        #: Upper bound on `nbytes`.
        self.max_bytes = max_bytes
        self._later = later
        self._has_gap = False  # whether events were forgotten before those that wait
        self._nbytes = 0
        self._lock = threading.RLock()  # a signal handler may clear the cache while it is held

    @property
    def nbytes(self) -> int:
        """Bytes of the events that wait."""
        return self._nbytes

    def subscribe(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Call a function for every event from now on; returns what ends that."""
        return _joined(self._callbacks, callback)

    def subscribe_lookups(self, callback: Callable[[Lookup], object]) -> Callable[[], None]:
        """Call a function for every prompt that is looked up from now on; returns what ends that.

        Lookups do not wait to be taken out. Without a subscriber no prompt is named for them.
        """
        return _joined(self.listeners, callback)

    def looked_up(self, lookup: Lookup) -> None:
        """Call the functions that are subscribed to lookups."""
        self._say(self.listeners, lookup)

    def _say(self, callbacks: list[Callable[[T], object]], event: T) -> None:
        call = partial(_call, callbacks, event)
        if callbacks and not self._later(call):
            call()

    def __iter__(self) -> Iterator[CacheEvent]:
        while (event := self._next()) is not None:
            yield _public(event)

    def __len__(self) -> int:
        return len(self._events) + self._has_gap

    def _next(self) -> CacheEvent | Stored | None:
        with self._lock:
            if self._has_gap:
                self._has_gap = False
                return AllBlocksCleared()
            if not self._events:
                return None
            event, size = self._events.popleft()
            self._nbytes -= size
            return event

    def add(self, event: CacheEvent | Stored) -> None:
        """Let an event wait to be taken out, and call the subscribers."""
        size = _size(event)
        with self._lock:
            self._events.append((event, size))
            self._nbytes += size
            while self._nbytes > self.max_bytes:
                self._has_gap = True
                self._nbytes -= self._events.popleft()[1]
        if self._callbacks:
            self._say(self._callbacks, _public(event))

    def withdraw(self, namespace: str | None) -> set[tuple[str, bytes]]:
        """Forget the tokens of a namespace, or of all, that wait; a reader misses nothing else.

        Blocks that came and went in between are not reported; those that a reader has heard of
        are still reported as removed.

        Returns
        -------
        set of (str, bytes)
            Medium and name of blocks in tiers of which an event was dropped.
        """
        kept, unread = deque[tuple[CacheEvent | Stored, int]](), set[tuple[str, bytes]]()
        with self._lock:
            for event, size in self._events:
                if isinstance(event, Stored) and namespace in (None, event.namespace):
                    unread.update((event.medium, key) for key in event.names)
                    continue
                # Of tiers all stay: subscribers were told of what is dropped here.
                if isinstance(event, BlockRemoved) and event.medium == _MEMORY:
                    names = dict.fromkeys((_MEMORY, key) for key in event.block_hashes)
                    left = tuple(key for one, key in names if (one, key) not in unread)
                    unread.difference_update(names)
                    if not left:
                        continue
                    event = replace(event, block_hashes=left)
                    size = _size(event)
                kept.append((event, size))
            self._events, self._nbytes = kept, sum(size for _, size in kept)
        return {one for one in unread if one[0] != _MEMORY}


def _joined(
    all_: list[Callable[[T], object]], callback: Callable[[T], object]
) -> Callable[[], None]:
    if not callable(callback):
        raise TypeError(f"callback must be callable, not {type(callback).__name__}")
    all_.append(callback)

    def stop() -> None:
        with contextlib.suppress(ValueError):  # it was removed before
            all_.remove(callback)

    return stop


def _call(callbacks: list[Callable[[T], object]], event: T) -> None:
    for callback in list(callbacks):
        try:
            callback(event)
        except Exception:
            _log.exception("a subscriber of cache events failed")


def _public(event: CacheEvent | Stored) -> CacheEvent:
    return event.event() if isinstance(event, Stored) else event


def _size(event: CacheEvent | Stored) -> int:
    """Return about how many bytes a waiting event takes; names outlive their blocks in it."""
    if isinstance(event, AllBlocksCleared):
        return _EVENT_BYTES
    if isinstance(event, Stored):
        return _EVENT_BYTES + len(event.tokens)
    return _EVENT_BYTES + _NAME_BYTES * len(event.block_hashes)


def as_dict(event: CacheEvent | Lookup) -> dict[str, Any]:
    """Return an event as values that JSON holds: the class in ``type``, and names in hex."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        return [plain(x) for x in value] if isinstance(value, tuple) else value

    return {"type": type(event).__name__} | {k: plain(v) for k, v in asdict(event).items()}
