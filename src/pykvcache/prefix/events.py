"""What enters and leaves a cache, as vLLM reports it: for routers, and for replays."""

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

from pykvcache.prefix.blocks import block_names

_log = logging.getLogger("pykvcache.prefix")
T = TypeVar("T")

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "CacheEvent", "EventLog", "Lookup"]


#: What an event takes beside names and tokens, and a name.
_EVENT_BYTES: Final = 700
_NAME_BYTES: Final = 80


@dataclass(frozen=True)
class BlockStored:
    """Blocks that follow each other came in.

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
        ``"EXTERNAL"`` any other tier. Of tiers a cache tells what it wrote to them or took from
        them, once; several caches that share one tell it each.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = "CPU"
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks were dropped: evicted, or cleared with their namespace.

    That a tier has lost blocks is noticed when they are looked for, or with what is written next.
    """

    block_hashes: tuple[bytes, ...]
    medium: str = "CPU"
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is left; or, after a call that Ctrl-C cut short, what follows says what is left.

    To who takes events out, also in the place of those that were forgotten before.
    """

    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Lookup:
    """A prompt was looked up: what `EventLog.subscribe_lookups` reports, and nothing else does.

    Attributes
    ----------
    block_hashes
        Names of its full blocks, known or not.
    n_tokens
        Its tokens; those after the last full block have no name.
    block_size
        Tokens per block.
    """

    block_hashes: tuple[bytes, ...]
    n_tokens: int
    block_size: int
    time: float = field(default_factory=time.time)


@dataclass(slots=True, eq=False)
class _Stored:
    """What `BlockStored` is made of when somebody reads it."""

    root: bytes
    parent: bytes | None
    tokens: bytes
    block_size: int
    time: float

    @property
    def names(self) -> tuple[bytes, ...]:
        return tuple(block_names(self.root, self.tokens, 4 * self.block_size))


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_Packed: TypeAlias = CacheEvent | _Stored
_MEMORY = "CPU"
#: An event, its bytes, and the namespace whose tokens it names.
_Waiting: TypeAlias = tuple[_Packed, int, str | None]


class EventLog:
    """The last events of a cache: iterate to take them out, or subscribe to be called.

    A callback is called at the end of the call that caused the event, while the cache is locked;
    of events that are about tiers, in any thread. It should note the event and return. It may call
    the cache and its sequences: nobody is in the middle of anything. What it raises is logged, and
    goes no further; what Ctrl-C cuts short is said again.

    Parameters
    ----------
    max_bytes
        Most memory of events that wait to be taken out: the oldest are forgotten, and
        `AllBlocksCleared` stands in their place. They are part of what ``ram_bytes`` of the cache
        bounds.
    has_room
        Whether so much is kept free for them. Tiers tell what they wrote at any time, also when
        nothing can leave for it.
    later
        Is given a call, and returns True where it makes it later, when nobody is in the middle of
        something.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 20,
        *,
        has_room: bool = False,
        later: Callable[[Callable[[], object]], bool] = lambda call: False,
    ) -> None:
        self._events: deque[_Waiting] = deque()
        self._callbacks: list[Callable[[CacheEvent], object]] = []
        self._listeners: list[Callable[[Lookup], object]] = []
        self._max_bytes = max_bytes
        self._has_room = has_room
        self._later = later
        self._has_gap = False  # whether some were forgotten before what waits
        self._nbytes: int | None = 0  # None where an interrupt came: counted again
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the events that wait."""
        if (n := self._nbytes) is None:
            with self._lock:
                n = self._counted()
                self._nbytes = n
        return n

    def _counted(self) -> int:
        """Return the bytes of what waits, of which nobody knows until they are set again."""
        n, self._nbytes = self._nbytes, None
        return sum(size for _, size, _ in self._events) if n is None else n

    @property
    def room(self) -> int:
        """Bytes that are kept free for events to come."""
        return max(0, self._max_bytes - self.nbytes) if self._has_room else 0

    def subscribe(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Call a function for every event from now on; returns what ends that."""
        return _joined(self._callbacks, callback)

    def _unsubscribe(self, callback: Callable[[CacheEvent], object]) -> None:
        _remove(self._callbacks, callback)

    def subscribe_lookups(self, callback: Callable[[Lookup], object]) -> Callable[[], None]:
        """Call a function for every prompt that is looked up from now on; returns what ends that.

        Lookups do not wait to be taken out. Without a subscriber no prompt is named for them.
        """
        return _joined(self._listeners, callback)

    @property
    def hears_lookups(self) -> bool:
        """Whether anybody subscribed to lookups."""
        return bool(self._listeners)

    def looked_up(self, lookup: Lookup) -> None:
        """Call who subscribed to lookups."""
        self._say(self._listeners, lookup)

    def _say(self, callbacks: list[Callable[[T], object]], event: T) -> None:
        call = partial(_call, callbacks, event)
        if callbacks and not self._later(call):
            call()

    def __iter__(self) -> Iterator[CacheEvent]:
        while (event := self._next()) is not None:
            yield _unpacked(event)

    def __len__(self) -> int:
        return len(self._events) + self._has_gap

    def _next(self) -> _Packed | None:
        with self._lock:
            if self._has_gap:
                self._has_gap = False
                return AllBlocksCleared()
            return self._taken()

    def _taken(self) -> _Packed | None:
        """Take out the oldest event; the lock is held."""
        if not self._events:
            return None
        n = self._counted()
        event, size, _ = self._events.popleft()
        self._nbytes = n - size
        return event

    def add(self, event: CacheEvent, namespace: str | None = None) -> None:
        """Note an event, and call who subscribed; `namespace`: whose tokens it names."""
        self._put(_packed(event), namespace)
        self._say(self._callbacks, event)

    def add_stored(
        self,
        root: bytes,
        parent: bytes | None,
        tokens: bytes,
        block_size: int,
        namespace: str | None,
    ) -> None:
        """Note that blocks came in, as `add` does; they are named when somebody reads it.

        Parameters
        ----------
        root
            What the first name is computed from: the parent's name, or that of the root.
        """
        packed = _Stored(root, parent, tokens, block_size, time.time())
        self._put(packed, namespace)
        if self._callbacks:
            self._say(self._callbacks, _unpacked(packed))

    def _put(self, packed: _Packed, namespace: str | None) -> None:
        """Let an event wait to be taken out; the oldest ones go where it is too much."""
        size = _size(packed)
        waiting = packed, size, namespace
        if size <= self._max_bytes:
            with self._lock:
                n = self._counted()
                self._events.append(waiting)
                self._nbytes = n + size
            while self.nbytes > self._max_bytes and self._forget_oldest():
                pass
        else:
            self._forget_all()

    def _forget_oldest(self) -> bool:
        with self._lock:
            # In one hold: who reads meanwhile would take the gap before the event is gone.
            self._has_gap = True
            return self._taken() is not None

    def _forget_all(self) -> None:
        """Forget what waits before an event that there is no room for."""
        while self._forget_oldest():
            pass

    def withdraw(self, namespace: str | None) -> set[tuple[str, bytes]]:
        """Forget the tokens of a namespace, or of all, that wait; who reads on misses nothing.

        Events of blocks that came and went meanwhile are dropped; those that were read about
        before are still reported as removed.

        Returns
        -------
        set of (str, bytes)
            Medium and name of blocks in tiers of which an event was dropped.
        """
        with self._lock:
            kept, unread = _without(list(self._events), namespace)
            n = sum(size for _, size, _ in kept)
            self._events, self._nbytes = kept, n
        return {one for one in unread if one[0] != _MEMORY}


def _without(
    waiting: list[_Waiting], namespace: str | None
) -> tuple[deque[_Waiting], set[tuple[str, bytes]]]:
    """Return events without those that name tokens of a namespace, or of any; and their blocks."""
    kept, unread = deque[_Waiting](), set[tuple[str, bytes]]()
    for event, size, space in waiting:
        if space is not None and namespace in (None, space):
            assert isinstance(event, (BlockStored, _Stored))
            if isinstance(event, _Stored):
                unread.update((_MEMORY, key) for key in event.names)
            else:
                unread.update((event.medium, key) for key in event.block_hashes)
        elif isinstance(event, BlockRemoved) and event.medium == _MEMORY:
            # Of tiers all stay: who subscribed was told of what is dropped here.
            names = [(event.medium, key) for key in event.block_hashes]
            left = tuple(key for medium, key in names if (medium, key) not in unread)
            unread.difference_update(names)
            if len(left) < len(names):
                event = replace(event, block_hashes=left)
                size = _size(event)
            if left:
                kept.append((event, size, space))
        else:
            kept.append((event, size, space))
    return kept, unread


def _joined(
    all_: list[Callable[[T], object]], callback: Callable[[T], object]
) -> Callable[[], None]:
    if not callable(callback):
        raise TypeError(f"callback must be callable, not {type(callback).__name__}")
    all_.append(callback)

    return lambda: _remove(all_, callback)


def _remove(all_: list[Callable[[T], object]], callback: Callable[[T], object]) -> None:
    with contextlib.suppress(ValueError):  # it is not there, or another thread was faster
        all_.remove(callback)


def _call(callbacks: list[Callable[[T], object]], event: T) -> None:
    for callback in list(callbacks):
        try:
            callback(event)
        except Exception:
            _log.exception("a subscriber of cache events failed")


def _packed(event: CacheEvent) -> CacheEvent:
    """Return an event with its tokens in 4 bytes each, which as integers take 36."""
    if isinstance(event, BlockStored):
        return replace(event, token_ids=array("I", event.token_ids))  # type: ignore[arg-type]
    return event


def _unpacked(event: _Packed) -> CacheEvent:
    if isinstance(event, _Stored):
        ids = tuple(array("I", event.tokens))
        return BlockStored(event.names, event.parent, ids, event.block_size, time=event.time)
    if isinstance(event, BlockStored):
        return replace(event, token_ids=tuple(event.token_ids))
    return event


def _size(event: _Packed) -> int:
    """Return about how many bytes a packed event takes; names outlive their blocks in it."""
    if isinstance(event, AllBlocksCleared):
        return _EVENT_BYTES
    if isinstance(event, _Stored):
        return _EVENT_BYTES + len(event.tokens)
    n = _EVENT_BYTES + _NAME_BYTES * len(event.block_hashes)
    return n + 4 * len(event.token_ids) if isinstance(event, BlockStored) else n


def as_dict(event: CacheEvent | Lookup) -> dict[str, Any]:
    """Return an event as values that JSON holds: the class in ``type``, and names in hex."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        return [plain(x) for x in value] if isinstance(value, tuple) else value

    return {"type": type(event).__name__} | {k: plain(v) for k, v in asdict(event).items()}
