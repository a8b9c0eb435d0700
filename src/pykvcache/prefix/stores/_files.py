"""The files of a FolderStore: one per block, named by its key, written beside and renamed."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator

from pykvcache._paths import open_into

__all__ = ["IN_THE_WAY", "SHARDS", "BlockFiles"]

#: What somebody put in the place of one block, or of its folder: others can still be written.
IN_THE_WAY = (IsADirectoryError, NotADirectoryError, FileExistsError)

#: Folders that the blocks are spread over, by their keys' first byte.
SHARDS = [f"{byte:02x}" for byte in range(256)]
_SUFFIX = ".block"
# A pipe put in a block's place must not make a reader wait, nor a link lead it elsewhere.
_READ = os.O_RDONLY
for _name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    _READ |= getattr(os, _name, 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
for _name in ("O_CLOEXEC", "O_BINARY"):
    _WRITE |= getattr(os, _name, 0)

_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# Blocks of pykvcache: they can be computed again. See https://bford.info/cachedir/
"""


class BlockFiles:
    """Read and write the files below one folder; every method may raise OSError."""

    def __init__(self, root: str) -> None:
        self._blocks = os.path.join(root, "blocks")
        self._temporary = os.path.join(root, "tmp")
        self._root = root
        #: Whether the block that was read last was not in the system's memory.
        self.is_cold = False

    def make(self) -> None:
        """Make the folders where they are missing."""
        for folder in (self._blocks, self._temporary):
            os.makedirs(folder, exist_ok=True)
        tag = os.path.join(self._root, "CACHEDIR.TAG")
        with contextlib.suppress(OSError), open(tag, "x") as file:
            file.write(_TAG)

    def path(self, key: bytes) -> str:
        """Return where a block lies."""
        name = key.hex()
        return f"{self._blocks}/{name[:2]}/{name}{_SUFFIX}"

    def stat(self, key: bytes) -> os.stat_result | None:
        """Return the facts of a block's file, None where there is no regular one."""
        try:
            found = os.lstat(self.path(key))
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def read_into(self, key: bytes, view: memoryview) -> int:
        """Read a block into the front of a buffer.

        Returns
        -------
        int
            Its length; -1 where the buffer is too short.
        """
        opened: list[int] = []
        try:
            return self._read(open_into(opened, self.path(key), _READ), view)
        finally:
            if opened:
                os.close(*opened)

    def _read(self, descriptor: int, view: memoryview) -> int:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise FileNotFoundError("not a regular file")
        if facts.st_size > len(view):
            return -1
        done = _read_cached(descriptor, view[: facts.st_size])
        if done is not None:
            self.is_cold = done < facts.st_size
        if done == facts.st_size:
            return done
        with io.FileIO(descriptor, closefd=False) as file:
            if done:
                file.seek(done)
            return _read_rest(file, view[: facts.st_size], done or 0)

    def expect(self, keys: Iterable[bytes]) -> None:
        """Let the system read blocks in advance, where the last one had to come from the disk."""
        if not self.is_cold or not hasattr(os, "posix_fadvise"):
            return
        for key in keys:
            with contextlib.suppress(OSError):
                opened: list[int] = []
                try:
                    descriptor = open_into(opened, self.path(key), _READ)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    if opened:
                        os.close(*opened)

    def write(self, key: bytes, view: memoryview, token: str) -> None:
        """Write a block beside its place, and rename it."""
        temporary = os.path.join(self._temporary, f"{token}-{secrets.token_hex(8)}")
        opened: list[int] = []
        try:
            try:
                _write_all(open_into(opened, temporary, _WRITE), view)
            finally:
                if opened:
                    os.close(*opened)
            try:
                os.replace(temporary, self.path(key))
            except FileNotFoundError:
                os.makedirs(os.path.dirname(self.path(key)), exist_ok=True)
                os.replace(temporary, self.path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, key: bytes) -> None:
        """Remove a block; nothing happens where there is none, or a folder in its place."""
        with contextlib.suppress(FileNotFoundError, *IN_THE_WAY):
            os.unlink(self.path(key))

    def shards(self) -> set[str]:
        """Return which of the `SHARDS` are there."""
        try:
            return {*os.listdir(self._blocks)}.intersection(SHARDS)
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def keys(self, shard: str) -> set[bytes]:
        """Return the keys of all files in one of the `SHARDS`; no file is looked at."""
        try:
            names = os.listdir(os.path.join(self._blocks, shard))
        except (FileNotFoundError, NotADirectoryError):
            return set()
        keys = set()
        for name in names:
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(name.removesuffix(_SUFFIX))
                if len(key) == 32 and name == key.hex() + _SUFFIX and name[:2] == shard:
                    keys.add(key)
        return keys

    def rows(self, failed: Callable[[OSError], object]) -> Iterator[tuple[bytes, int, int]]:
        """Yield (key, size, used in nanoseconds) of every block, as an index would know them."""
        for shard in SHARDS:
            try:
                keys = self.keys(shard)
            except OSError as error:
                failed(error)
                continue
            for key in keys:
                facts = self.stat(key)
                if facts is not None:
                    yield key, facts.st_size, facts.st_mtime_ns

    def temporaries(self) -> Iterator[tuple[str, str]]:
        """Yield (token of the writer, path) of what is not yet renamed."""
        for name in os.listdir(self._temporary):
            yield name.partition("-")[0], os.path.join(self._temporary, name)


def _read_rest(file: io.FileIO, view: memoryview, done: int) -> int:
    """Read on to the end of a buffer, or of the file; return where that was."""
    while done < len(view):
        n_read = file.readinto(view[done:])
        if not n_read:
            break
        done += n_read
    return done


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _read_cached(descriptor: int, view: memoryview) -> int | None:
    """Read what needs no disk; None where the system does not tell."""
    try:
        return os.preadv(descriptor, [view], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except (OSError, AttributeError):
        return None
