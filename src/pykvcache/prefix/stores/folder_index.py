"""FolderIndex: sizes and last-use times of the blocks in a folder, in SQLite.

The files are authoritative: an index that is lost, damaged or of another version is rebuilt from
them. Each transaction opens its own connection, which takes 0.2 ms: none is ever stale, shared by
threads or inherited by a forked child.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator

__all__ = ["MAX_TIME", "FolderIndex", "Rows", "block_cost"]

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
    """The index of one folder; every method may raise `sqlite3.Error` or `OSError`."""

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
                _check_version(connection)
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                # After a power cut the index may be damaged; it is rebuilt then.
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute("BEGIN IMMEDIATE")
                is_new = _check_version(connection) == 0
                if is_new:
                    for statement in _SCHEMA:
                        connection.execute(statement)
                yield Rows(connection, is_new=is_new)
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


def _check_version(connection: sqlite3.Connection) -> int:
    """Return the version of the index, 0 if it has no tables yet; raise for another version."""
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"the index has version {version}")
    return int(version)
