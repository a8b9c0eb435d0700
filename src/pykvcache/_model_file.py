"""A model's file: checks before llama.cpp opens it, and the fingerprint of its content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
from collections.abc import Mapping

from pykvcache._arguments import FileId, file_id
from pykvcache._native import lib
from pykvcache.errors import ModelLoadError

__all__ = ["FileIds", "file_ids", "model_fingerprint", "readable_path"]

FileIds = dict[str, FileId]
_SAMPLE = 256


def readable_path(path: str) -> bytes:
    """Return the path as bytes, after checks for faults that llama.cpp reports poorly."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ModelLoadError.of(path, "the path holds a NUL character")
    try:
        # A pipe would block, and only a regular file can be mapped.
        mode = os.stat(raw).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelLoadError.of(path, "it is not a regular file")
        with open(raw, "rb") as file:
            magic = file.read(4)
        for part in _parts_of(path):
            if os.path.exists(part) and not os.path.isfile(part):
                raise ModelLoadError.of(path, f"its part {part} is not a regular file")
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(error.errno, f"cannot load model: {error.strerror}", path) from None
    if magic != b"GGUF":
        raise ModelLoadError.of(path, "it is not a GGUF file")
    return raw


def _parts_of(path: str) -> list[str]:
    """Return the names of all parts of a split model, given one part; [] for other files."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", path, re.DOTALL)
    if found is None:
        return []
    return [f"{found[1]}{i + 1:05d}{found[2]}" for i in range(int(found[3]))]


def file_ids(path: str) -> FileIds:
    """Return attributes that change when a model's file or one of its parts is replaced."""
    # Absolute, because the working directory may change before the file is read again.
    first = os.path.abspath(path)
    ids = {first: file_id(first)}
    for part in _parts_of(first):
        with contextlib.suppress(OSError):
            ids[part] = file_id(part)
    return ids


def model_fingerprint(known: FileIds, metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 over all parts of a model, in hexadecimal.

    Covers metadata and tensor table, and the first, middle and last 256 bytes of each tensor's
    data.
    """
    total = hashlib.sha256()
    # A single file may be named like a part, next to unrelated files.
    is_split = int(metadata.get("split.count", "0")) > 1
    first = next(iter(known))
    try:
        for path in sorted(known) if is_split else [first]:
            if file_id(path) != known[path]:
                raise ModelLoadError.of(path, "it was changed since the model was loaded from it")
            _add(total, path)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(f"cannot read the model again: {error}") from error
    return total.hexdigest()


def _add(total: hashlib._Hash, path: str) -> None:
    start, tensors = lib.gguf_layout(os.fsencode(path))
    with open(path, "rb") as file:
        header = file.read(start)
        total.update(struct.pack("<QQ", len(header), len(tensors)))
        total.update(header)
        for offset, size in tensors:
            for at in (0, (size - _SAMPLE) // 2, size - _SAMPLE):
                file.seek(start + offset + max(at, 0))
                total.update(file.read(min(_SAMPLE, size)))
