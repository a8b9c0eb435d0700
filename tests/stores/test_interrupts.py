"""Ctrl-C anywhere in what a folder does with files: none stays open, and none is left lying."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pykvcache.prefix.stores import FolderStore
from pykvcache.prefix.stores._files import BlockFiles
from pykvcache.prefix.stores._locks import Owner, shared_or_exclusive
from support.interrupts import CtrlCAnywhere

#: How many of the places where an interrupt can come are tried; 0 tries them all.
PLACES = int(os.environ.get("PYKVCACHE_FUZZ_PLACES", "150"))
# Without the index: it has most places, and SQLite alone closes its files.
FILES = ("folder.py", "_shared_index.py", "_locks.py", "_files.py", "_paths.py")

KEYS = [bytes([i]) * 32 for i in range(4)]
ITEMS = [(key, bytes(5000)) for key in KEYS]

pytestmark = [
    pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open files"),
    # A file that was being opened is closed as its object goes.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def opened(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open, and the folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # what listed them
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(
        name for name in found if Path(name.removesuffix(" (deleted)")).is_relative_to(folder)
    )


def owner(folder: Path) -> None:
    one = Owner(str(folder))
    other = Owner(str(folder))
    assert one.is_alive(other.token)
    other.close()
    assert not one.is_alive(other.token)
    one.forget()
    one.close()


def lock(folder: Path) -> None:
    with shared_or_exclusive(str(folder / "lock"), exclusive=True, seconds=1):
        pass


def blocks(folder: Path) -> None:
    files, buffer = BlockFiles(str(folder)), memoryview(bytearray(5000))
    files.make()
    for key, data in ITEMS:
        files.write(key, memoryview(data), "mine")
    for key in KEYS:
        assert files.read_into(key, buffer) == 5000
    files.is_cold = True
    files.expect(KEYS)


def store(folder: Path) -> None:
    buffers = [bytearray(5000) for _ in KEYS]
    with FolderStore(folder / "store") as one:
        one.put(ITEMS)
        one.get_into(KEYS, buffers)
        one.lease(KEYS[3], 1)
        one.trim(4 << 20)
        one.discard(KEYS)


def again(folder: Path) -> None:
    """The index is wrong, and made again."""
    FolderStore(folder / "again").close()
    (folder / "again" / "index.sqlite").write_bytes(b"x" * 4096)
    with FolderStore(folder / "again") as one:
        one.put(ITEMS)


def sweep(
    work: Callable[[Path], None], folder: Path, files: tuple[str, ...] = FILES
) -> Iterator[int]:
    """Interrupt something everywhere."""

    def attempt(place: int) -> int:
        interrupt = CtrlCAnywhere(place, files)
        interrupt.run(lambda: work(folder))
        return interrupt.seen

    n = attempt(0)
    places = range(1, n + 1)
    chosen = np.random.default_rng(1).permutation(places)[:PLACES] if PLACES else places
    for place in chosen:
        attempt(int(place))
        yield int(place)


@pytest.mark.parametrize("work", [owner, lock, blocks, store, again])
def test_no_file_stays_open_after_an_interrupt(
    work: Callable[[Path], None], tmp_path: Path
) -> None:
    # A folder that is opened looks into 256 others.
    files = FILES if work in (owner, lock, blocks) else FILES[:3]
    for place in sweep(work, tmp_path, files):
        if opened(tmp_path):
            gc.collect()  # what was interrupted may be part of a cycle
        assert not opened(tmp_path), place


def test_no_file_is_left_lying_after_an_interrupt(tmp_path: Path) -> None:
    for place in sweep(blocks, tmp_path):
        assert not os.listdir(tmp_path / "tmp"), place
