"""One index among many processes: opened, replaced when it is wrong, never trusted blindly."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sqlite3
import time
from collections.abc import Iterator

from pykvcache.prefix.stores._files import SHARDS, BlockFiles
from pykvcache.prefix.stores._index import Index, identity_of, remove_index
from pykvcache.prefix.stores._locks import Owner, shared_or_exclusive
from pykvcache.prefix.stores.base import StoreCounters

__all__ = ["FAILURES", "SharedIndex", "counter_of"]

#: What a disk, SQLite or another process can do to a transaction.
FAILURES = (sqlite3.Error, OSError)
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# What is no fault of the index.
_OF_OTHERS = ("locked", "busy", "disk is full", "unable to open", "interrupted", "out of memory")
_UNREADABLE = {"", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_READ"}
#: For how long another process is waited for, in seconds.
WAIT = 2.0
# Up to how many blocks all folders are listed when a store is opened.
_FEW = 5000


class SharedIndex:
    """Run transactions on the index of a folder; not for two threads at once.

    A writer holds the folder's lock shared, a process that replaces the index holds it alone: so
    nobody writes into an index that is not there any more.
    """

    def __init__(self, root: str, files: BlockFiles, counters: StoreCounters) -> None:
        self._path = os.path.join(root, "index.sqlite")
        self._lock_path = os.path.join(root, "lock")
        self._files = files
        self._counters = counters
        self._index: Index | None = None
        self._next_shard = random.randrange(len(SHARDS))
        owners = os.path.join(root, "owners")
        os.makedirs(owners, exist_ok=True)
        self.owner = Owner(owners)
        try:
            self._check()
        except FAILURES:
            self.close()
            raise

    def _check(self) -> None:
        """Compare the index with itself and with the files, and sweep what the dead have left."""
        with contextlib.suppress(sqlite3.DatabaseError), self._hold(WAIT) as index:
            index.check()
        try:
            self._compare()
        except sqlite3.DatabaseError as error:
            if not self._is_damage(error):
                raise
            self._compare()  # what no check had found: it was made again just now
        with contextlib.suppress(*FAILURES):
            self.sweep()

    def _compare(self) -> None:
        with self._hold(WAIT) as index:
            # Somebody may have copied files or removed them. Of many, some folders tell, and
            # `look_around` finds what they do not.
            few = index.totals()[1] <= _FEW
            shards = SHARDS if few else random.sample(SHARDS, 16)
            n_added = index.reconcile(self._files, shards)
            if n_added and not few:
                n_added += index.reconcile(self._files, SHARDS)
            self._counters.add(rebuilt=n_added > 0)

    @contextlib.contextmanager
    def _hold(self, seconds: float) -> Iterator[Index]:
        """Hold the folder's lock shared, with the index open that all use."""
        with contextlib.ExitStack() as stack:
            self._enter(stack, exclusive=False, seconds=seconds)
            if self._index is not None and not self._index.is_current():
                self._drop()
            if self._index is None:
                found = self._found()
                try:
                    self._index = Index(self._path, WAIT, create=False)
                except FAILURES as error:
                    if isinstance(error, sqlite3.OperationalError) and not self._is_damage(error):
                        raise
                    stack.close()
                    self._replace(found)
                    self._enter(stack, exclusive=False, seconds=seconds)
            if self._index is None:
                raise TimeoutError("the index is being replaced")
            try:
                yield self._index
            except sqlite3.DatabaseError as error:
                if self._is_damage(error):
                    wrong = self._index.identity
                    self._drop()
                    stack.close()
                    self._replace(wrong)
                raise

    def _enter(self, stack: contextlib.ExitStack, *, exclusive: bool, seconds: float) -> None:
        lock = shared_or_exclusive(self._lock_path, exclusive=exclusive, seconds=seconds)
        stack.enter_context(lock)

    def _found(self) -> tuple[int, int] | None:
        """Return which file the index is now; None where there is none."""
        try:
            return identity_of(self._path)
        except OSError:
            return None

    def _replace(self, wrong: tuple[int, int] | None) -> None:
        """Make the index again from the files, unless another process just did.

        Parameters
        ----------
        wrong
            The file that is to be replaced: no check finds all that makes it fail.
        """
        with shared_or_exclusive(self._lock_path, exclusive=True, seconds=WAIT):
            if self._found() != wrong:
                with contextlib.suppress(*FAILURES):
                    index = Index(self._path, WAIT, create=False)
                    try:
                        index.check()
                    except sqlite3.DatabaseError:
                        index.close()
                    else:
                        self._index = index
                        return
            remove_index(self._path)
            index = Index(self._path, WAIT, create=True)
            try:
                if index.reconcile(self._files, SHARDS):
                    self._counters.add(rebuilt=1)
            except BaseException:
                index.close()
                raise
            self._index = index

    @contextlib.contextmanager
    def transaction(self, seconds: float | None = None) -> Iterator[Index]:
        """Hold the right to write; raises one of `FAILURES`."""
        seconds = WAIT if seconds is None else seconds
        with self._hold(seconds) as index, index.transaction(seconds):
            index.not_after(time.time_ns())
            yield index

    @contextlib.contextmanager
    def reading(self) -> Iterator[Index]:
        """Hold the index for single questions; raises one of `FAILURES`."""
        with self._hold(WAIT) as index:
            yield index

    def look_around(self) -> None:
        """Compare another one of the folders with the index; after all 256, sweep leftovers."""
        self._next_shard = (self._next_shard + 1) % len(SHARDS)
        with self._hold(WAIT) as index:
            if index.reconcile(self._files, [SHARDS[self._next_shard]]):
                self._counters.add(rebuilt=1)
        if not self._next_shard:
            self.sweep()

    def sweep(self) -> None:
        """Remove what processes have left that died while they wrote."""
        for token in self.owner.others():
            self.owner.is_alive(token)  # removes the lock files of the dead
        # Files before rows: what lies on the disk is always counted.
        for token, path in self._files.temporaries():
            if not self.owner.is_alive(token):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    self._counters.add(swept=1)
        with self.transaction() as index:
            self._resolve_dead(index)

    def _resolve_dead(self, index: Index) -> None:
        for token in index.owners():
            if not self.owner.is_alive(token):
                self.resolve(index, token)

    def resolve(self, index: Index, token: str) -> None:
        """Keep what a writer has finished, and forget what it has only announced."""
        for key in index.pending(token):
            if self._files.stat(key) is None:
                index.remove(key)
            else:
                index.finish(key)

    def _is_damage(self, error: BaseException) -> bool:
        """Return whether an error says that the index itself is wrong, rather than busy or denied.

        What damage makes of a schema has any text.
        """
        if not isinstance(error, sqlite3.OperationalError):
            return isinstance(error, sqlite3.DatabaseError)
        text = str(error)
        if "disk I/O error" in text:
            # The log was cut or removed. Before CPython 3.11 nothing tells that from a full disk.
            return getattr(error, "sqlite_errorname", "") in _UNREADABLE
        if "readonly" in text:  # a bit of the header says so, too
            return os.access(self._path, os.W_OK)
        return not any(other in text for other in _OF_OTHERS)

    def _drop(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def close(self) -> None:
        """Close the index, and say so to others."""
        with contextlib.suppress(sqlite3.Error):
            self._drop()
        self.owner.close()

    def forget(self) -> None:
        """Leave everything to the process that this one was forked from."""
        # SQLite's handles must be neither used nor closed here: they are kept for good.
        _of_parents.append(self._index)
        self._index = None
        self.owner.forget()


_of_parents: list[Index | None] = []


def counter_of(error: Exception) -> str:
    """Return which of `StoreCounters` counts an error of a disk or an index."""
    number = getattr(error, "errno", None)
    if number in _FULL or "disk is full" in str(error):
        return "full"
    if number in _DENIED or "readonly" in str(error):
        return "denied"
    if isinstance(error, TimeoutError) or "locked" in str(error):
        return "timed_out"
    return "failed"
