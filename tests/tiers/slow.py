"""A real store, made slow: so many seconds per request, so many bytes per second."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pykvcache.prefix.stores import BlockStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SlowStore(BlockStore):
    def __init__(self, store: BlockStore, latency: float = 0.0, bandwidth: float = 1e12) -> None:
        self.store, self.latency, self.bandwidth = store, latency, bandwidth
        self.n_probes = store.n_probes
        self.closing = threading.Event()
        self.n_gets = 0

    def _wait(self, n_bytes: int = 0) -> None:
        self.closing.wait(self.latency + n_bytes / self.bandwidth)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        self._wait()
        return self.store.present(keys)

    def contains(self, keys: Sequence[bytes]) -> int:
        self._wait()
        return self.store.contains(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        self.n_gets += 1
        self._wait(sum(memoryview(buffer).nbytes for buffer in buffers))
        return self.store.get_into(keys, buffers)

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        return self.store.put(items)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.store.touch(keys)

    def trim(self, max_bytes: int) -> list[bytes]:
        return self.store.trim(max_bytes)

    def discard(self, keys: Sequence[bytes]) -> int:
        return self.store.discard(keys)
