"""FolderStore in one process: its bound, a damaged index, full disks, hostile files."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import FolderStore
from pykvcache.prefix.stores.conformance import chain
from stores.test_folder_processes import TESTS, blocks_of, disk_bytes, rows

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes, limits of POSIX")

BLOCKS = chain(12, "folder")
KEYS = [key for key, _ in BLOCKS]
BOUND = 6 << 20


def buffers() -> list[bytearray]:
    return [bytearray(len(data)) for _, data in BLOCKS]


def path_of(root: Path, key: bytes) -> Path:
    return root / "blocks" / key.hex()[:2] / f"{key.hex()}.block"


# The bound ------------------------------------------------------------------------------


def test_the_bound_covers_all_files_and_the_oldest_blocks_go_first(tmp_path: Path) -> None:
    blocks = chain(120, "bound", 100_000)
    keys = [key for key, _ in blocks]
    with FolderStore(tmp_path, BOUND) as one, FolderStore(tmp_path, BOUND) as other:
        one.put(blocks[:10])
        for begin in range(10, 120, 10):
            other.touch(keys[:5])
            one.put(blocks[begin : begin + 10])
            assert disk_bytes(tmp_path) <= BOUND
        assert other.contains(keys[:5]) == 5, "a block that another store used was removed"
        assert other.contains(keys[110:]) == 10
        assert other.contains(keys[5:6]) == 0
        assert one.counters.removed > 50
        there = other.present(keys[10:])
        for begin in range(0, 110, 10):
            run = there[begin : begin + 10]
            assert run == sorted(run, reverse=True), "the end of a path goes first"


def test_a_path_that_does_not_fit_keeps_its_beginning(tmp_path: Path) -> None:
    blocks = chain(90, "head", 100_000)
    with FolderStore(tmp_path, BOUND) as store:
        stored = store.put(blocks)
        assert 30 < store.contains([key for key, _ in blocks]) == stored
        assert store.counters.full == 90 - stored
        assert disk_bytes(tmp_path) <= BOUND
        assert store.put([(KEYS[0], bytes(7 << 20))]) == 0
        assert store.counters.too_large == 1
        assert store.counters.removed == 0, "it made room in vain"


def test_a_later_call_is_more_recent_whatever_the_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = chain(10, "ahead", 100_000)
    with FolderStore(tmp_path, 4 << 20) as store:
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 10**9 * 86400 * 365)
        store.put(ahead)
        monkeypatch.undo()
        for i in range(10):
            new = chain(4, i, 100_000)
            assert store.put(new) == 4
            assert store.contains([key for key, _ in new]) == 4, "the newest block goes first"
        assert store.contains([ahead[-1][0]]) == 0


# An index that is lost or damaged --------------------------------------------------------


def execute(*statements: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
            for sql in statements:
                connection.execute(sql)
            connection.commit()

    return damage


def overwrite(begin: int, data: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with open(root / "index.sqlite", "r+b") as file:
            file.seek(begin)
            file.write(data)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda root: (root / "index.sqlite").unlink(),
    "damaged pages": overwrite(4096, b"\xa5" * 20000),
    "another version": execute("PRAGMA user_version = 99"),
    "a version with a log": execute("PRAGMA journal_mode = WAL", "PRAGMA user_version = 1"),
    "no table": execute("DROP TABLE blocks"),
    "a wrong total": execute("UPDATE total SET bytes = bytes - 5000"),
    "a trigger": execute("CREATE TRIGGER t AFTER INSERT ON blocks BEGIN SELECT a FROM b; END"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_made_again_from_the_files(tmp_path: Path, name: str) -> None:
    with FolderStore(tmp_path, BOUND) as store:
        store.put(BLOCKS)
    DAMAGES[name](tmp_path)
    with FolderStore(tmp_path, BOUND) as store:
        assert store.contains(KEYS) == 12
        assert store.counters.failed == 0
        assert store.put(BLOCKS) == 0
        for i in range(8):
            assert store.put(chain(10, i, 100_000)) >= 10 * (i > 0), "damage costs one call"
        assert store.counters.rebuilt == 1
        assert disk_bytes(tmp_path) <= BOUND
        assert rows(tmp_path) == len(blocks_of(tmp_path)) == len(list(store.entries()))


def test_a_lost_index_keeps_the_order_of_uses(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        store.put(BLOCKS[:6])
        store.put(BLOCKS[6:])
        store.touch(KEYS[:9])
    DAMAGES["missing"](tmp_path)
    with FolderStore(tmp_path) as store:
        assert store.trim(0) == [*KEYS[:8:-1], *KEYS[8::-1]]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_bit_that_flips_anywhere_in_the_index_costs_one_call(
    tmp_path: Path, is_open: bool
) -> None:
    more, keys = chain(5, "more"), [key for key, _ in chain(5, "more")]
    with FolderStore(tmp_path / "right") as store:
        store.put(BLOCKS)
    right = (tmp_path / "right" / "index.sqlite").read_bytes()
    rng = np.random.default_rng(is_open)
    used = np.flatnonzero(np.frombuffer(right, np.uint8))
    # The header, the schema's text, and wherever the file is not empty.
    for place in [16, 18, *rng.choice(used[used < 4096], 4), *rng.choice(used, 8)]:
        root = tmp_path / "damaged"
        shutil.copytree(tmp_path / "right", root)
        damaged = bytearray(right)
        damaged[place] ^= 1 << int(rng.integers(8))
        with contextlib.ExitStack() as stack:
            if not is_open:
                (root / "index.sqlite").write_bytes(damaged)
            store = stack.enter_context(FolderStore(root))
            (root / "index.sqlite").write_bytes(damaged)
            store.touch(KEYS)
            store.put(more[:2])
            store.trim(20 << 20)
            store.discard(keys)
            assert all(entry.size >= 0 for entry in store.entries())
            assert store.contains(KEYS) == 12, "blocks are files, whatever the index says"
            assert store.put(more) == 5, (place, store.counters)
            assert store.counters.failed <= 3
        shutil.rmtree(root)


# Files of other programs -----------------------------------------------------------------


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with FolderStore(root) as store:
        store.put(BLOCKS)
        shutil.rmtree(root)
        assert store.contains(KEYS) == store.get_into(KEYS, buffers()) == 0
        assert store.put(BLOCKS) == store.contains(KEYS) == rows(root) == 12
        shutil.rmtree(root)
        root.write_text("a file")
        assert store.put(BLOCKS) == 0
        assert store.counters.failed > 0


def test_files_that_come_and_go_are_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root in (one, two):
        with FolderStore(root) as store:
            store.put(BLOCKS if root is one else chain(3, "two"))
    shutil.copytree(two / "blocks", one / "blocks", dirs_exist_ok=True)
    path_of(one, KEYS[5]).unlink()
    (one / "blocks" / "README").write_text("not ours")
    (one / "blocks" / "ab").mkdir(exist_ok=True)
    (one / "blocks" / "ab" / "short.block").write_text("not ours")
    with FolderStore(one) as store:
        assert store.contains(KEYS) == 5
        assert len(list(store.entries())) == rows(one) == 14
        assert store.put(BLOCKS) == 1
        assert len(store.trim(0)) == 15
    assert (one / "blocks" / "README").exists()


def test_pipes_links_and_folders_are_misses_and_do_not_hang(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        store.put(BLOCKS)
        for key in KEYS[:4]:
            path_of(tmp_path, key).unlink()
        os.mkfifo(path_of(tmp_path, KEYS[0]))
        path_of(tmp_path, KEYS[1]).mkdir()
        path_of(tmp_path, KEYS[2]).symlink_to("/etc/hostname")
        path_of(tmp_path, KEYS[3]).write_bytes(b"")
        for i in range(3):
            assert store.contains(KEYS[i:]) == store.get_into(KEYS[i:], buffers()[i:]) == 0
        assert store.get_into(KEYS[3:4], buffers()[3:4]) == 1, "its envelope is checked later"
        store.put(BLOCKS)
        store.trim(0)


# A disk that is full, a folder that cannot be written ------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(root)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def test_a_full_disk_is_a_counter(small_disk: Path) -> None:
    with FolderStore(small_disk, 1 << 30) as store:
        store.put(BLOCKS)
        assert store.put(chain(80, "large", 100_000)) < 80
        assert store.counters.full > 0
        assert not list((small_disk / "tmp").iterdir())
        assert store.get_into(KEYS, buffers()) == 12
        store.touch(KEYS)
        assert len(store.trim(2 << 20)) > 10
        assert store.put(chain(3, "after", 100_000)) == 3
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    with FolderStore(small_disk, 1 << 30) as store:
        assert store.contains(KEYS) == 12
        assert store.put(chain(3, "none", 100_000)) == 0
        assert store.counters.full + store.counters.failed > 0


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with FolderStore(root) as store:
        store.put(BLOCKS)
    (hidden := tmp_path / "hidden").mkdir()
    for path in [tmp_path, *tmp_path.parents[:3], root, *root.rglob("*")]:
        with contextlib.suppress(PermissionError):
            path.chmod(path.stat().st_mode | 0o055 if path.is_dir() else 0o444)
    root.chmod(0o555)
    hidden.chmod(0)
    try:
        code = f"""
            import os
            import pykvcache.cli.app
            from pykvcache.cli import main
            from pykvcache.errors import StoreError
            from pykvcache.prefix.stores import FolderStore
            from pykvcache.prefix.stores.conformance import chain
            blocks = chain(12, "folder")
            if not os.getuid():
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            store = FolderStore({str(root)!r})
            keys = [key for key, _ in blocks]
            assert store.contains(keys) == 12
            assert store.get_into(keys, [bytearray(2000)] * 12) == 12
            assert store.put(chain(2, "new")) == 0
            store.touch(keys)
            assert store.trim(0) == []
            assert store.counters.denied > 0, store.counters
            found = {{(entry.key, entry.size) for entry in store.entries()}}
            assert found == {{(key, len(data)) for key, data in blocks}}
            try:
                FolderStore({str(hidden)!r})
            except StoreError as error:
                assert "Permission denied" in str(error)
            else:
                raise AssertionError("a folder that may not be read is no store")
            for command, code in (("du", 0), ("ls", 0), ("trim", 1), ("clear", 1)):
                more = {{"trim": ["0"], "clear": ["--yes"]}}.get(command, [])
                assert main(["cache", command, {str(root)!r}, *more]) == code, command
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        subprocess.run(command, check=True, timeout=60, cwd=TESTS)
    finally:
        root.chmod(0o755)
        hidden.chmod(0o755)


def test_what_cannot_be_a_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "", "a\0b"):
        with pytest.raises(StoreError):
            FolderStore(path)
    with pytest.raises(StoreError) as caught:
        FolderStore(tmp_path, 1000)
    assert (caught.value.value, caught.value.limit) == (1000, 4 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
