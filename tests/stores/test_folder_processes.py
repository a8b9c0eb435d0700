"""Several processes on one folder: killed, frozen, forked; the bound holds over all of them."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvcache.prefix.stores import FolderStore, folder, folder_index
from stores.servers import freeze
from stores.worker import block, is_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

TESTS = Path(__file__).parents[1]
MAX_BYTES = 8 << 20


@contextlib.contextmanager
def running(task: str, root: Path, seed: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stores.worker", task, str(root), str(MAX_BYTES), str(seed)]
    process = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
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
    monkeypatch.setattr(folder_index, "WAIT", 0.2)
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
