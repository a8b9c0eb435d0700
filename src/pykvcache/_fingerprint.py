"""What tells one GGUF file from another: its metadata, its tensor table, samples of its data."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Mapping

from pykvcache._native import lib
from pykvcache.errors import ModelLoadError

__all__ = ["FileId", "file_id", "model_fingerprint"]

#: size, modification time, device, inode
FileId = tuple[int, int, int, int]
_SAMPLE = 256


def file_id(path: str) -> FileId:
    """Return what changes when a file is replaced."""
    facts = os.stat(path)
    return facts.st_size, facts.st_mtime_ns, facts.st_dev, facts.st_ino


def model_fingerprint(path: str, known: FileId, metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 over all parts of a model, in hexadecimal.

    Metadata and tensor table count whole; of each tensor's data the first, middle and last 256
    bytes.
    """
    total = hashlib.sha256()
    try:
        if file_id(path) != known:
            raise ModelLoadError(f"{path} was changed since the model was loaded from it")
        for part in _parts(path, metadata):
            _add(total, part)
    except OSError as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"cannot read {path} again: {error}") from error
    return total.hexdigest()


def _parts(path: str, metadata: Mapping[str, str]) -> list[str]:
    n = int(metadata.get("split.count", "0"))
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path, re.DOTALL)
    if n < 2 or match is None:
        return [path]
    return [f"{match[1]}{i:05d}{match[2]}" for i in range(1, n + 1)]


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
