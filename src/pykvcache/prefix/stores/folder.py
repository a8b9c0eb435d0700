"""FolderStore: blocks as files in a folder that many processes share, with a bound on its size."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pykvcache._paths import as_file_name
from pykvcache.errors import StoreError
from pykvcache.errors._shown import shown
from pykvcache.prefix.stores._arguments import (
    MAX_LEASE,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    writable,
)
from pykvcache.prefix.stores._files import IN_THE_WAY, BlockFiles
from pykvcache.prefix.stores._index import Index, cost
from pykvcache.prefix.stores._shared_index import FAILURES, SharedIndex, counter_of
from pykvcache.prefix.stores.base import BlockStore, StoreEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FolderStore"]

#: The least that a folder may be given: the index and its log take a part of it.
MIN_BYTES = 4 << 20
# Kept free for what the index's log grows by in one transaction.
_MARGIN = 1 << 20
# How many blocks are announced in one transaction.
_AT_ONCE = 64
#: For how long touches and leases wait for other writers, in seconds: requests wait for them.
_SHORT = 0.05


class FolderStore(BlockStore):
    """Keep blocks in a folder of a local disk, for any number of processes at once.

    A process that is killed loses the block that it was writing. An index that is missing or
    wrong is made again from the files. A disk that is full, or a folder that cannot be
    written, is a counter. Nothing is flushed to the disk: after a power cut the newest blocks
    may be damaged, which their envelope shows.

    Parameters
    ----------
    path : str or PathLike
        The folder; made, for its owner alone, where there is none. ``~`` is expanded.
    max_bytes : int
        Upper bound of all that the store keeps there over all processes: blocks in units of 4
        KiB, blocks that are being written, and the index. At least 4 MiB. Of several bounds
        on one folder, the smallest holds.

    Raises
    ------
    StoreError
        There is no such folder and it cannot be made, or ``max_bytes`` is too small.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 10 << 30) -> None:
        name = as_file_name(path, error=StoreError)
        self.path = os.path.abspath(os.path.expanduser(name))
        self.max_bytes = check_max_bytes(max_bytes, MIN_BYTES)
        self._shared: SharedIndex | None = None
        self._touched: dict[bytes, int] = {}
        self._files = BlockFiles(self.path)
        self._closed = False
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._retry_at, self._pid = 0.0, os.getpid()
        try:
            # An empty name is not the current folder.
            os.makedirs(self.path if name else "", mode=0o700, exist_ok=True)
        except (OSError, ValueError) as error:
            text = f"{shown(name)} cannot be a folder: {getattr(error, 'strerror', None) or error}"
            raise StoreError(text, "path", self.path) from error
        with self._lock:
            self._open()

    def __repr__(self) -> str:
        return f"FolderStore({self.path!r}, max_bytes={self.max_bytes})"

    # Reading: from the files alone ------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        keys = check_keys(keys)
        if self._closed:
            return 0
        return next((i for i, key in enumerate(keys) if self._files.stat(key) is None), len(keys))

    @property
    def medium(self) -> str:
        """``"disk"``."""
        return "disk"

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; see `BlockStore.present`."""
        keys = check_keys(keys)
        return [not self._closed and self._files.stat(key) is not None for key in keys]

    @property
    def n_probes(self) -> int:
        """Thousands."""
        return 4096

    @property
    def n_together(self) -> int:
        """1: each block is a file."""
        return 1

    def expect(self, keys: Sequence[bytes]) -> None:
        """Let a disk that is read from go ahead; see `BlockStore.expect`."""
        if not self._closed:
            self._files.expect(check_keys(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        done = size = 0
        for key, view in pairs:
            if self._closed:
                break
            try:
                n_read = self._files.read_into(key, view)
            except FileNotFoundError:
                break
            except OSError as error:
                self._failed(error)
                break
            if n_read < 0:
                self.counters.add(too_large=1)
                break
            done += 1
            size += n_read
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=size)
        return done

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block that the index knows; every file where it cannot be opened."""
        found = iter(()) if self._closed else self._files.rows(self._failed)
        with self._locked() as shared:
            if shared is not None:
                with shared.reading() as index:
                    found = iter(index.rows())
        return (StoreEntry(key, size, used / 1e9) for key, size, used in found)

    # Writing ----------------------------------------------------------------------------

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Write blocks that are not there yet; see `BlockStore.put`."""
        found = check_items(items)
        with self._writing:
            # The last ones first: the head of a chain is the newest then, and goes last.
            groups = reversed(range(0, len(found), _AT_ONCE))
            stored = sum(self._put(found[at : at + _AT_ONCE]) for at in groups)
            with self._locked() as shared:
                if shared is not None:
                    shared.look_around()
        return stored

    def _put(self, items: list[tuple[bytes, memoryview]], *, is_first: bool = True) -> int:
        before, wanted = self._shared, self._announce(items)
        done: set[int] = set()
        for i, (key, view) in enumerate(wanted):
            try:
                self._files.write(key, view, self._token)
                done.add(i)
                self.counters.add(written=1, bytes_written=len(view))
            except OSError as error:
                if self._failed(error):
                    self.counters.add(full=len(wanted) - i - 1)
                if not isinstance(error, IN_THE_WAY):
                    break
        with self._locked() as shared:
            if shared is not None and wanted:
                with shared.transaction() as index:
                    self._finish(index, wanted, done)
        if is_first and before is not None and self._shared is not before and not self._closed:
            return self._put(items, is_first=False)  # the folder was removed: it is made again
        return len(done)

    def _announce(self, items: list[tuple[bytes, memoryview]]) -> list[tuple[bytes, memoryview]]:
        """Make room, and write the rows of what is new: whatever reaches the disk is counted."""
        wanted: list[tuple[bytes, memoryview]] = []
        with self._locked() as shared:
            if shared is None:
                return wanted
            now = time.time_ns()
            with shared.transaction() as index:
                self._use(index)
                shared.resolve(index, self._token)
                room = self._room(index, self.max_bytes)
                need = 0
                for key, view in items:
                    if self._is_known(shared, index, key):
                        self.counters.add(known=1)
                    elif cost(len(view)) > room:
                        self.counters.add(too_large=1)
                    elif need + cost(len(view)) > room:
                        self.counters.add(full=1)
                    else:
                        need += cost(len(view))
                        wanted.append((key, view))
                self._shrink(index, room - need)
                # The end of a chain is older than its head, and goes first.
                for position, (key, view) in enumerate(wanted):
                    index.write(key, len(view), now - position, self._token)
            return wanted
        return []

    def _is_known(self, shared: SharedIndex, index: Index, key: bytes) -> bool:
        """Return whether a block is there or on its way; forget a row that has lost its file."""
        row = index.find(key)
        facts = self._files.stat(key)
        if facts is not None:
            if row is None:
                index.write(key, facts.st_size, facts.st_mtime_ns, None)
            return True
        if row is None:
            return False
        if row[1] is not None and shared.owner.is_alive(row[1]):
            return True
        index.remove(key)
        return False

    def _room(self, index: Index, max_bytes: int) -> int:
        """Return how many bytes blocks may take beside the index."""
        return max(0, max_bytes - index.disk_bytes() - _MARGIN)

    def _shrink(self, index: Index, room: int) -> list[bytes]:
        """Remove the least recently used blocks until the others fit.

        Files go before their rows: who dies in between leaves too much counted, never too little.
        """
        removed: list[bytes] = []
        excess = index.totals()[0] - room
        while excess > 0:
            oldest = index.oldest(64)
            if not oldest:
                break
            for key, size in oldest:
                if excess <= 0:
                    break
                with contextlib.suppress(PermissionError):
                    self._files.remove(key)
                index.remove(key)
                excess -= cost(size)
                removed.append(key)
        self.counters.add(removed=len(removed))
        return removed

    def _finish(self, index: Index, wanted: list[tuple[bytes, memoryview]], done: set[int]) -> None:
        """Note what was written; rows of what was not go."""
        now = time.time_ns()
        for position, (key, view) in enumerate(wanted):
            if position in done:
                index.write(key, len(view), now - position, None)
            else:
                index.remove(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; where other writers are slow, with the next call that writes."""
        now = time.time_ns()
        keys = check_keys(keys)
        if len(self._touched) < 1 << 16:
            self._touched.update({key: now - position for position, key in enumerate(keys)})
        with self._locked(_SHORT) as shared:
            if shared is not None:
                with contextlib.suppress(*FAILURES), shared.transaction(_SHORT) as index:
                    self._use(index)

    def _use(self, index: Index) -> None:
        touched, self._touched = self._touched, {}
        for key, used in touched.items():
            if not index.use(key, used):
                facts = self._files.stat(key)
                if facts is not None:
                    index.write(key, facts.st_size, used, None)

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks, in all processes; see `BlockStore.trim`."""
        max_bytes = check_max_bytes(max_bytes)
        with self._locked() as shared:
            if shared is not None:
                shared.sweep()
                with shared.transaction() as index:
                    self._use(index)
                    if not index.fits(max_bytes):
                        return self._shrink(index, self._room(index, max_bytes))
        return []

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        keys, removed = check_keys(keys), 0
        with self._locked() as shared:
            if shared is not None:
                with shared.transaction() as index:
                    for key in keys:
                        removed += self._files.stat(key) is not None
                        self._files.remove(key)
                        index.remove(key)
        self.counters.add(removed=removed)
        return removed

    # Leases -----------------------------------------------------------------------------

    def lease(self, key: bytes, seconds: float) -> bool:
        """Return whether the caller is the one to evaluate; see `BlockStore.lease`."""
        check_keys([key])
        seconds = check_seconds(seconds)
        wait = max(_SHORT, 0.01 * seconds)  # longer where evaluating twice costs more
        is_ours = True
        with self._locked(wait) as shared:
            if shared is not None:
                with shared.transaction(wait) as index:
                    is_ours = index.lease(key, self._token, time.time(), seconds, MAX_LEASE)
        return is_ours

    def release(self, key: bytes) -> None:
        """End a lease of this store."""
        check_keys([key])
        with self._locked() as shared:  # others wait for it until the lease ends
            if shared is not None:
                with shared.transaction() as index:
                    index.release(key, self._token)

    # Open, closed, forked ---------------------------------------------------------------

    def _open(self) -> None:
        """Open files and index; where that fails the store reads, and tries again later."""
        self._retry_at = time.monotonic() + 5.0
        try:
            self._files.make()
            self._shared = SharedIndex(self.path, self._files, self.counters)
            self._token = self._shared.owner.token
        except FAILURES as error:
            self._failed(error)

    @contextlib.contextmanager
    def _locked(self, seconds: float = -1) -> Iterator[SharedIndex | None]:
        """Give the index to one thread; what disks and other processes do ends here."""
        if os.getpid() != self._pid:  # a forked child
            yield None
            return
        if not self._lock.acquire(timeout=seconds):
            self.counters.add(timed_out=1)
            yield None
            return
        try:
            if self._shared is None and not self._closed and time.monotonic() > self._retry_at:
                self._open()
            if self._shared is None and not self._closed:
                self.counters.add(skipped=1)
            yield self._shared
        except FAILURES as error:
            self._failed(error)
            if isinstance(error, FileNotFoundError) and self._shared is not None:
                # Somebody has removed the folder: the next call makes it again.
                self._shared.close()
                self._shared, self._retry_at = None, 0.0
        finally:
            self._lock.release()

    def _failed(self, error: Exception) -> bool:
        """Count what went wrong; return whether the disk is full."""
        counter = counter_of(error)
        self.counters.add(error=error, **{counter: 1})
        return counter == "full"

    def close(self) -> None:
        """Write what is pending and close the index; blocks stay. Later calls are misses."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            shared, self._shared = self._shared, None
            if shared is not None:
                with contextlib.suppress(*FAILURES), shared.transaction() as index:
                    self._use(index)
                shared.close()
            self._closed = True

    def __del__(self) -> None:
        if getattr(self, "_shared", None) is not None:
            with contextlib.suppress(Exception):
                self.close()
