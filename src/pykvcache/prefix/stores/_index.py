"""The index of a FolderStore in SQLite: how large each block is, when it was used, who writes it.

The files are the truth for readers; the index is there for the size bound and for what goes
first. A row is written before its file, and removed in the same transaction as its file, so
whatever lies on the disk is counted, also when a process dies in between.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pykvcache.prefix.stores import _values as values_of
from pykvcache.prefix.stores._files import BlockFiles

__all__ = ["Index", "identity_of", "remove_index"]

#: Read from the file: another number means that the index is made again.
_VERSION = 1
# What a file takes of the disk, in SQL.
_COST = "(({0}.size + 4095) & ~4095)"
_SCHEMA = f"""
CREATE TABLE blocks (
    key BLOB PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL, owner TEXT
) WITHOUT ROWID;
CREATE INDEX by_use ON blocks (used);
CREATE INDEX pending ON blocks (owner) WHERE owner IS NOT NULL;
CREATE TABLE leases (key BLOB PRIMARY KEY, owner TEXT NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE total (bytes INTEGER NOT NULL, blocks INTEGER NOT NULL);
INSERT INTO total VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON blocks BEGIN
    UPDATE total SET bytes = bytes + {_COST.format("new")}, blocks = blocks + 1;
END;
CREATE TRIGGER gone AFTER DELETE ON blocks BEGIN
    UPDATE total SET bytes = bytes - {_COST.format("old")}, blocks = blocks - 1;
END;
CREATE TRIGGER resized AFTER UPDATE OF size ON blocks BEGIN
    UPDATE total SET bytes = bytes + {_COST.format("new")} - {_COST.format("old")};
END;
PRAGMA user_version = {_VERSION};
"""
#: Pages of 4 KiB after which the log is written back: it is part of what the store keeps.
_LOG_PAGES = 128


def cost(size: int) -> int:
    """Return what a file of that size takes of the disk."""
    return (size + 4095) & ~4095


def remove_index(path: str) -> None:
    """Remove an index that cannot be used."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def identity_of(path: str) -> tuple[int, int]:
    """Return what tells the file of an index from another one of that name."""
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino


class Index:
    """One connection to the index; every method may raise sqlite3.Error."""

    def __init__(self, path: str, seconds: float, *, create: bool) -> None:
        self._path = path
        self._seconds = seconds
        if not create and not os.path.getsize(path):
            raise sqlite3.DatabaseError("the index is empty")
        self._connection = sqlite3.connect(
            path, timeout=seconds, isolation_level=None, check_same_thread=False
        )
        # Text that is none is wrong like any other value, rather than an error of the request.
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        try:
            if create:
                self._execute("PRAGMA journal_mode = WAL")
                with self.transaction():
                    for statement in _split(_SCHEMA):
                        self._execute(statement)
            (version,) = self._row("PRAGMA user_version", (), values_of.is_number)
            if version != _VERSION:
                raise sqlite3.DatabaseError(f"the index has version {version}")
            self._execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            self._execute(f"PRAGMA journal_size_limit = {_LOG_PAGES * 4096}")
            # What a power cut makes of the index is made again; nobody waits for the disk.
            self._execute("PRAGMA synchronous = OFF")
            self.identity = identity_of(path)
        except BaseException:
            self._connection.close()
            raise

    def _execute(self, sql: str, values: Iterable[object] = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, tuple(values))
        except UnicodeDecodeError as error:  # of what SQLite says of a damaged name
            raise sqlite3.DatabaseError(f"the index is damaged: {error}") from error

    def _rows(
        self, sql: str, values: Iterable[object], *kinds: Callable[[object], bool]
    ) -> list[Any]:
        """Return rows; raises where a value is none that a store writes, as damage makes them."""
        rows = self._execute(sql, values).fetchall()
        if not all(is_right(one) for row in rows for is_right, one in zip(kinds, row, strict=True)):
            raise sqlite3.DatabaseError("the index has a value that no store writes")
        return rows

    def _row(
        self, sql: str, values: Iterable[object], *kinds: Callable[[object], bool]
    ) -> tuple[Any, ...]:
        rows = self._rows(sql, values, *kinds)
        if not rows:
            raise sqlite3.DatabaseError("the index lacks a row")
        row: tuple[Any, ...] = rows[0]
        return row

    @contextlib.contextmanager
    def transaction(self, seconds: float | None = None) -> Iterator[None]:
        """Hold the one right to write; wait for it for at most that many seconds."""
        wait = self._seconds if seconds is None else seconds
        self._execute(f"PRAGMA busy_timeout = {int(wait * 1000)}")
        try:
            self._execute("BEGIN IMMEDIATE")
            yield
            self._execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._execute("ROLLBACK")
            raise

    def is_current(self) -> bool:
        """Return whether the file that is open here is the one that others open."""
        try:
            return identity_of(self._path) == self.identity
        except OSError:
            return False

    def check(self) -> None:
        """Raise if the index contradicts itself; wrong values are noticed when they are read."""
        (found,) = self._execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        sums = f"SELECT coalesce(sum({_COST.format('blocks')}), 0), count(*) FROM blocks"
        both = f"SELECT * FROM ({sums}), (SELECT bytes, blocks FROM total)"
        row = self._row(both, (), *[values_of.is_number] * 4)
        if row[:2] != row[2:]:
            raise sqlite3.DatabaseError("the sums of the index are wrong")

    def disk_bytes(self) -> int:
        """Return what the index itself takes of the disk."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                total += os.stat(self._path + suffix).st_size
        return total

    def totals(self) -> tuple[int, int]:
        """Return (bytes of the disk, number) of all blocks."""
        number = values_of.is_number
        total, blocks = self._row("SELECT bytes, blocks FROM total", (), number, number)
        return total, blocks

    def fits(self, max_bytes: int) -> bool:
        """Return whether all blocks and the index take so much at most, as it is now."""
        return self.totals()[0] + self.disk_bytes() <= max_bytes

    # Rows: all of these belong inside a transaction ---------------------------------------

    def find(self, key: bytes) -> tuple[int, str | None] | None:
        """Return (size, token of the writer) of a block."""
        sql = "SELECT size, owner FROM blocks WHERE key = ?"
        rows = self._rows(sql, [key], values_of.is_size, values_of.is_owner)
        return rows[0] if rows else None

    def write(self, key: bytes, size: int, used: int, owner: str | None) -> None:
        """Add or replace the row of a block."""
        self._execute(
            "INSERT INTO blocks VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE "
            "SET size = excluded.size, used = excluded.used, owner = excluded.owner",
            [key, min(size, values_of.LARGEST), values_of.time_of(used), owner],
        )

    def use(self, key: bytes, used: int) -> bool:
        """Note when a block was used; return whether it is known."""
        sql = "UPDATE blocks SET used = max(used, ?) WHERE key = ?"
        return self._execute(sql, [values_of.time_of(used), key]).rowcount > 0

    def not_after(self, now: int) -> None:
        """Let no block be used after now: a clock that was ahead would keep it for good."""
        now = values_of.time_of(now)
        sql = "SELECT coalesce(max(used), 0) FROM blocks"
        (last,) = self._row(sql, (), values_of.is_number)
        if last > now:
            sql = "UPDATE blocks SET used = used - ? WHERE used > ?"
            self._execute(sql, [last - now, now])

    def remove(self, key: bytes) -> bool:
        """Remove the row of a block; return whether there was one."""
        return self._execute("DELETE FROM blocks WHERE key = ?", [key]).rowcount > 0

    def oldest(self, limit: int) -> list[tuple[bytes, int]]:
        """Return (key, size), least recently used first, without what is being written."""
        sql = "SELECT key, size FROM blocks WHERE owner IS NULL ORDER BY used LIMIT ?"
        return self._rows(sql, [limit], values_of.is_key, values_of.is_size)

    def owners(self) -> list[str]:
        """Return the tokens of all that write, or died while they did."""
        sql = "SELECT DISTINCT owner FROM blocks WHERE owner IS NOT NULL"
        return [row[0] for row in self._rows(sql, (), values_of.is_owner)]

    def pending(self, owner: str) -> list[bytes]:
        """Return what one writer has announced and not finished."""
        sql = "SELECT key FROM blocks WHERE owner = ?"
        return [row[0] for row in self._rows(sql, [owner], values_of.is_key)]

    def finish(self, key: bytes) -> None:
        """Note that a block is written."""
        self._execute("UPDATE blocks SET owner = NULL WHERE key = ?", [key])

    def rows(self) -> list[tuple[bytes, int, int]]:
        """Return (key, size, used in nanoseconds) of every block."""
        sql = "SELECT key, size, used FROM blocks WHERE owner IS NULL"
        kinds = values_of.is_key, values_of.is_size, values_of.is_number
        return self._rows(sql, (), *kinds)

    def reconcile(self, files: BlockFiles, shards: Iterable[str]) -> int:
        """Make the rows those of the files; transactions of its own, so that others go on.

        Returns
        -------
        int
            How many files had no row: none, unless the index was wrong.
        """
        n_added = 0
        shards = [*shards]
        there = files.shards() if len(shards) > 1 else set(shards)
        if 2 * len(there) < len(shards):  # there are few blocks: most folders have none
            there |= self._shards()
            shards = [shard for shard in shards if shard in there]
        for shard in shards:
            # Mostly nothing differs: others need not wait, and a store opens in half of the time.
            if self._rows_in(shard).keys() != files.keys(shard):
                with self.transaction():
                    n_added += self._reconcile(files, shard)
        return n_added

    def _shards(self) -> set[str]:
        """Return the folders in which blocks should be."""
        sql = "SELECT DISTINCT substr(key, 1, 1) FROM blocks"
        return {first.hex() for (first,) in self._rows(sql, (), values_of.is_byte)}

    def _rows_in(self, shard: str) -> dict[bytes, str | None]:
        """Return the writers, None where it is written, of the blocks in one of the folders."""
        first = bytes.fromhex(shard)
        sql = "SELECT key, owner FROM blocks WHERE key >= ? AND key < ?"
        keys = first, first + b"\xff" * 32
        return dict(self._rows(sql, keys, values_of.is_key, values_of.is_owner))

    def _reconcile(self, files: BlockFiles, shard: str) -> int:
        # A file is renamed only after its row was written: the order matters.
        rows, found, n_added = self._rows_in(shard), files.keys(shard), 0
        for key in sorted(found - rows.keys()):
            facts = files.stat(key)
            if facts is not None:
                self.write(key, facts.st_size, facts.st_mtime_ns, None)
                n_added += 1
        for key in rows.keys() - found:
            if rows[key] is None:
                self.remove(key)
        return n_added

    # Leases -----------------------------------------------------------------------------

    def lease(self, key: bytes, owner: str, now: float, seconds: float, longest: float) -> bool:
        """Take the lease of a block if nobody has it; one that lasts too long does not count."""
        self._execute("DELETE FROM leases WHERE until <= ? OR until > ?", [now, now + longest])
        sql = "INSERT OR IGNORE INTO leases VALUES (?, ?, ?)"
        return self._execute(sql, [key, owner, now + seconds]).rowcount > 0

    def release(self, key: bytes, owner: str) -> None:
        """End a lease, if it is this owner's."""
        self._execute("DELETE FROM leases WHERE key = ? AND owner = ?", [key, owner])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _split(script: str) -> Iterator[str]:
    """Yield the statements of a script: sqlite3's own executescript ends the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if statement.strip() and sqlite3.complete_statement(statement):
            yield statement
            statement = ""
