"""FolderStore: processes that are killed, its bound, a damaged index, full disks, hostile files."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pykvcache.errors import StoreError
from pykvcache.prefix.stores import FolderStore, folder
from pykvcache.prefix.stores.conformance import chain
from stores.servers import freeze
from stores.worker import block, is_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and links of POSIX")

TESTS = Path(__file__).parents[1]
MAX_BYTES = 8 << 20


@contextlib.contextmanager
def running(task: str, root: Path, seed: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stores.worker", task, str(root), str(MAX_BYTES), str(seed)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=TESTS, stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = process.stdout.readline().strip()
    assert found, "the process ended"
    return found


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def blocks_of(root: Path) -> list[Path]:
    return [path for path in files(root) if path.suffix == ".block"]


def disk_bytes(root: Path) -> int:
    """What the files take, as `du` counts it."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files(root))


def rows(root: Path) -> int:
    with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
        n, total = connection.execute(
            "SELECT count(*), coalesce(sum((size + 4095) & ~4095), 0) FROM blocks"
        ).fetchone()
        assert connection.execute("SELECT bytes FROM total").fetchone() == (total,)
        return int(n)


def test_kill_9_loses_only_the_block_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(1)
    n_checked = 0
    monkeypatch.setattr(folder, "_STALE_SECONDS", 0.0)
    for round_ in range(20):
        if round_ >= 4 and n_checked:  # on a busy machine the last block may be gone each time
            break
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(running("write", tmp_path, f"{round_}.{i}")) for i in range(2)
            ]
            # A store that opens removes the rows of blocks that another is about to write.
            for writer in writers:
                assert line(writer) == "open"
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write("go\n")
                writer.stdin.flush()
            for writer in writers:
                for _ in range(dice.randrange(1, 6)):
                    line(writer)
            time.sleep(dice.random() / 50)
            for writer in writers:
                writer.kill()
            # The last block that the last writer named is among the newest.
            assert writers[-1].stdout is not None
            last = (writers[-1].stdout.read() or "").splitlines()[-1:]
        assert disk_bytes(tmp_path) <= MAX_BYTES
        with FolderStore(tmp_path, 1 << 30) as store:
            assert store.counters.rebuilt == 0
            assert not list((tmp_path / "tmp").iterdir()), "a temporary file is left"
            found = blocks_of(tmp_path)
            assert all(map(is_whole, found))
            assert rows(tmp_path) == len(found)
            for name, began in map(str.split, last):
                is_there = store.contains([block(name)[0], block(name + "b")[0]]) == 2
                # On a busy machine the other writer may have gone on for long after it.
                oldest = min(entry.used for entry in store.entries())
                assert is_there or oldest > float(began) - 1e-3
                n_checked += is_there
    assert n_checked > 0


def test_processes_that_use_and_trim_one_folder_keep_paths_whole(tmp_path: Path) -> None:
    """Two processes use paths of a tree while a third one trims."""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(running("grow", tmp_path, i)) for i in range(2)]
        store = stack.enter_context(FolderStore(tmp_path, MAX_BYTES))
        for i in range(8):
            for writer in writers:
                line(writer)
            store.trim((4 + i % 3) << 20)
        for writer in writers:
            freeze(writer)
        for seed in range(2):
            for path in range(6):
                keys = [block(f"{seed}/{path}/{i}")[0] for i in range(12)]
                keys[:4] = [block(f"root/{i}")[0] for i in range(4)]
                there = store.present(keys)
                assert there == sorted(there, reverse=True), (seed, path, there)


def test_a_frozen_process_costs_no_read_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "WAIT", 0.2)
    blocks = [block(str(i), 5000) for i in range(5)]
    keys = [key for key, _ in blocks]
    with FolderStore(tmp_path) as store:
        store.put(blocks)
        with running("hold", tmp_path, "") as holder:
            line(holder)
            freeze(holder)
            began = time.monotonic()
            assert store.contains(keys) == store.get_into(keys, [bytearray(5000)] * 5) == 5
            store.touch(keys)
            assert store.put([block("new")]) == 0
            assert time.monotonic() - began < 10
            assert store.counters.timed_out > 0
        assert store.put([block("new")]) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_is_forked_while_threads_are_in_sqlite_opens_a_store(tmp_path: Path) -> None:
    """SQLite has locks of its own: one held by a thread that the child lacks would hang it."""
    code = f"""
        import os, signal, threading
        from pykvcache.prefix.stores import FolderStore
        over = False
        def work(name):
            n = 0
            while not over:
                with FolderStore(os.path.join({str(tmp_path)!r}, name)) as store:
                    store.put([(bytes([n % 256]) * 32, b"x")])
                n += 1
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads: thread.start()
        for n in range(25):
            pid = os.fork()
            if not pid:
                signal.alarm(30)
                with FolderStore(os.path.join({str(tmp_path)!r}, "c")) as store:
                    os._exit(store.put([(bytes([n]) * 32, b"x")]) != 1)
            assert os.waitpid(pid, 0)[1] == 0, n
        over = True
        for thread in threads: thread.join()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    subprocess.run(command, check=True, timeout=300, cwd=TESTS)


BLOCKS = chain(12, "folder")
KEYS = [key for key, _ in BLOCKS]
BOUND = 6 << 20


def buffers() -> list[bytearray]:
    return [bytearray(len(data)) for _, data in BLOCKS]


def path_of(root: Path, key: bytes) -> Path:
    return root / "blocks" / key.hex()[:2] / f"{key.hex()}.block"


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


def execute(*statements: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with contextlib.closing(sqlite3.connect(root / "index.sqlite")) as connection:
            for sql in statements:
                connection.execute(sql)
            connection.commit()

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda root: (root / "index.sqlite").unlink(),
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


@pytest.fixture
def visible_path() -> Iterator[Path]:
    """A folder that other users may enter: pytest's own is closed by each run that starts."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_folder_that_may_only_be_read(visible_path: Path) -> None:
    root = visible_path / "store"
    with FolderStore(root) as store:
        store.put(BLOCKS)
    (hidden := visible_path / "hidden").mkdir()
    for path in [visible_path, root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o444)
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
