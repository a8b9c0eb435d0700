"""MemoryStore: blocks in this process's memory, for tests and as the smallest example."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pykvcache.prefix.stores._arguments import (
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    writable,
)
from pykvcache.prefix.stores.base import BlockStore, StoreEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MemoryStore"]

#: What Python keeps per block beside its content, in bytes: key, time, three objects, two slots.
ENTRY_BYTES = 320


class MemoryStore(BlockStore):
    """Keep blocks in memory, least recently used out first.

    Parameters
    ----------
    max_bytes : int
        Upper bound of everything that is kept, with 320 bytes per block for what surrounds it.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = check_max_bytes(max_bytes)
        self._lock = threading.Lock()
        # The least recently used block comes first.
        self._blocks: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._leases: dict[bytes, float] = {}
        self._size = 0
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        keys = check_keys(keys)
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    @property
    def n_probes(self) -> int:
        """Thousands."""
        return 4096

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Copy the leading run into the buffers; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        done = size = 0
        for key, view in pairs:
            found = self._blocks.get(key)
            if found is None:
                break
            data = found[0]
            if len(data) > len(view):
                self.counters.add(too_large=1)
                break
            view[: len(data)] = data
            done += 1
            size += len(data)
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=size)
        return done

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Copy new blocks; see `BlockStore.put`."""
        stored = 0
        with self._lock:
            for key, view in reversed(check_items(items)):
                if key in self._blocks or self._closed:
                    self.counters.add(known=not self._closed)
                    continue
                size = len(view) + ENTRY_BYTES
                if size > self._max_bytes:
                    self.counters.add(too_large=1)
                    continue
                self._shrink(self._max_bytes - size)
                self._blocks[key] = bytes(view), time.time()
                self._size += size
                self.counters.add(written=1, bytes_written=len(view))
                stored += 1
        return stored

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; see `BlockStore.touch`."""
        with self._lock:
            self._use(check_keys(keys))

    def _use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks[key] = self._blocks[key][0], time.time()
                self._blocks.move_to_end(key)

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used; see `BlockStore.trim`."""
        check_max_bytes(max_bytes)
        with self._lock:
            return self._shrink(max_bytes)

    def _shrink(self, max_bytes: int) -> list[bytes]:
        removed = []
        while self._size > max_bytes and self._blocks:
            key, (data, _) = self._blocks.popitem(last=False)
            self._size -= len(data) + ENTRY_BYTES
            removed.append(key)
        self.counters.add(removed=len(removed))
        return removed

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        with self._lock:
            removed = self._remove(check_keys(keys))
        self.counters.add(removed=removed)
        return removed

    def _remove(self, keys: list[bytes]) -> int:
        removed = 0
        for key in keys:
            found = self._blocks.pop(key, None)
            if found is not None:
                self._size -= len(found[0]) + ENTRY_BYTES
                removed += 1
        return removed

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block."""
        with self._lock:
            found = [(key, len(data), used) for key, (data, used) in self._blocks.items()]
        return (StoreEntry(*one) for one in found)

    def lease(self, key: bytes, seconds: float) -> bool:
        """Return whether the caller is the one to evaluate; see `BlockStore.lease`."""
        check_keys([key])
        seconds = check_seconds(seconds)
        now = time.monotonic()
        with self._lock:
            if len(self._leases) > 1000:
                self._forget_ended(now)
            if self._leases.get(key, 0.0) > now:
                return False
            self._leases[key] = now + seconds
            return True

    def _forget_ended(self, now: float) -> None:
        self._leases = {key: until for key, until in self._leases.items() if until > now}

    def release(self, key: bytes) -> None:
        """End the lease of a block."""
        check_keys([key])
        with self._lock:
            self._leases.pop(key, None)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._blocks.clear()
            self._size = 0
