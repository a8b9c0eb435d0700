"""FolderStore: blocks as files in a folder of bounded size, shared by many processes."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from pykvcache._arguments import as_file_name
from pykvcache.errors import StoreError, shown
from pykvcache.prefix.stores.base import (
    KEY_SIZE,
    BlockStore,
    StoreEntry,
    check_items,
    check_keys,
    check_max_bytes,
    check_process,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BlockFiles", "FolderIndex", "FolderStore"]

_T = TypeVar("_T")
# A block to write: its key, its content, and its last-use time in nanoseconds.
_Block = tuple[bytes, memoryview, int]

_log = logging.getLogger("pykvcache.prefix")

#: The smallest limit, of which the index takes a part.
MIN_BYTES = 4 << 20
# Reserved for the growth of the index in one transaction.
_MARGIN = 1 << 20
# A read slower than this (seconds, and bytes per second) comes from the disk, not the page cache.
_COLD = 3e-4, 1e9
# A temporary file not written to for this many seconds has no writer any more.
_STALE_SECONDS = 60.0

# Errors caused by a disk, SQLite or another process.
_FAILURES = (sqlite3.Error, OSError)
_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}

_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# Blocks of pykvcache: they can be computed again. See https://bford.info/cachedir/
"""


# A pipe in place of a block must not block a reader, and a link must not be followed.
_PLAIN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


def _open(path: str) -> io.FileIO:
    return open(path, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | _PLAIN))


class BlockFiles:
    """The files below one folder, one per block; methods may raise OSError.

    A block is written to a temporary file, which is also its writers' lock, and renamed.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._blocks = os.path.join(root, "blocks")
        self._temporary = os.path.join(root, "tmp")
        # Whether the last read came from the disk, not the page cache.
        self._is_cold = False

    def make_folders(self) -> None:
        """Create the missing folders."""
        for folder in (self._blocks, self._temporary):
            os.makedirs(folder, exist_ok=True)
        tag = os.path.join(self._root, "CACHEDIR.TAG")
        with contextlib.suppress(OSError), open(tag, "x") as file:
            file.write(_TAG)

    def path(self, key: bytes) -> str:
        """Return the path of a block."""
        name = key.hex()
        return f"{self._blocks}/{name[:2]}/{name}.block"

    def stat(self, key: bytes) -> os.stat_result | None:
        """Return the status of a block's file; None if it is no regular file."""
        try:
            found = os.lstat(self.path(key))
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def read_into(self, key: bytes, view: memoryview) -> int:
        """Read a block into the front of a buffer; return its size, which may be larger."""
        began = time.perf_counter()
        with _open(self.path(key)) as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise FileNotFoundError("not a regular file")
            size = facts.st_size
            if size <= len(view):
                done = 0
                while done < size and (n := file.readinto(view[done:size])):
                    done += n
                size = done
        self._is_cold = time.perf_counter() - began > _COLD[0] + size / _COLD[1]
        return size

    def read_ahead(self, keys: Iterable[bytes]) -> None:
        """Let the system read blocks ahead if the last read came from the disk."""
        for key in keys if self._is_cold and hasattr(os, "posix_fadvise") else ():
            with contextlib.suppress(OSError), _open(self.path(key)) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def write(self, key: bytes, view: memoryview, used: int) -> bool:
        """Write a block and its last-use time; return False if another process is writing it."""
        temporary = os.path.join(self._temporary, key.hex())
        if (file := self._claim(temporary)) is None:
            return False
        try:
            with file:
                while len(view):
                    view = view[file.write(view) :]
            os.utime(temporary, ns=(used, used))
            try:
                os.replace(temporary, self.path(key))
            except FileNotFoundError:
                os.makedirs(os.path.dirname(self.path(key)), exist_ok=True)
                os.replace(temporary, self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return True

    def _claim(self, temporary: str) -> io.FileIO | None:
        """Create the temporary file of a block; return None if a process is writing it."""
        for _ in range(2):
            with contextlib.suppress(FileExistsError):
                return open(temporary, "xb", buffering=0)
            if not self._is_stale(temporary):
                break
            os.unlink(temporary)
        return None

    def set_used(self, key: bytes, used: int) -> None:
        """Set the time of a block's file to its last-use time in nanoseconds."""
        with contextlib.suppress(OSError):
            os.utime(self.path(key), ns=(used, used), follow_symlinks=False)

    def remove(self, key: bytes) -> bool:
        """Remove a block; return whether there was one."""
        try:
            os.unlink(self.path(key))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return False
        return True

    def keys(self) -> set[bytes]:
        """Return the keys of all files, from their names."""
        found = set()
        for shard in os.listdir(self._blocks):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in os.listdir(os.path.join(self._blocks, shard)):
                    with contextlib.suppress(ValueError):
                        key = bytes.fromhex(name.removesuffix(".block"))
                        if self.path(key) == f"{self._blocks}/{shard}/{name}":
                            found.add(key)
        return {key for key in found if len(key) == KEY_SIZE}

    def sweep(self) -> int:
        """Remove temporary files without a writer; return how many."""
        removed = 0
        for name in os.listdir(self._temporary):
            path = os.path.join(self._temporary, name)
            with contextlib.suppress(OSError):
                if self._is_stale(path):
                    os.unlink(path)
                    removed += 1
        return removed

    def has_writer(self, key: bytes) -> bool:
        """Return whether a process is writing a block."""
        try:
            return not self._is_stale(os.path.join(self._temporary, key.hex()))
        except OSError:
            return False

    @staticmethod
    def _is_stale(path: str) -> bool:
        return time.time() - os.lstat(path).st_mtime > _STALE_SECONDS


#: Seconds to wait for another process's lock.
WAIT = 2.0

_VERSION = 2
# Size of a file on the disk, in SQL.
_COST = "(({0}.size + 4095) & ~4095)"
_SCHEMA = (
    """CREATE TABLE blocks (
    key BLOB PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID""",
    "CREATE INDEX by_use ON blocks (used)",
    "CREATE TABLE total (bytes INTEGER NOT NULL)",
    "INSERT INTO total VALUES (0)",
    f"""CREATE TRIGGER added AFTER INSERT ON blocks
BEGIN UPDATE total SET bytes = bytes + {_COST.format("new")}; END""",
    f"""CREATE TRIGGER removed AFTER DELETE ON blocks
BEGIN UPDATE total SET bytes = bytes - {_COST.format("old")}; END""",
    f"PRAGMA user_version = {_VERSION}",
)
# Limits that keep sums of sizes, and times, within 8 bytes: a sparse file can have any size.
_MAX_SIZE, MAX_TIME = 1 << 48, 1 << 62

# Parts of SQLite's messages about a busy, full or inaccessible disk.
_NO_DAMAGE = ("locked", "busy", "disk is full", "unable to open", "interrupted", "I/O", "memory")

# A child forked while another thread holds one of SQLite's own locks would wait for ever. So only
# one thread of the process calls SQLite at a time, and a fork waits for it.
_in_sqlite = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_in_sqlite.acquire,
        after_in_parent=_in_sqlite.release,
        after_in_child=_in_sqlite.release,
    )


def block_cost(size: int) -> int:
    """Return the bytes that a file of this size takes on the disk."""
    return (size + 4095) & ~4095


class FolderIndex:
    """Sizes and last-use times of the blocks in a folder, in SQLite; methods may raise its errors.

    The files are authoritative: an index that is lost, damaged or of another version is rebuilt
    from them. Each transaction opens its own connection, which takes 0.2 ms: none is ever stale,
    shared by threads or inherited by a forked child.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Rows]:
        """Hold the write lock; commit at the end, or roll back after an exception.

        A damaged index is removed, so that the next transaction creates one (`Rows.is_new`).
        """
        with (
            _in_sqlite,
            # No implicit transactions.
            contextlib.closing(
                sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)
            ) as connection,
        ):
            try:
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                # After a power cut the index may be damaged; it is rebuilt then.
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute("BEGIN IMMEDIATE")
                ((version,),) = connection.execute("PRAGMA user_version").fetchall()
                if version not in (0, _VERSION):
                    raise sqlite3.DatabaseError(f"the index has version {version}")
                for statement in _SCHEMA if version == 0 else ():
                    connection.execute(statement)
                yield Rows(connection, is_new=version == 0)
                connection.execute("COMMIT")
            except Exception as error:
                if not self._is_damage(error):
                    raise
                for suffix in ("", "-journal", "-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path + suffix)
                raise sqlite3.DatabaseError(f"the index is damaged: {error}") from error

    def _is_damage(self, error: Exception) -> bool:
        """Return whether an error means damage, rather than a busy, full or inaccessible disk."""
        if isinstance(error, OSError | MemoryError):
            return False
        text = str(error)
        if "readonly" in text:  # a damaged header has the same message
            return os.access(self._path, os.W_OK)
        return not isinstance(error, sqlite3.OperationalError) or not any(
            reason in text for reason in _NO_DAMAGE
        )

    def n_bytes(self) -> int:
        """Return the bytes of the index itself on the disk."""
        total = 0
        for suffix in ("", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                total += block_cost(os.stat(self._path + suffix).st_size)
        return total


class Rows:
    """The rows of an index within one transaction; ``is_new`` if it created the index."""

    def __init__(self, connection: sqlite3.Connection, *, is_new: bool = False) -> None:
        self._connection = connection
        self.is_new = is_new

    def now(self, n: int) -> int:
        """Return a time for `n` uses, counted downwards, all later than every recorded one."""
        sql = "SELECT coalesce(max(used), 0) FROM blocks"
        ((last,),) = self._connection.execute(sql).fetchall()
        return max(time.time_ns(), min(int(last), MAX_TIME) + n)

    def add(self, key: bytes, size: int, used: int) -> None:
        """Add the row of a block, unless it has one."""
        values = key, min(size, _MAX_SIZE), max(0, min(used, MAX_TIME))
        self._connection.execute("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?)", values)

    def remove(self, key: bytes) -> None:
        """Remove the row of a block, if it has one."""
        self._connection.execute("DELETE FROM blocks WHERE key = ?", [key])

    def use(self, key: bytes, used: int) -> bool:
        """Set the last-use time of a block; return whether it has a row."""
        values = min(used, MAX_TIME), key
        sql = "UPDATE blocks SET used = ? WHERE key = ?"
        return self._connection.execute(sql, values).rowcount > 0

    def oldest(self, before: int) -> tuple[bytes, int] | None:
        """Return key and size of the least recently used block, if used before a time."""
        sql = "SELECT key, size FROM blocks WHERE used < ? ORDER BY used LIMIT 1"
        found: tuple[bytes, int] | None = self._connection.execute(sql, [before]).fetchone()
        return found

    def n_bytes(self) -> int:
        """Return the bytes of all blocks on the disk."""
        ((n,),) = self._connection.execute("SELECT bytes FROM total").fetchall()
        return int(n)

    def check(self) -> set[bytes]:
        """Return the keys of all blocks; raise `sqlite3.DatabaseError` if the index is damaged."""
        ((found,),) = self._connection.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        sizes = dict(self._connection.execute("SELECT key, size FROM blocks"))
        if sum(map(block_cost, sizes.values())) != self.n_bytes():
            raise sqlite3.DatabaseError("the total of the index is wrong")
        return {memoryview(key).tobytes() for key in sizes}


class FolderStore(BlockStore):
    """Keeps blocks in a folder of a local disk, shared by any number of processes.

    A missing or damaged index is rebuilt from the files. A full disk and a folder that cannot be
    written are counted, not raised. Nothing is flushed to the disk: after a power cut the newest
    blocks may be damaged, which their checksums detect.

    Parameters
    ----------
    path : str or PathLike
        The folder. If it does not exist, it is created, readable only by its owner. ``~`` is
        expanded.
    max_bytes : int
        Upper bound on all bytes in the folder, at least 4 MiB: blocks in units of 4 KiB, blocks
        being written, and the index. Of the limits of several processes the smallest applies.

    Raises
    ------
    StoreError
        The folder cannot be created or read, or ``max_bytes`` is too small.
    """

    medium = "disk"
    n_probes = 4096

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 10 << 30) -> None:
        name = as_file_name(path, error=StoreError)
        self.path = os.path.abspath(os.path.expanduser(name))
        self.max_bytes = check_max_bytes(max_bytes, MIN_BYTES)
        try:
            # An empty name is not the current folder.
            os.makedirs(self.path if name else "", mode=0o700, exist_ok=True)
            os.listdir(self.path)  # a read-only folder is still of use
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            text = f"{shown(name)} cannot be used as a folder of blocks: {why}"
            raise StoreError(text, "path", self.path) from error
        self._files = BlockFiles(self.path)
        self._index = FolderIndex(os.path.join(self.path, "index.sqlite"))
        self._putting = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._recover()

    def __repr__(self) -> str:
        return f"FolderStore({self.path!r}, max_bytes={self.max_bytes})"

    # Reading, without the index ---------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored; see `BlockStore.contains`."""
        keys = check_keys(keys)
        if not self._is_open():
            return 0
        return next((i for i, key in enumerate(keys) if self._files.stat(key) is None), len(keys))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored; see `BlockStore.present`."""
        keys = check_keys(keys)
        is_open = self._is_open()
        return [is_open and self._files.stat(key) is not None for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        done = n_bytes = 0
        if self._is_open() and len(pairs) > 1:
            self._files.read_ahead(key for key, _ in pairs)
        for key, view in pairs if self._is_open() else ():
            try:
                size = self._files.read_into(key, view)
            except FileNotFoundError:
                break
            except OSError as error:
                self._failed(error)
                break
            if size > len(view):
                self.counters.add(too_large=1)
                break
            done += 1
            n_bytes += size
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=n_bytes)
        return done

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block."""
        try:
            for key in sorted(self._files.keys()) if self._is_open() else ():
                if (facts := self._files.stat(key)) is not None:
                    yield StoreEntry(key, facts.st_size, facts.st_mtime_ns / 1e9)
        except OSError as error:
            self._failed(error)

    # Writing ----------------------------------------------------------------------------

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Write missing blocks; see `BlockStore.put`."""
        found = check_items(items)
        with self._putting:  # so that blocks that another thread writes are stored on return
            new = self._transact(lambda rows: self._reserve(rows, found), list[_Block]())
            n_written = self._write(new)
            if new:
                self._transact(lambda rows: self._settle(rows, new), None)
        return n_written

    def _reserve(self, rows: Rows, items: list[tuple[bytes, memoryview]]) -> list[_Block]:
        """Make room for blocks and add their rows; return the blocks to write."""
        now = rows.now(len(items))
        room = max(0, self.max_bytes - self._index.n_bytes() - _MARGIN)
        new = []
        for i, (key, view) in enumerate(items):
            facts = self._files.stat(key)
            if facts is not None:
                rows.add(key, facts.st_size, now - i)
            if facts is not None or self._files.has_writer(key):
                self.counters.add(known=1)
                continue
            rows.remove(key)  # of a writer that died
            cost = block_cost(len(view))
            if cost > room:
                self.counters.add(too_large=1)
                continue
            # No block is evicted for a later one of the same call.
            self._evict(rows, rows.n_bytes() + cost - room, before=now - len(items))
            if rows.n_bytes() + cost > room:
                self.counters.add(full=1)
                continue
            rows.add(key, len(view), now - i)
            new.append((key, view, now - i))
        return new

    def _write(self, new: list[_Block]) -> int:
        n_written = 0
        for i, (key, view, used) in enumerate(new):
            try:
                is_ours = self._files.write(key, view, used)
            except OSError as error:
                if self._failed(error) == "full":
                    self.counters.add(full=len(new) - i - 1)
                    break
            else:
                n_written += is_ours
                n_bytes = len(view) if is_ours else 0
                self.counters.add(written=is_ours, known=not is_ours, bytes_written=n_bytes)
        return n_written

    def _settle(self, rows: Rows, new: list[_Block]) -> None:
        """Make the rows of these blocks agree with the files."""
        for key, view, used in new:
            if self._files.stat(key) is not None:
                rows.add(key, len(view), used)  # another store's recovery may have removed it
            elif not self._is_coming(key):
                rows.remove(key)

    def _is_coming(self, key: bytes) -> bool:
        return self._files.has_writer(key) or self._files.stat(key) is not None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, in one transaction; see `BlockStore.touch`."""
        keys = list(dict.fromkeys(check_keys(keys)))

        def use(rows: Rows) -> list[tuple[bytes, int]]:
            now = rows.now(len(keys))
            return [(key, now - i) for i, key in enumerate(keys) if rows.use(key, now - i)]

        for key, used in self._transact(use, list[tuple[bytes, int]]()):
            self._files.set_used(key, used)

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks, in all processes; see `BlockStore.trim`."""
        max_bytes = check_max_bytes(max_bytes)
        return self._transact(
            lambda rows: self._evict(rows, rows.n_bytes() + self._index.n_bytes() - max_bytes), []
        )

    def _evict(self, rows: Rows, n_bytes: int, before: int = MAX_TIME) -> list[bytes]:
        """Remove the least recently used blocks until ``n_bytes`` are free."""
        removed: list[bytes] = []
        while n_bytes > 0 and (oldest := rows.oldest(before)) is not None:
            key, size = oldest
            # The file first: if the process dies in between, too much is counted, never too little.
            with contextlib.suppress(PermissionError):
                self._files.remove(key)
            rows.remove(key)
            n_bytes -= block_cost(size)
            removed.append(key)
        self.counters.add(removed=len(removed))
        return removed

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        keys = check_keys(keys)

        def remove(rows: Rows) -> int:
            removed = 0
            for key in keys:
                removed += self._files.remove(key)
                rows.remove(key)
            self.counters.add(removed=removed)
            return removed

        return self._transact(remove, 0)

    # The index --------------------------------------------------------------------------

    def _transact(self, work: Callable[[Rows], _T], otherwise: _T) -> _T:
        """Call a function with the rows of the index; count errors of the disk, do not raise."""
        if not self._is_open():
            return otherwise
        try:
            self._files.make_folders()  # the folder may have been removed
            with self._index.transaction() as rows:
                if rows.is_new:  # lost
                    self._reconcile(rows)
                return work(rows)
        except _FAILURES as error:
            self._failed(error)
            return otherwise

    def _recover(self) -> None:
        """Make the index agree with the files, in case a process died or the index is damaged."""
        try:
            self._files.make_folders()
            self.counters.add(swept=self._files.sweep())
            with contextlib.suppress(sqlite3.DatabaseError), self._index.transaction() as rows:
                return self._reconcile(rows)
            with self._index.transaction() as rows:  # a damaged index was removed, and is rebuilt
                self._reconcile(rows)
        except _FAILURES as error:
            self._failed(error)
            _log.warning("blocks in %s are read, but not written: %s", self.path, error)

    def _reconcile(self, rows: Rows) -> None:
        """Add missing rows, and remove those of missing files."""
        n_added, known, there = 0, rows.check(), self._files.keys()
        for key in there - known:
            if (facts := self._files.stat(key)) is not None:
                rows.add(key, facts.st_size, min(facts.st_mtime_ns, time.time_ns()))
                n_added += 1
        for key in known - there:
            if not self._is_coming(key):
                rows.remove(key)
        self.counters.add(rebuilt=n_added > 0)

    def _failed(self, error: Exception) -> str:
        number, text = getattr(error, "errno", None), str(error)
        if number in _FULL or "disk is full" in text:
            counter = "full"
        elif number in _DENIED or "readonly" in text:
            counter = "denied"
        elif "locked" in text:
            counter = "timed_out"
        else:
            counter = "failed"
        self.counters.add(error=error, **{counter: 1})
        return counter

    # Lifetime ---------------------------------------------------------------------------

    def _is_open(self) -> bool:
        check_process(self._pid)
        return not self._closed

    def close(self) -> None:
        """Close the store: later calls are misses; the blocks stay."""
        self._closed = True
