"""Names of files, of whatever type they come."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from typing import NamedTuple, TypeAlias

from pykvcache.errors import ArgumentError, DetailedError
from pykvcache.errors._shown import shown

__all__ = [
    "FileId",
    "Places",
    "as_file_name",
    "as_path",
    "check_regular",
    "file_id",
    "parts_of",
    "places",
]

#: Bytes, time, device and inode.
FileId: TypeAlias = tuple[int, int, int, int]


def as_path(
    value: str | os.PathLike[str],
    what: str = "path",
    order: str = "",
    error: type[DetailedError] = ArgumentError,
) -> str:
    """Return a file name as text; the error of a method names the order of its arguments."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        hint = f": the order is {order}" if order else ""
        raise TypeError(f"{what} must be a str or an os.PathLike, not {type(value).__name__}{hint}")
    raw = value if isinstance(value, (str, bytes)) else type(value).__fspath__(value)
    if not isinstance(raw, (str, bytes)):
        raise TypeError(
            f"{what} must be a str or an os.PathLike, not {type(value).__name__}, "
            f"whose __fspath__() gives {type(raw).__name__}"
        )
    name = os.fsdecode(raw)
    try:
        os.fsencode(name)
    except UnicodeEncodeError as found:
        at = found.start
        text = f"{what} is {shown(name)}: character {at} is none that a file name can hold"
        raise error(text, what, name, at) from None
    return name


def as_file_name(
    value: str | os.PathLike[str], what: str = "path", error: type[DetailedError] = ArgumentError
) -> str:
    """Return a name as text that a file can have: `as_path`, and no null character."""
    name = as_path(value, what, error=error)
    if "\0" in name:
        at = name.index("\0")
        text = f"{what} is {shown(name)}: character {at} is none that a file name can hold"
        raise error(text, what, name, at)
    return name


def check_regular(path: str) -> int:
    """Return the permissions of a file; a pipe would wait, a device would be replaced."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "a file name holds no NUL")
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return stat.S_IMODE(mode)


class Places(NamedTuple):
    """Where a file is written first, what it replaces then, and the permissions of that."""

    temporary: str
    target: str
    mode: int | None


def places(path: str) -> Places:
    """Return where a file is written such that its name always stands for a whole one."""
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = check_regular(path)
    # A symbolic link stays, and what it leads to is replaced.
    target = os.path.realpath(path) if os.path.islink(path) else path
    folder, name = os.path.split(target)
    # 40 characters are at most 160 of the 255 bytes that a name may have.
    temporary = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.tmp")
    return Places(temporary, target, mode)


def file_id(path: str) -> FileId:
    """Return what changes when a file is written or replaced."""
    facts = os.stat(path)
    return facts.st_size, facts.st_mtime_ns, facts.st_dev, facts.st_ino


def parts_of(path: str) -> list[str]:
    """Return the names of all parts of a split model by the name of one; none of another file."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", path, re.DOTALL)
    if found is None:
        return []
    return [f"{found[1]}{i + 1:05d}{found[2]}" for i in range(int(found[3]))]
