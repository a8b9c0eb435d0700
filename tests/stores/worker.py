"""What the processes of the tests run: ``python -m stores.worker TASK FOLDER MAX_BYTES SEED``."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from pathlib import Path

from pykvcache.prefix.stores import FolderStore


def block(name: str, size: int = 100_000) -> tuple[bytes, bytes]:
    """A block whose content follows from its key."""
    key = hashlib.sha256(name.encode()).digest()
    return key, content(key, size)


def content(key: bytes, size: int) -> bytes:
    return (key * (size // 32 + 1))[:size]


def is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return data == content(bytes.fromhex(path.name.partition(".")[0]), len(data)) != b""


def write(folder: str, max_bytes: int, seed: str) -> None:
    """Put blocks without end; once they are stored say their name, and when that began."""
    with FolderStore(folder, max_bytes) as store:
        for i in itertools.count():
            name, began = f"{seed}/{i}", time.time()
            if store.put([block(name), block(name + "b", 40_000)]):
                os.write(1, f"{name} {began}\n".encode())


def hold(folder: str, max_bytes: int, seed: str) -> None:
    """Take a lease, and the right to write; say so and keep both."""
    store = FolderStore(folder, max_bytes)
    assert store.lease(block(seed)[0], 1.0)
    assert store._shared is not None
    with store._shared.transaction():
        os.write(1, b"held\n")
        time.sleep(600)


if __name__ == "__main__":
    task, folder, max_bytes, seed = sys.argv[1:]
    {"write": write, "hold": hold}[task](folder, int(max_bytes), seed)
