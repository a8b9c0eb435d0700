"""The file format: a safetensors file with checksums for its header and every tensor.

docs/state-format.md describes it byte by byte. This module does not know what tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from pykvcache._arguments import ByteArray, check_kind, check_regular
from pykvcache.errors import (
    ArgumentError,
    StateDamaged,
    StateError,
    StateFormatError,
    StateTrailingBytes,
    StateTruncated,
    StateVersionError,
    how_to_install,
)
from pykvcache.state.atomic import file_error

__all__ = [
    "FORMAT",
    "SIZES",
    "VERSION",
    "Container",
    "Tensor",
    "best_checksum",
    "find_checksum",
    "naming",
    "open_file",
    "pack",
    "parse",
]

FORMAT = "pykvcache.state"
VERSION = 1
CHECKSUMS = "checksums"
#: Bytes of a digest.
_DIGESTS = {"xxh3-128": 16, "sha256": 32}
#: Bytes per element of the safetensors types in use.
SIZES = {"U8": 1, "I32": 4, "F16": 2, "BF16": 2, "F32": 4}
_MAX_HEADER = 100_000_000  # safetensors' own limit
#: Magic bytes of llama.cpp's own files; as a length they exceed the largest header.
_LLAMA_CPP = (b"qsgg", b"nsgg")
#: Upper bound on the rank of a tensor; a product over many dimensions would take long.
_MAX_RANK = 8


@dataclass(frozen=True)
class Tensor:
    """Named bytes, with the dtype and shape that other safetensors readers see."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: ByteArray


@dataclass(frozen=True)
class Container:
    """A parsed file: metadata strings by key, tensors by name."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    n_bytes: int


# Checksums: SHA-256, or XXH3 (20 times faster) if xxhash is installed -----------------------------


def _find_hashes() -> dict[str, Callable[[], Any]]:
    """Return the constructors of the checksums that can be computed here, the fastest first."""
    found: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
    try:
        import xxhash
    except ImportError:
        return found
    return {"xxh3-128": xxhash.xxh3_128, **found}


_hashes = cache(_find_hashes)  # a failed import is slow


def best_checksum() -> str:
    """Return the fastest checksum that is installed."""
    return next(iter(_hashes()))


def find_checksum(name: str) -> str:
    """Return the name if it can be computed here; raise otherwise."""
    check_kind(name, str, "checksum")
    if name not in _DIGESTS:
        known = ", ".join(_DIGESTS)
        message = f"the state has checksums of type {name!r}: only {known} are supported"
        raise StateVersionError(message, "checksum", name, known)
    if name not in _hashes():
        message = f"the state has XXH3 checksums, which need xxhash: {how_to_install('state')}"
        raise StateVersionError(message, "checksum", name)
    return name


def _digest(name: str, data: memoryview) -> bytes:
    """Compute a digest without the GIL."""
    state = _hashes()[name]()
    state.update(data)
    result: bytes = state.digest()
    return result


# Files --------------------------------------------------------------------------------------------


def pack(metadata: Mapping[str, str], tensors: Sequence[Tensor], checksum: str) -> list[memoryview]:
    """Return the pieces of a file, without copying the tensors."""
    text = {"format": FORMAT, "version": str(VERSION), "checksum": checksum, **metadata}
    table = (1 + len(tensors), _DIGESTS[checksum])
    entries: dict[str, Any] = {"__metadata__": text}
    at = 0
    for name, dtype, shape, size in [
        (CHECKSUMS, "U8", table, prod(table)),
        *((t.name, t.dtype, t.shape, t.data.nbytes) for t in tensors),
    ]:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER:
        message = (
            f"the header has {len(header)} bytes, more than the limit of {_MAX_HEADER}: "
            "store large metadata elsewhere"
        )
        raise ArgumentError(message, "header", len(header), _MAX_HEADER)
    start = struct.pack("<Q", len(header)) + header
    data = [t.data.reshape(-1).data for t in tensors]
    digests = b"".join(_digest(checksum, piece) for piece in [memoryview(start), *data])
    return [memoryview(start), memoryview(digests), *data]


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Prefix StateErrors raised in the block with the file's name; class and attributes stay."""
    try:
        yield
    except StateError as error:
        # System errors include the name already.
        if not isinstance(error, OSError) and not str(error).startswith(f"{path}: "):
            error.args = (f"{path}: {error}", *error.args[1:])
        raise


def open_file(path: str, *, mapped: bool) -> ByteArray:
    """Return a file's bytes; a mapped file is read on access."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return np.empty(0, np.uint8)
            if mapped:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            data = np.empty(size, np.uint8)
            if file.readinto(data.data) != size:
                raise StateTruncated(
                    "the file was truncated while it was read", what=str(path), limit=size
                )
            return data
    except OSError as error:
        raise file_error(error, path) from error


def parse(data: ByteArray, *, verify: bool = True) -> Container:
    """Parse a file and verify every byte, or with ``verify=False`` only the header."""
    start, entries = _header(data)
    text = entries.pop("__metadata__", None)
    if not isinstance(text, dict) or text.get("format") != FORMAT:
        raise StateFormatError("not a pykvcache state: the header does not name its format")
    if not all(type(value) is str for value in text.values()):
        raise StateDamaged("the header holds metadata that is not text", what="header")
    if text.get("version") != str(VERSION):
        message = (
            f"the state has format version {text.get('version')}: this version reads {VERSION}"
        )
        raise StateVersionError(message, "version", text.get("version"), str(VERSION))
    checksum = find_checksum(str(text.get("checksum")))
    tensors = _tensors(data, start, entries)
    table = tensors.pop(CHECKSUMS, None)
    if table is None or table.shape != (1 + len(tensors), _DIGESTS[checksum]):
        raise StateDamaged(
            "the number of checksums differs from the number of tensors", what=CHECKSUMS
        )
    digests = table.data.reshape(table.shape)
    if _digest(checksum, data[:start].data) != digests[0].tobytes():
        raise StateDamaged("the header does not match its checksum", what="header")
    for tensor, expected in zip(tensors.values(), digests[1:], strict=True):
        if verify and _digest(checksum, tensor.data.data) != expected.tobytes():
            raise StateDamaged(f"{tensor.name} does not match its checksum", what=tensor.name)
    return Container(text, tensors, len(data))


def _header(data: ByteArray) -> tuple[int, dict[str, Any]]:
    if len(data) == 0:
        raise StateFormatError("the state is empty")
    (size,) = struct.unpack("<Q", data[:8].tobytes().ljust(8, b"\0"))
    if data[:4].tobytes() in _LLAMA_CPP:
        raise StateFormatError("this is one of llama.cpp's state files: use load_llama_file")
    if size > _MAX_HEADER:
        raise StateFormatError("not a pykvcache state: it has no safetensors header")
    if len(data) < 8:
        message = f"not a pykvcache state, or cut off: it ends after {len(data)} bytes"
        raise StateTruncated(message, "bytes", len(data), 8)
    if len(data) < 8 + size:
        message = f"the state ends after {len(data)} bytes, within its header"
        raise StateTruncated(message, "bytes", len(data), 8 + size)
    try:
        entries = json.loads(data[8 : 8 + size].tobytes())
    except (ValueError, RecursionError):
        raise StateFormatError("not a pykvcache state: the header is not JSON") from None
    if not isinstance(entries, dict):
        raise StateFormatError("not a pykvcache state: the header is not a JSON object")
    return 8 + size, entries


def _tensors(data: ByteArray, start: int, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    at = 0
    try:
        ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in ordered:
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            counts = (begin, end, *shape)
            if (
                any(type(n) is not int or not 0 <= n < 2**62 for n in counts)
                or begin != at
                or len(shape) > _MAX_RANK
                or end - begin != prod(shape) * SIZES[entry["dtype"]]
            ):
                raise ValueError
            if start + end > len(data):
                message = f"the state ends after {len(data)} bytes, within {name}"
                raise StateTruncated(message, f"bytes of {name}", len(data), start + end)
            view = data[start + begin : start + end]
            tensors[name] = Tensor(name, entry["dtype"], shape, view)
            at = end
    except StateTruncated:  # also a ValueError
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        raise StateDamaged("the header's list of tensors is invalid", what="header") from None
    if start + at != len(data):
        message = f"the state has {len(data) - start - at} trailing bytes"
        raise StateTrailingBytes(message, "bytes", len(data), start + at)
    return tensors
