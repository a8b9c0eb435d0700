"""Fingerprint of a GGUF file: hash of metadata, tensor table and samples of the data."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Mapping

from pykvcache._arguments import FileId, file_id, parts_of
from pykvcache._native import lib
from pykvcache.errors import ModelLoadError

__all__ = ["FileIds", "file_ids", "model_fingerprint"]

FileIds = dict[str, FileId]
_SAMPLE = 256


def file_ids(path: str) -> FileIds:
    """Return attributes that change when a model's file or one of its parts is replaced."""
    # Absolute, because the working directory may change before the file is read again.
    first = os.path.abspath(path)
    ids = {first: file_id(first)}
    for part in parts_of(first):
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
                raise ModelLoadError.of(
                    str(path), "it was changed since the model was loaded from it"
                )
            _add(total, path)
    except OSError as error:
        if isinstance(error, ModelLoadError):
            raise
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
