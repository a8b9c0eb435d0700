"""Several processes on one folder: killed, frozen, forked; the bound holds over all of them."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvcache.prefix.stores import FolderStore, _shared_index
from stores.servers import freeze
from stores.worker import block, is_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

TESTS = Path(__file__).parents[1]
MAX_BYTES = 8 << 20


@contextlib.contextmanager
def running(task: str, folder: Path, seed: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stores.worker", task, str(folder), str(MAX_BYTES), str(seed)]
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


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def blocks_of(folder: Path) -> list[Path]:
    return [path for path in files(folder) if path.suffix == ".block"]


def disk_bytes(folder: Path) -> int:
    """What lies there, as `du` counts it."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files(folder))


def rows(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as connection:
        (n,) = connection.execute("SELECT count(*) FROM blocks").fetchone()
        assert connection.execute("SELECT blocks FROM total").fetchone() == (n,)
        return int(n)


def test_kill_9_loses_only_what_was_being_written(tmp_path: Path) -> None:
    dice = random.Random(1)
    n_checked = 0
    for round_ in range(4):
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
            # What the one that was killed last has said last is among the newest.
            assert writers[-1].stdout is not None
            last = (writers[-1].stdout.read() or "").splitlines()[-1:]
        with FolderStore(tmp_path, 1 << 30) as store:
            assert store.counters.rebuilt == 0
            assert not list((tmp_path / "tmp").iterdir()), "a temporary is left"
            found = blocks_of(tmp_path)
            assert all(map(is_whole, found))
            assert rows(tmp_path) == len(found)
            for name, began in map(str.split, last):
                is_there = store.contains([block(name)[0], block(name + "b")[0]]) == 2
                # On a busy machine the other one may have gone on for long after it.
                oldest = min(entry.used for entry in store.entries())
                assert is_there or oldest > float(began) - 1e-3
                n_checked += is_there
            assert disk_bytes(tmp_path) <= MAX_BYTES
    assert n_checked > 0
    assert len(list((tmp_path / "owners").iterdir())) == 0


def test_the_bound_always_holds_over_all_processes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(running("write", tmp_path, i)) for i in range(3)]
        for writer in writers:
            line(writer)
        largest = 0
        for _ in range(15):
            line(writers[0])
            for writer in writers:  # a moment that lasts
                freeze(writer)
            largest = max(largest, disk_bytes(tmp_path))
            for writer in writers:
                writer.send_signal(signal.SIGCONT)
        assert largest <= MAX_BYTES
        assert largest > MAX_BYTES // 4, "the test has filled nothing"


def test_a_frozen_process_costs_others_no_read_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared_index, "WAIT", 0.2)
    blocks = [block(str(i), 5000) for i in range(5)]
    keys = [key for key, _ in blocks]
    with FolderStore(tmp_path) as store:
        store.put(blocks)
        with running("hold", tmp_path, "lease") as holder:
            line(holder)
            freeze(holder)
            begin = time.monotonic()
            buffers = [bytearray(5000) for _ in blocks]
            assert store.contains(keys) == store.get_into(keys, buffers) == 5
            store.touch(keys)
            assert store.put([block("new")]) == 0
            assert store.lease(keys[0], 10), "who cannot ask evaluates"
            assert time.monotonic() - begin < 10
            assert store.counters.timed_out > 0
        assert store.put([block("new")]) == 1
        # The dead holder's lease lasts as long as it was taken for.
        while not store.lease(block("lease")[0], 5):
            assert time.monotonic() - begin < 30
            time.sleep(0.05)


def test_one_of_many_is_given_the_lease(tmp_path: Path) -> None:
    key = block("wanted")[0]
    stores = [FolderStore(tmp_path) for _ in range(3)]
    given = []

    def ask(store: FolderStore) -> None:
        if store.lease(key, 60):
            given.append(store)

    threads = [threading.Thread(target=ask, args=(store,)) for store in stores * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Who could not ask in time evaluates too: a lease saves work, nothing depends on it.
    assert len(given) - sum(store.counters.timed_out for store in stores) <= 1
    assert given
    for store in stores:
        store.close()


def test_a_lease_is_released_however_busy_the_index_is(tmp_path: Path) -> None:
    key = block("wanted")[0]
    with FolderStore(tmp_path) as store, FolderStore(tmp_path) as other:
        assert store.lease(key, 60)
        assert other._shared is not None
        writing, done = threading.Event(), threading.Event()

        def write() -> None:
            assert other._shared is not None
            with other._shared.transaction():
                writing.set()
                done.wait(0.3)

        thread = threading.Thread(target=write)
        thread.start()
        assert writing.wait(10)
        store.release(key)
        thread.join()
        assert not store.counters.timed_out
        assert other.lease(key, 60)


def test_a_lease_from_a_wrong_clock_does_not_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = block("wanted")[0]
    now = time.time()
    with FolderStore(tmp_path) as one, FolderStore(tmp_path) as other:
        monkeypatch.setattr(time, "time", lambda: now + 10 * 24 * 3600)
        assert one.lease(key, 3600)
        monkeypatch.undo()
        assert other.lease(key, 10)
