"""Checks of a model's file before llama.cpp opens it."""

from __future__ import annotations

import os
import stat

from pykvcache._arguments import parts_of
from pykvcache.errors import ModelLoadError

__all__ = ["readable_path"]


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
        for part in parts_of(path):
            if os.path.exists(part) and not os.path.isfile(part):
                raise ModelLoadError.of(path, f"its part {part} is not a regular file")
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(error.errno, f"cannot load model: {error.strerror}", path) from None
    if magic != b"GGUF":
        raise ModelLoadError.of(path, "it is not a GGUF file")
    return raw
