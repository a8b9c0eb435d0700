"""What the processes of the tests run: ``python -m stores.worker TASK FOLDER MAX_BYTES SEED``."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
import time
from pathlib import Path

from pykvcache.prefix.stores import FolderStore
from pykvcache.prefix.stores.folder import FolderIndex


def block(name: str, size: int = 100_000) -> tuple[bytes, bytes]:
    key = hashlib.sha256(name.encode()).digest()
    return key, content(key, size)


def content(key: bytes, size: int) -> bytes:
    return (key * (size // 32 + 1))[:size]


def is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return data == content(bytes.fromhex(path.name.partition(".")[0]), len(data)) != b""


def write(folder: str, max_bytes: int, seed: str) -> None:
    with FolderStore(folder, max_bytes) as store:
        os.write(1, b"open\n")
        sys.stdin.readline()
        for i in itertools.count():
            name, began = f"{seed}/{i}", time.time()
            if store.put([block(name), block(name + "b", 40_000)]):
                os.write(1, f"{name} {began}\n".encode())


def grow(folder: str, max_bytes: int, seed: str) -> None:
    dice = random.Random(seed)
    with FolderStore(folder, max_bytes) as store:
        while True:
            path = dice.randrange(6)
            names = [f"root/{i}" for i in range(4)] + [f"{seed}/{path}/{i}" for i in range(4, 12)]
            blocks = [block(name) for name in names[: dice.randrange(1, 13)]]
            keys = [key for key, _ in blocks]
            store.touch(keys)
            store.put(blocks)
            store.touch(keys)
            os.write(1, b"used\n")


def hold(folder: str, max_bytes: int, seed: str) -> None:
    with FolderIndex(os.path.join(folder, "index.sqlite")).transaction():
        os.write(1, b"held\n")
        time.sleep(600)


if __name__ == "__main__":
    task, folder, max_bytes, seed = sys.argv[1:]
    {"write": write, "grow": grow, "hold": hold}[task](folder, int(max_bytes), seed)
