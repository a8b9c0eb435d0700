"""What enters and leaves a cache, as vLLM reports it: for routers, and for replays."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

_log = logging.getLogger("pykvcache.prefix")

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "CacheEvent", "EventLog"]


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
        Where they are: ``"CPU"``, ``"DISK"`` or ``"EXTERNAL"``.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = "CPU"
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks went: evicted, or cleared with their namespace."""

    block_hashes: tuple[bytes, ...]
    medium: str = "CPU"
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is left."""

    time: float = field(default_factory=time.time)


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """The last events of a cache: iterate to take them out, or subscribe to be called.

    A callback is called while the cache is locked, in the thread that caused the event: it should
    note the event and return. What it raises is logged, and goes no further.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=size)
        self._callbacks: list[Callable[[CacheEvent], object]] = []

    def subscribe(self, callback: Callable[[CacheEvent], object]) -> Callable[[], None]:
        """Call a function for every event from now on; returns what ends that."""
        if not callable(callback):
            raise TypeError(f"callback must be callable, not {type(callback).__name__}")
        self._callbacks.append(callback)

        def stop() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return stop

    def __iter__(self) -> Iterator[CacheEvent]:
        while self._events:
            try:
                yield self._events.popleft()
            except IndexError:  # another thread took it
                return

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: CacheEvent) -> None:
        """Note an event, and call who subscribed."""
        self._events.append(event)
        for callback in list(self._callbacks):
            try:
                callback(event)
            except Exception:
                _log.exception("a subscriber of cache events failed")


def as_dict(event: CacheEvent) -> dict[str, Any]:
    """Return an event as plain values, with the class in ``type``."""
    return {"type": type(event).__name__, **asdict(event)}
