"""The index of a FolderStore that is damaged in any place: it is made again, and nothing raises."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest

from pykvcache.prefix.stores import FolderStore
from pykvcache.prefix.stores.conformance import chain

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="open files stay there")

BLOCKS = chain(30, "index")
KEYS = [key for key, _ in BLOCKS]
MORE = chain(5, "more")
SIZE = 8 << 20


def use(store: FolderStore) -> None:
    """Call everything that looks into the index."""
    store.put(MORE[:2])
    store.touch(KEYS[:5])
    assert store.contains(KEYS[3:]) == len(KEYS) - 3, "blocks are files, whatever the index says"
    store.lease(KEYS[0], 10)
    store.release(KEYS[0])
    for entry in store.entries():
        assert len(entry.key) == 32
        assert entry.size >= 0
        assert entry.used >= 0
    store.trim(SIZE - (1 << 20))
    store.discard([KEYS[1]])
    store.put(MORE[2:4])


def check_heals(store: FolderStore) -> None:
    """What damage costs is one call; blocks are stored again after it."""
    assert store.counters.failed <= 3, store.counters
    store.put(MORE)
    assert store.contains([key for key, _ in MORE]) == len(MORE), store.counters.last_error


def make(folder: Path) -> Path:
    """Make a folder of blocks whose index is one file; return that."""
    with FolderStore(folder, SIZE) as store:
        store.put(BLOCKS)
        store.lease(KEYS[2], 100)
    index = folder / "index.sqlite"
    connection = sqlite3.connect(index)
    connection.execute("INSERT INTO blocks VALUES (?, 9, 9, '0123456789abcdef')", [b"q" * 32])
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return index


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_bit_that_flips_anywhere_in_the_index(tmp_path: Path, is_open: bool) -> None:
    right = make(tmp_path / "right").read_bytes()
    rng = np.random.default_rng(is_open)
    used = np.flatnonzero(np.frombuffer(right, np.uint8))
    # The header, the schema's text, and wherever there is something.
    places = [16, 18, *rng.choice(used[used < 4096], 8), *rng.choice(used, 14)]
    for place in places:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "right", folder)
        damaged = bytearray(right)
        damaged[place] ^= 1 << int(rng.integers(8))
        if is_open:
            with FolderStore(folder, SIZE) as store:
                (folder / "index.sqlite").write_bytes(damaged)
                use(store)
                check_heals(store)
        else:
            (folder / "index.sqlite").write_bytes(damaged)
            with FolderStore(folder, SIZE) as store:
                use(store)
                check_heals(store)
        shutil.rmtree(folder)


WRONG = [
    "UPDATE blocks SET used = 'yesterday'",
    "UPDATE blocks SET used = 1.5",
    "UPDATE blocks SET size = 'large'",
    "UPDATE blocks SET size = -1",
    "UPDATE blocks SET size = 9223372036854775807",
    "UPDATE blocks SET owner = x'00ff'",
    "UPDATE blocks SET owner = CAST(x'ff' AS TEXT)",
    "INSERT INTO blocks VALUES ('text', 5, 5, NULL)",
    "INSERT INTO blocks VALUES (x'00', 5, 5, NULL)",
    "INSERT INTO leases VALUES (x'00', 5, 'for ever')",
    "DELETE FROM total",
    "UPDATE total SET bytes = 'many'",
    "DROP TABLE leases",
    "DROP TABLE total",
    "CREATE TRIGGER more AFTER INSERT ON blocks BEGIN SELECT missing FROM nowhere; END",
]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("sql", WRONG)
def test_values_that_no_store_writes(tmp_path: Path, sql: str, is_open: bool) -> None:
    index = make(tmp_path)
    store = FolderStore(tmp_path, SIZE) if is_open else None
    connection = sqlite3.connect(index)
    connection.execute(sql)
    connection.commit()
    connection.close()
    with store or FolderStore(tmp_path, SIZE) as store:
        use(store)
        check_heals(store)


def test_a_writer_of_another_name_is_no_path(tmp_path: Path) -> None:
    """The token of a dead writer is a part of a path, which is removed."""
    folder, other = tmp_path / "folder", tmp_path / "other.lock"
    index = make(folder)
    other.write_text("of somebody else")
    connection = sqlite3.connect(index)
    connection.execute("UPDATE blocks SET owner = '../../other'")
    connection.commit()
    connection.close()
    with FolderStore(folder, SIZE) as store:
        use(store)
        check_heals(store)
    assert other.exists()


@pytest.mark.parametrize("what", ["gone", "cut", "replaced", "a pipe", "gone with its map"])
def test_a_log_that_goes_while_stores_are_open(tmp_path: Path, what: str) -> None:
    """Who opens the folder then found a disk that cannot be read, for as long as others ran."""
    log, map_ = tmp_path / "index.sqlite-wal", tmp_path / "index.sqlite-shm"
    with FolderStore(tmp_path, SIZE) as one, FolderStore(tmp_path, SIZE) as two:
        one.put(BLOCKS)
        two.touch(KEYS[:5])
        if what == "cut":
            os.truncate(log, 100)
        elif what == "replaced":
            (tmp_path / "new").write_bytes(b"abc")
            os.replace(tmp_path / "new", log)
        else:
            log.unlink()
            if what == "a pipe":
                os.mkfifo(log)
            elif what != "gone":
                map_.unlink()
        with FolderStore(tmp_path, SIZE) as late:
            assert late.put(MORE[:2]) == 2, late.counters.last_error
            for store in (one, two, late):
                use(store)
                check_heals(store)


@pytest.mark.parametrize("ns", [10**19, -(10**19), 2**62])
def test_a_file_may_claim_to_be_of_any_time(tmp_path: Path, ns: int) -> None:
    """Times past the year 2262 are more nanoseconds than SQLite keeps."""
    make(tmp_path)
    paths = sorted((tmp_path / "blocks").glob("*/*"))
    try:
        os.utime(paths[0], ns=(ns, ns))
    except (OSError, OverflowError) as error:
        pytest.skip(f"this file system knows no such time: {error}")
    (tmp_path / "index.sqlite").unlink()
    with FolderStore(tmp_path, SIZE) as store:
        use(store)
        assert store.counters.failed == 0, store.counters.last_error
        check_heals(store)


def test_a_file_may_be_of_any_size(tmp_path: Path) -> None:
    """A sparse file is larger than all sums."""
    make(tmp_path)
    path = sorted((tmp_path / "blocks").glob("*/*"))[0]
    for size in (1 << 62, 1 << 50, 1 << 43):
        try:
            os.truncate(path, size)
            break
        except OSError:
            continue
    (tmp_path / "index.sqlite").unlink()
    with FolderStore(tmp_path, SIZE) as store:
        store.put(MORE[:2])
        assert store.counters.failed == 0, store.counters.last_error
        check_heals(store)
    assert not path.exists(), "over the bound"
