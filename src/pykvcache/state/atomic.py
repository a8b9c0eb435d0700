"""Atomic file writes: a name always refers to the complete old file or the complete new one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from pykvcache._arguments import places
from pykvcache._native import lib
from pykvcache.errors import StateFileError, StateFileNotFound

__all__ = ["file_error", "write_atomically"]

#: Smaller pieces are joined: a system call costs more than copying this many bytes.
_JOINED = 1 << 16


def file_error(error: OSError, path: str) -> StateFileError:
    """Convert an OSError to an error of this package."""
    kind = StateFileNotFound if isinstance(error, FileNotFoundError) else StateFileError
    result: StateFileError = kind(error.errno, error.strerror or str(error), path)
    return result


def write_atomically(path: str, pieces: Sequence[memoryview], *, sync: bool) -> int:
    """Write a temporary file next to ``path`` and rename it; return the number of bytes.

    With ``sync``, data and name are on disk when this returns.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    size = sum(map(len, pieces))
    try:
        temporary, target, mode = places(path)
        # O_CLOEXEC is Python's default. A file readable only by its owner stays so.
        try:
            own = 0o666 if mode is None else mode & 0o666
            descriptor = os.open(temporary, flags, own)
            # The buffer joins small pieces; large ones are written as they are.
            with open(descriptor, "wb", buffering=_JOINED) as file:
                if mode is not None and hasattr(os, "fchmod"):
                    os.fchmod(descriptor, mode)
                # Otherwise, when a file is replaced, ext4 allocates its blocks in rename() and
                # waits for the data to reach the disk: several times as long as the write.
                lib.claim_blocks(descriptor, size)
                file.writelines(pieces)
                if sync:
                    file.flush()
                    os.fsync(descriptor)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if sync:
            _sync_folder(os.path.dirname(target) or ".")
    except OSError as error:
        folder = os.path.dirname(path)
        if isinstance(error, FileNotFoundError) and folder and not os.path.isdir(folder):
            error = FileNotFoundError(error.errno, f"there is no folder {folder}")
        raise file_error(error, path) from error
    return size


def _sync_folder(folder: str) -> None:
    """Make the new name durable; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
