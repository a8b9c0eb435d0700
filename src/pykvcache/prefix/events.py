"""Events of a cache, named after vLLM's: blocks stored and removed, for routers and replays."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

from pykvcache.prefix.block_hash import TOKEN_SIZE, block_names

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheEvent",
    "EventLog",
    "Lookup",
    "Stored",
]

_log = logging.getLogger("pykvcache.prefix")
T = TypeVar("T")

#: Bytes of an event without hashes and tokens, and of a hash.
_EVENT_BYTES: Final = 700
_NAME_BYTES: Final = 80
_MEMORY: Final = "CPU"


@dataclass(frozen=True)
class BlockStored:
    """Consecutive blocks were stored.

    Attributes
    ----------
    block_hashes
        Hashes of the blocks, 32 bytes each.
    parent_block_hash
        Hash of the block before the first; None at the beginning of a prompt.
    token_ids
        Their tokens.
    block_size
        Tokens per block.
    medium
        ``"CPU"`` is the cache's RAM, ``"DISK"`` a tier on this machine, ``"EXTERNAL"`` any other
        tier. A cache reports each block that it writes to a tier or loads from it, once; caches
        that share a tier each report it.
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

    A cache notices that a tier has lost blocks when it looks for them or next writes to the tier.
    """

    block_hashes: tuple[bytes, ...]
    medium: str = _MEMORY
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class AllBlocksCleared:
    """The cache is empty.

    Iterating over the log also yields it in place of events that were dropped.
    """

    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Lookup:
    """A prompt was looked up: what `EventLog.subscribe_lookups` reports.

    Attributes
    ----------
    block_hashes
        Hashes of its full blocks, cached or not; only those before an adapter is activated.
    n_tokens
        Its number of tokens, those after the last full block included.
    block_size
        Tokens per block.
    """

    block_hashes: tuple[bytes, ...]
    n_tokens: int
    block_size: int
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A `BlockStored` whose blocks are hashed when it is read."""

    root: bytes  # hash from which the chain continues: of the block before, or of the root
    parent: bytes | None  # hash of the block before; None at the beginning of a prompt
    tokens: bytes  # of all the blocks, as little-endian 32-bit integers
    block_size: int
    space: str
    medium: str = _MEMORY
    time: float = field(default_factory=time.time)

    @property
    def names(self) -> tuple[bytes, ...]:
        """The hashes of the blocks."""
        return tuple(block_names(self.root, self.tokens, self.block_size * TOKEN_SIZE))

    def event(self) -> BlockStored:
        """Return the public event."""
        ids = tuple(array("I", self.tokens))
        return BlockStored(
            self.names, self.parent, ids, self.block_size, self.medium, time=self.time
        )


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """The unread events of a cache: iterate to take them out, or subscribe a callback.

    A callback runs at the end of the call that caused the event, while the cache is locked; for
    events of tiers, in any thread. It may call the cache and its sequences, and should return
    quickly. Its exceptions are logged and suppressed.

    Unread events beyond ``max_bytes``, part of the cache's ``ram_bytes``, are replaced by one
    `AllBlocksCleared`, the oldest first. ``later(call)`` returns True if it will run ``call``
    itself once no change is in progress.
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
        self._has_gap = False  # whether events were dropped before the queued ones
        self._nbytes = 0
        self._lock = threading.RLock()  # a signal handler may clear the cache while it is held

    @property
    def nbytes(self) -> int:
        """Bytes of the unread events."""
        return self._nbytes

    def subscribe(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Call a function for every event from now on; return a function that unsubscribes it."""
        return _joined(self._callbacks, callback)

    def subscribe_lookups(self, callback: Callable[[Lookup], object]) -> Callable[[], None]:
        """Call a function for every lookup from now on; return a function that unsubscribes it.

        Lookups are not queued. Without a subscriber no prompt is hashed for them.
        """
        return _joined(self.listeners, callback)

    def looked_up(self, lookup: Lookup) -> None:
        """Call the subscribers of lookups."""
        self._say(self.listeners, lookup)

    def _say(self, callbacks: list[Callable[[T], object]], event: T) -> None:
        call = partial(_call, callbacks, event)
        if callbacks and not self._later(call):
            call()

    def __iter__(self) -> Iterator[CacheEvent]:
        event: CacheEvent | Stored
        while True:
            with self._lock:
                if self._has_gap:
                    self._has_gap, event = False, AllBlocksCleared()
                elif self._events:
                    event, size = self._events.popleft()
                    self._nbytes -= size
                else:
                    return
            yield _public(event)

    def __len__(self) -> int:
        return len(self._events) + self._has_gap

    def add(self, event: CacheEvent | Stored) -> None:
        """Queue an event, and call the subscribers."""
        size = _size(event)
        with self._lock:
            self._events.append((event, size))
            self._nbytes += size
            while self._nbytes > self.max_bytes:
                self._has_gap = True
                self._nbytes -= self._events.popleft()[1]
        if self._callbacks:
            self._say(self._callbacks, _public(event))

    def withdraw(self, space: str | None) -> set[tuple[str, bytes]]:
        """Drop the unread `BlockStored` events of a space, or of all, and the removals of theirs.

        Returns medium and hash of the blocks in tiers whose event was dropped.
        """
        kept, unread = deque[tuple[CacheEvent | Stored, int]](), set[tuple[str, bytes]]()
        with self._lock:
            for event, size in self._events:
                if isinstance(event, Stored) and space in (None, event.space):
                    unread.update((event.medium, key) for key in event.names)
                    continue
                # Removals from tiers stay: subscribers have received the events dropped here.
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
        with contextlib.suppress(ValueError):  # already unsubscribed
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
    """Return the approximate bytes of an unread event, which keeps hashes of evicted blocks."""
    if isinstance(event, AllBlocksCleared):
        return _EVENT_BYTES
    if isinstance(event, Stored):
        return _EVENT_BYTES + len(event.tokens)
    return _EVENT_BYTES + _NAME_BYTES * len(event.block_hashes)
