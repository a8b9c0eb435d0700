"""A folder whose files the system has not in memory is read ahead; otherwise nothing is asked."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykvcache.prefix.stores import Envelope, FolderStore, SealedStore
from pykvcache.prefix.stores.conformance import chain

pytestmark = pytest.mark.skipif(
    not hasattr(os, "RWF_NOWAIT"), reason="this system does not tell what is in memory"
)

BLOCKS = chain(12, "cold", 300_000)
KEYS = [key for key, _ in BLOCKS]


def drop(folder: Path) -> bool:
    """Let the system forget the files; False where it keeps any, as in a file system in memory."""
    # What is still being written stays.
    return any(all([*forgotten(folder)]) for _ in range(5))


def forgotten(folder: Path) -> Iterator[bool]:
    """Ask for each file, and yield whether it has gone."""
    for path in folder.glob("blocks/*/*.block"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            yield n_resident(descriptor) == 0
        finally:
            os.close(descriptor)


def n_resident(descriptor: int) -> int:
    """How many pages of a file are in memory: asked by a read, the system would fetch them."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(view)
        at, size = ctypes.addressof(first), len(view)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), pages)
        del first  # or the view could not be closed
    assert not failed
    return sum(page & 1 for page in pages)


def test_files_that_must_come_from_the_disk_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = os.posix_fadvise

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        asked.append(advice)
        real(descriptor, offset, length, advice)

    store = SealedStore(FolderStore(tmp_path), Envelope(model="m", layout="l"))
    store.put(BLOCKS)

    def read(begin: int, end: int) -> None:
        sizes = [len(data) for _, data in BLOCKS[begin:end]]
        found = store.get(KEYS[begin:end], sizes, exact=True)
        assert [bytes(one) for one in found] == [data for _, data in BLOCKS[begin:end]]

    read(0, 12)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    read(0, 12)
    read(0, 12)
    assert not asked, "all of it is in memory"
    for _ in range(20):
        monkeypatch.setattr(os, "posix_fadvise", real)
        if not drop(tmp_path):
            pytest.skip("this file system is in memory")
        monkeypatch.setattr(os, "posix_fadvise", advise)
        read(0, 4)  # finds out
        assert not asked
        if store.store._files.is_cold:
            break
    else:
        pytest.skip("what this disk is asked for is there before the answer")
    read(4, 8)
    assert asked == 4 * [os.POSIX_FADV_WILLNEED]
    store.close()
    store.store.expect(KEYS)
    assert len(asked) == 4


def test_blocks_that_are_not_there_are_expected_in_vain(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put(BLOCKS[:1])
    store._files.is_cold = True
    store.expect(KEYS)
    path = Path(store._files.path(KEYS[1]))
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    store.expect(KEYS)
    assert store.get_into(KEYS, [bytearray(300_000) for _ in KEYS]) == 1
    store.close()
