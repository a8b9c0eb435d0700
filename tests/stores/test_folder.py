"""FolderStore in one process: its bound, an index that is wrong, full disks, hostile files."""

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

import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import Envelope, FolderStore, Rejection, SealedStore
from pykvcache.prefix.stores._files import BlockFiles
from pykvcache.prefix.stores.conformance import chain
from stores.test_folder_processes import TESTS, blocks_of, disk_bytes, rows

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes, limits of POSIX")

BLOCKS = chain(12, "folder")
KEYS = [key for key, _ in BLOCKS]


def buffers() -> list[bytearray]:
    return [bytearray(len(data)) for _, data in BLOCKS]


def path_of(folder: Path, key: bytes) -> Path:
    return folder / "blocks" / key.hex()[:2] / f"{key.hex()}.block"


def test_the_bound_covers_all_and_the_oldest_go_first(tmp_path: Path) -> None:
    blocks = chain(120, "bound", 100_000)
    keys = [key for key, _ in blocks]
    with FolderStore(tmp_path, 6 << 20) as one, FolderStore(tmp_path, 6 << 20) as other:
        one.put(blocks[:10])
        for begin in range(10, 120, 10):
            other.touch(keys[:5])
            one.put(blocks[begin : begin + 10])
            assert disk_bytes(tmp_path) <= 6 << 20
        assert other.contains(keys[:5]) == 5, "what another handle used was removed"
        assert other.contains(keys[110:]) == 10
        assert other.contains(keys[5:6]) == 0
        assert one.counters.removed > 50
        # Within what was put together, the end of the chain goes first.
        there = [other.contains([key]) for key in keys[10:]]
        for begin in range(0, 110, 10):
            run = there[begin : begin + 10]
            assert run == sorted(run, reverse=True)


def test_more_than_fits_at_once_keeps_the_head(tmp_path: Path) -> None:
    blocks = chain(90, "head", 100_000)
    with FolderStore(tmp_path, 6 << 20) as store:
        stored = store.put(blocks)
        kept = store.contains([key for key, _ in blocks])
        assert 30 < kept <= stored
        assert disk_bytes(tmp_path) <= 6 << 20
        assert store.put([(KEYS[0], bytes(7 << 20))]) == 0
        assert store.counters.too_large == 1
        assert store.contains([key for key, _ in blocks]) == kept, "it made room in vain"


def execute(sql: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as connection:
            connection.execute(sql)
            connection.commit()

    return damage


def overwrite(begin: int, data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with open(folder / "index.sqlite", "r+b") as file:
            file.seek(begin)
            file.write(data)

    return damage


def dangle(folder: Path) -> None:
    (folder / "index.sqlite").unlink()
    (folder / "index.sqlite").symlink_to("/nowhere/at/all")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda folder: (folder / "index.sqlite").unlink(),
    "empty": lambda folder: os.truncate(folder / "index.sqlite", 0),
    "cut": lambda folder: os.truncate(folder / "index.sqlite", 5000),
    "no database": overwrite(0, b"something else entirely"),
    "damaged pages": overwrite(4096, b"\xa5" * 20000),
    "another version": execute("PRAGMA user_version = 99"),
    "no table": execute("DROP TABLE blocks"),
    "rows are missing": execute("DELETE FROM blocks WHERE hex(key) < '8'"),
    "wrong sums": execute("UPDATE total SET bytes = bytes - 5000"),
    "a dangling link": dangle,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_wrong_index_is_made_again_from_the_files(tmp_path: Path, name: str) -> None:
    with FolderStore(tmp_path, 6 << 20) as store:
        store.put(BLOCKS)
    DAMAGES[name](tmp_path)
    with FolderStore(tmp_path, 6 << 20) as store:
        assert store.counters.rebuilt == 1
        assert store.contains(KEYS) == 12
        assert {entry.key for entry in store.entries()} == set(KEYS)
        assert store.put(BLOCKS) == 0
        for i in range(8):
            assert store.put(chain(10, i, 100_000)) == 10
        assert disk_bytes(tmp_path) <= 6 << 20
        assert rows(tmp_path) == len(blocks_of(tmp_path))


def test_an_index_that_goes_while_stores_are_open(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as one:
        one.put(BLOCKS[:4])
        DAMAGES["missing"](tmp_path)
        with FolderStore(tmp_path) as other:
            other.put(BLOCKS[4:8])
            one.put(BLOCKS[8:])
            assert rows(tmp_path) == 12
            DAMAGES["damaged pages"](tmp_path)
            for i in range(3):
                one.put(chain(2, i))
                other.put(chain(2, i + 10))
            assert one.contains(KEYS) == 12
        DAMAGES["missing"](tmp_path)
    with FolderStore(tmp_path):
        assert rows(tmp_path) == len(blocks_of(tmp_path)) >= 12


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_what_is_no_name_of_a_folder_makes_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError):
        FolderStore(name)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with FolderStore(folder) as store:
        store.put(BLOCKS)
        shutil.rmtree(folder)
        assert store.contains(KEYS) == 0
        assert store.get_into(KEYS, buffers()) == 0
        assert store.put(BLOCKS) == 12
        assert store.contains(KEYS) == 12
        assert rows(folder) == 12
        shutil.rmtree(folder)
        folder.write_text("a file")
        assert store.put(BLOCKS) == 0


def test_files_that_come_and_go_are_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        with FolderStore(folder) as store:
            store.put(BLOCKS if folder is one else chain(3, "two"))
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


def test_opening_looks_at_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FolderStore(tmp_path) as store:
        store.put(BLOCKS)
    monkeypatch.setattr(BlockFiles, "stat", None)
    with FolderStore(tmp_path) as store:
        assert len(list(store.entries())) == 12


@pytest.mark.slow
def test_a_hundred_thousand_blocks_open_in_half_a_second(tmp_path: Path) -> None:
    blocks = chain(100_000, "many", 10)
    with FolderStore(tmp_path, 1 << 40) as store:
        for begin in range(0, len(blocks), 5000):
            store.put(blocks[begin : begin + 5000])
    begin_time = time.perf_counter()
    with FolderStore(tmp_path, 1 << 40) as store:
        assert time.perf_counter() - begin_time < 0.5
        assert store.counters.rebuilt == 0


def test_pipes_and_folders_are_misses_and_do_not_hang(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        store.put(BLOCKS)
        for key in KEYS[:4]:
            path_of(tmp_path, key).unlink()
        os.mkfifo(path_of(tmp_path, KEYS[0]))
        path_of(tmp_path, KEYS[1]).mkdir()
        path_of(tmp_path, KEYS[2]).symlink_to("/etc/hostname")
        path_of(tmp_path, KEYS[3]).write_bytes(b"")
        for i in range(3):
            assert store.contains(KEYS[i:]) == 0
            assert store.get_into(KEYS[i:], buffers()[i:]) == 0
        assert store.get_into(KEYS[3:4], buffers()[3:4]) == 1  # the envelope sees what it is worth
        store.put(BLOCKS)
        store.trim(0)


def test_what_stands_in_the_way_of_one_block_keeps_no_other_out(tmp_path: Path) -> None:
    """A folder in a block's place, and a file in that of a folder of blocks."""
    for folder, i in ((tmp_path / "one", 3), (tmp_path / "two", 5)):
        with FolderStore(folder) as store:
            path = path_of(folder, KEYS[i])
            if i == 3:
                path.mkdir(parents=True)
            else:
                path.parent.write_bytes(b"")
            others = [key for key in KEYS if path_of(folder, key).parent != path.parent]
            assert len(others) >= 10
            for _ in range(2):
                assert store.put(BLOCKS) >= len(others)
                assert all(store.contains([key]) for key in others)
                assert not store.contains(KEYS[i : i + 1])
                assert store.counters.failed > 0
                assert len(list(store.entries())) == sum(store.present(KEYS))
                assert store.discard(KEYS) >= len(others)
                assert not any(store.present(KEYS)), "discard stopped there"
            store.put(BLOCKS)
        with FolderStore(folder) as again:
            assert sum(again.present(KEYS)) == len(list(again.entries())) >= len(others)


def test_a_bit_that_flips_in_any_region_is_a_miss(tmp_path: Path) -> None:
    envelope = Envelope(model="m", layout="l")
    with SealedStore(FolderStore(tmp_path), envelope) as store:
        sizes = [len(data) for _, data in BLOCKS]
        for begin in [0, 4, 6, 8, 16, 48, 64, 80, 96, 128, 700, -16, -1]:
            store.put(BLOCKS)
            path = path_of(tmp_path, KEYS[2])
            data = bytearray(path.read_bytes())
            data[begin] ^= 0x10
            path.write_bytes(data)
            assert len(store.get(KEYS, sizes)) == 2, begin
            assert not path.exists(), "it can be written again"
        assert store.counters.rejected == store.rejections.total() == 13
        assert store.rejections[Rejection.DAMAGED] >= 11
        store.put(BLOCKS)
        assert len(store.get(KEYS, sizes)) == 12


# A disk that is full, a folder that cannot be written ----------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_a_counter(small_disk: Path) -> None:
    with FolderStore(small_disk, 1 << 30) as store:
        store.put(BLOCKS)
        assert store.put(chain(80, "large", 100_000)) < 80
        assert store.counters.full > 0
        assert store.put(chain(8, "more", 100_000)) < 8
        assert not list((small_disk / "tmp").iterdir())
        assert store.get_into(KEYS, buffers()) == 12
        store.touch(KEYS)
        assert len(store.trim(2 << 20)) > 10
        assert store.put(chain(3, "after", 100_000)) == 3
    (small_disk / "filler").write_bytes(b"")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    with FolderStore(small_disk, 1 << 30) as store:
        assert store.contains(KEYS) in range(13)
        assert store.put(chain(3, "none", 100_000)) == 0
        assert store.counters.full + store.counters.skipped > 0


def test_a_limit_of_file_sizes_is_a_counter(tmp_path: Path) -> None:
    code = f"""
        import resource
        from pykvcache.prefix.stores import FolderStore
        from pykvcache.prefix.stores.conformance import chain
        store = FolderStore({str(tmp_path)!r})
        small, large = chain(3), chain(3, "large", 500_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        assert store.put(small) == 3
        assert store.put(large) == 0
        assert store.counters.full == 3, store.counters
        assert store.contains([key for key, _ in small]) == 3
        store.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    assert rows(tmp_path) == len(blocks_of(tmp_path)) == 3


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with FolderStore(folder) as store:
        store.put(BLOCKS)
    for path in [tmp_path, *tmp_path.parents[:3], folder, *folder.rglob("*")]:
        with contextlib.suppress(PermissionError):
            path.chmod(path.stat().st_mode | 0o055 if path.is_dir() else 0o444)
    folder.chmod(0o555)
    code = f"""
        import os
        import pykvcache.cli.app
        from pykvcache.cli import main
        from pykvcache.prefix.stores import FolderStore
        from pykvcache.prefix.stores.conformance import chain
        blocks = chain(12, "folder")
        if not os.getuid():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        store = FolderStore({str(folder)!r})
        keys = [key for key, _ in blocks]
        assert store.contains(keys) == 12
        assert store.get_into(keys, [bytearray(2000)] * 12) == 12
        assert store.put(chain(2, "new")) == 0
        store.touch(keys)
        assert store.trim(0) == []
        assert store.counters.denied > 0, store.counters
        assert {{(e.key, e.size) for e in store.entries()}} == {{(k, len(d)) for k, d in blocks}}
        store.close()
        assert list(store.entries()) == []
        for command, code in (("du", 0), ("ls", 0), ("trim", 1), ("clear", 1)):
            more = {{"trim": ["0"], "clear": ["--yes"]}}.get(command, [])
            assert main(["cache", command, {str(folder)!r}, *more]) == code, command
    """
    try:
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60, cwd=TESTS
        )
    finally:
        folder.chmod(0o755)


def test_trim_leaves_what_fits(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        store.put(BLOCKS)
        assert store.trim(disk_bytes(tmp_path) + 4096) == []
        assert store.contains([key for key, _ in BLOCKS]) == len(BLOCKS)
        assert store.trim(8192)


def test_a_clock_that_was_ahead_keeps_no_block_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, size = chain(10, "ahead", 100_000), 100_000
    with FolderStore(tmp_path, max_bytes=4 << 20) as store:
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 10**9 * 86400 * 365)
        store.put(ahead)
        monkeypatch.undo()
        for i in range(10):
            new = chain(4, i, size)
            assert store.put(new) == 4
            assert store.contains([key for key, _ in new]) == 4, "what is new goes first"
        assert store.contains([ahead[-1][0]]) == 0
        assert max(entry.used for entry in store.entries()) < time.time() + 60


def test_what_cannot_be_a_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "a\0b"):
        with pytest.raises(StoreError):
            FolderStore(path)
    with pytest.raises(StoreError) as caught:
        FolderStore(tmp_path, 1000)
    assert (caught.value.value, caught.value.limit) == (1000, 4 << 20)
    with pytest.raises(TypeError):
        FolderStore(tmp_path, 1e9)  # type: ignore[arg-type]
