"""SealedStore: any store with an envelope around each block; tiers use stores through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from pykvcache.prefix.stores.base import BlockStore, StoreEntry, check_items, check_keys, writable
from pykvcache.prefix.stores.envelope import Envelope, Rejection

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SealedStore"]

# A reader with the right extras or secret can read them, so they are not removed.
_READABLE_BY_OTHERS = {Rejection.LOCKED, Rejection.UNVERIFIABLE}


class SealedStore(BlockStore):
    """Seal blocks on their way into a store, and check them on their way out.

    A block that is damaged, truncated, forged or of another model ends the run. It is counted and
    removed from the store, so that it can be written again.

    Parameters
    ----------
    store : BlockStore
        Where the sealed blocks lie.
    envelope : Envelope
        Seals and opens them.

    Attributes
    ----------
    rejections : collections.Counter of Rejection
        Number of refused blocks by reason.
    """

    def __init__(self, store: BlockStore, envelope: Envelope) -> None:
        self.store = store
        self.envelope = envelope
        self.counters = store.counters
        self.medium, self.n_probes = store.medium, store.n_probes
        self.rejections: Counter[Rejection] = Counter()

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there, without checking the blocks."""
        return self.store.contains(self._names(keys))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there, without checking the block."""
        return self.store.present(self._names(keys))

    def get(
        self, keys: Sequence[bytes], sizes: Sequence[int], *, exact: bool = False
    ) -> list[memoryview]:
        """Return the contents of the leading run of intact blocks, without a second copy.

        ``sizes`` are upper bounds on the sizes of the contents in bytes. Where they are exact, a
        longer block is damaged, and is removed.
        """
        names = self._names(keys)
        # Reused memory may still hold this very block, which would complete one that was cut.
        if exact:
            buffers = [self.envelope.memory(size + self.envelope.overhead) for size in sizes]
            for buffer in buffers:
                buffer[:16] = buffer[-16:] = bytes(16)
        else:  # it may end anywhere
            buffers = [memoryview(bytearray(size + self.envelope.overhead)) for size in sizes]
        too_large = self.counters.too_large
        n_read = self.store.get_into(names, buffers)
        next_one = names[n_read : n_read + 1]
        # The counter is that of all threads: a block that is not there was not too large.
        if exact and self.counters.too_large > too_large and True in self.store.present(next_one):
            self._reject(next_one[0], Rejection.TRUNCATED)
        found: list[memoryview] = []
        for key, name, buffer in zip(keys, names, buffers[:n_read], strict=False):
            content = self.envelope.open(key, buffer)
            if isinstance(content, Rejection):
                self._reject(name, content)
                break
            found.append(content)
        return found

    def differences(self, n: int) -> set[str]:
        """Return in what the writers of up to n blocks differ from this reader, in words."""
        found = set[str]()
        for entry in islice(self.store.entries(), n):
            buffer = bytearray(entry.size)
            if self.store.get_into([entry.key], [buffer]):
                found.add(self.envelope.difference(buffer))
        return found

    def _reject(self, name: bytes, why: Rejection) -> None:
        """Count a refused block, and remove it."""
        self.rejections[why] += 1
        self.counters.add(rejected=1)
        if why not in _READABLE_BY_OTHERS:
            self.store.discard([name])

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Copy the contents of the leading run of intact blocks into the buffers."""
        check_keys(keys, buffers)
        views = [writable(buffer) for buffer in buffers]
        found = self.get(keys, [len(view) for view in views])
        for view, content in zip(views, found, strict=False):
            view[: len(content)] = content
        return len(found)

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Seal and store blocks that are not there yet."""
        found = check_items(items)
        return self.store.put(
            (self.envelope.name(key), self.envelope.seal(key, data)) for key, data in found
        )

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now."""
        self.store.touch(self._names(keys))

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, least recently used first; the keys are the store's own."""
        return self.store.trim(max_bytes)

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks."""
        return self.store.discard(self._names(keys))

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block; the keys are the store's own."""
        return self.store.entries()

    def close(self) -> None:
        """Close the store inside."""
        self.store.close()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self.envelope.name(key) for key in check_keys(keys)]
