"""MemoryStore: blocks in this process's RAM, for tests and as the smallest example."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pykvcache.prefix.stores.base import (
    BlockStore,
    StoreEntry,
    check_items,
    check_keys,
    check_max_bytes,
    check_process,
    copy_run,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MemoryStore"]

#: Overhead per block in bytes: key, time, three objects, two slots.
ENTRY_BYTES = 320


class MemoryStore(BlockStore):
    """Keeps blocks in RAM, and removes the least recently used first.

    Parameters
    ----------
    max_bytes : int
        Upper bound on its bytes, including 320 bytes per block for Python's objects.
    """

    n_probes = 4096

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_bytes = check_max_bytes(max_bytes)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # The least recently used block comes first.
        self._blocks: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._size = 0
        self._closed = False

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        check_process(self._pid)
        with self._lock:
            yield

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored; see `BlockStore.contains`."""
        keys = check_keys(keys)
        with self._held():
            return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Copy the leading run into the buffers; see `BlockStore.get_into`."""
        keys, views = check_keys(keys, buffers), [writable(one) for one in buffers]
        with self._held():
            found = (self._blocks.get(key, (None, 0.0))[0] for key in keys)
            return copy_run(self.counters, found, views)

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Copy new blocks; see `BlockStore.put`."""
        found = check_items(items)
        stored = 0
        with self._held():
            # In reverse: the first block of a call is the most recent.
            for key, view in reversed(found):
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
        keys = check_keys(keys)
        with self._held():
            for key in reversed(keys):
                if key in self._blocks:
                    self._blocks[key] = self._blocks[key][0], time.time()
                    self._blocks.move_to_end(key)

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks; see `BlockStore.trim`."""
        check_max_bytes(max_bytes)
        with self._held():
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
        keys = check_keys(keys)
        removed = 0
        with self._held():
            for key in keys:
                found = self._blocks.pop(key, None)
                if found is not None:
                    self._size -= len(found[0]) + ENTRY_BYTES
                    removed += 1
        self.counters.add(removed=removed)
        return removed

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block."""
        with self._held():
            found = [(key, len(data), used) for key, (data, used) in self._blocks.items()]
        return (StoreEntry(*one) for one in found)

    def close(self) -> None:
        """Remove every block."""
        self._closed, self._blocks, self._size = True, OrderedDict(), 0
