"""Traces: the blocks of each prompt; trace files are read and recorded here."""

from __future__ import annotations

import gzip
import json
import os
import threading
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pykvcache._arguments import as_file_name, as_int, as_list
from pykvcache.errors import ArgumentError, shown
from pykvcache.prefix.events import EventLog, Lookup

__all__ = ["Trace", "check_trace", "read_trace", "record"]

_BLOCK_SIZES = [2**n for n in range(15)]


@dataclass(frozen=True)
class Trace:
    """Prompts in order of arrival.

    Attributes
    ----------
    name : str
        Name for tables.
    block_size : int
        Tokens per block.
    prompts : list of ndarray
        Ids of each prompt's blocks in order, uint32; an id identifies a block and all before it.
    lengths : list of int
        Tokens of each prompt. A partial last block may or may not have an id; a prompt without ids
        cannot be cached.

    Raises
    ------
    ValueError
        A length does not match the number of blocks, or an id is not in ``[0, 2**32)``.
    TypeError
        Ids or lengths are not integers.
    """

    name: str
    block_size: int
    prompts: list[NDArray[np.uint32]] = field(repr=False)
    lengths: list[int] = field(repr=False)

    def __post_init__(self) -> None:
        block_size = as_int(self.block_size, "block_size", 1)
        prompts = as_list(self.prompts, "prompts", "arrays of ids")
        lengths = as_list(self.lengths, "lengths", "integers")
        if len(prompts) != len(lengths):
            counts = len(prompts), len(lengths)
            text = f"{self.name}: {counts[0]} prompts, but {counts[1]} lengths"
            raise ArgumentError(text, "lengths", counts[1], counts[0])
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
            where = f"{self.name}, prompt {i}"
            prompts[i], lengths[i] = _as_ids(ids, where), as_int(length, f"{where}: the length", 0)
            _check_length(prompts[i], lengths[i], block_size, where)
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "prompts", prompts)
        object.__setattr__(self, "lengths", lengths)

    @classmethod
    def from_ids(
        cls,
        name: str,
        prompts: Iterable[Sequence[Hashable]],
        lengths: Iterable[int] | None = None,
        block_size: int = 1,
    ) -> Trace:
        """Make a trace from ids of any hashable type; without lengths, every block is full."""
        block_size = as_int(block_size, "block_size", 1)
        numbers: dict[Hashable, int] = {}
        arrays: list[NDArray[np.uint32]] = []
        for ids in as_list(prompts, "prompts", "lists of ids"):
            row = as_list(ids, "prompts", "ids")
            if not all(isinstance(x, Hashable) for x in row):
                raise TypeError(f"{name}, prompt {len(arrays)}: an id is not hashable")
            arrays.append(np.array([numbers.setdefault(x, len(numbers)) for x in row], np.uint32))
        known = [len(x) * block_size for x in arrays] if lengths is None else list(lengths)
        return cls(name, block_size, arrays, known)

    @property
    def n_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(self.lengths)

    @property
    def n_blocks(self) -> int:
        """Number of blocks of all prompts."""
        return sum(map(len, self.prompts))

    def n_unique(self) -> int:
        """Return the number of blocks of an unlimited cache."""
        return len(np.unique(np.concatenate(self.prompts))) if self.prompts else 0


def check_trace(trace: Trace) -> None:
    """Raise TypeError unless this is a trace."""
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace, not {type(trace).__name__}")


def read_trace(path: str | os.PathLike[str], block_size: int | None = None) -> Trace:
    """Read a trace: JSON lines, plain or gzip.

    Each line is an object of one of these kinds; other objects, such as events of stored and
    removed blocks, are skipped.

    - Mooncake's and Qwen-Bailian's: ``hash_ids``, ``input_length``.
    - Our own: ``type`` is ``"Lookup"``, and ``block_hashes``, ``n_tokens``, ``block_size``.

    Parameters
    ----------
    path
        The file.
    block_size
        Tokens per block, if not in the file. Default: the power of two that matches the lengths
        (512 in Mooncake's traces, 16 in Qwen-Bailian's). A partial last block may have an id (as in
        those) or none (as in ours).

    Raises
    ------
    ValueError
        If a line is malformed, its number of ids does not match its length, no line is a prompt,
        the block size cannot be determined, or the path is not a valid file name.
    OSError
        If the file cannot be read.
    """
    name = as_file_name(path)
    if block_size is not None:
        block_size = as_int(block_size, "block_size", 1, 2**31 - 1)
    prompts: list[_Prompt] = []
    for at, line in _lines(name):
        if line.strip():
            prompts += _prompts(line, f"{name}, line {at}")
    if not prompts:
        raise ArgumentError(
            f"{name} has no prompts: lines with hash_ids or block_hashes", "path", name
        )
    sizes = sorted({one.block_size for one in prompts if one.block_size is not None})
    if len(sizes) > 1:
        raise ArgumentError(
            f"{name} has several sizes of blocks: {sizes}", "block_size", sizes, name
        )
    if block_size is not None and sizes and sizes != [block_size]:
        text = f"{name} has blocks of {sizes[0]} tokens, not of {block_size}"
        raise ArgumentError(text, "block_size", block_size, sizes[0])
    size = block_size or (sizes[0] if sizes else _guess_block_size(prompts))
    if size is None:
        text = f"{name}: the block size cannot be derived from the lengths: pass block_size"
        raise ArgumentError(text, "block_size", None, name)
    for one in prompts:
        _check_length(one.ids, one.length, size, one.where)
    title = os.path.basename(name).removesuffix(".gz").removesuffix(".jsonl")
    ids, lengths = [one.ids for one in prompts], [one.length for one in prompts]
    return Trace.from_ids(title, ids, lengths, size)


def _as_ids(ids: Any, where: str) -> NDArray[np.uint32]:
    found = np.asarray(ids)
    if found.ndim == 1 and not found.size:
        return np.empty(0, np.uint32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"{where}: ids must be one row of integers, not {found.dtype} {found.shape}"
        )
    if found.dtype != np.uint32 and (found.min() < 0 or found.max() >= 2**32):
        wrong = int(found.min() if found.min() < 0 else found.max())
        text = f"{where}: id {wrong} is not in [0, {2**32})"
        raise ArgumentError(text, where, wrong, 2**32 - 1)
    return found.astype(np.uint32, copy=False)


def _check_length(ids: Sized, length: int, block_size: int, where: str) -> None:
    """Raise unless the number of ids fits the length of the prompt."""
    n, full = len(ids), length // block_size
    if n and not full <= n <= -(-length // block_size):
        last = f" or {full + 1}" if length % block_size else ""
        text = f"{length:,} tokens in blocks of {block_size:,} have {full:,}{last} ids, not {n:,}"
        raise ArgumentError(f"{where}: {text}", where, n, (length, block_size))


def _lines(path: str) -> Iterator[tuple[int, str]]:
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        # It is read twice: a pipe would block, and a device may be endless.
        raise ArgumentError(f"{path} is not a regular file", "path", path)
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    at = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if is_packed
            else open(path, encoding="utf-8") as text
        ):
            for at, line in enumerate(text, 1):
                yield at, line
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        why = f"{path}, after line {at}, is damaged: {error}"
        raise ArgumentError(why, "path", path) from None


class _Prompt(NamedTuple):
    """A line of a trace file."""

    ids: list[Hashable]
    length: int
    block_size: int | None
    where: str


def _prompts(line: str, where: str) -> list[_Prompt]:
    """Return the prompt of a line; none for a line of another kind."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{where} is not JSON: {error}", "line", where) from None
    if not isinstance(row, Mapping):
        raise ArgumentError(f"{where} is not an object", "line", where)
    if "hash_ids" in row:
        ids, length, size = row["hash_ids"], _number(row, "input_length", where, 0), None
    elif row.get("type") == "Lookup":
        ids, length = row.get("block_hashes"), _number(row, "n_tokens", where, 0)
        size = _number(row, "block_size", where, 1)
    else:
        return []
    if not isinstance(ids, list) or not all(type(x) in (int, str) for x in ids):
        raise ArgumentError(
            f"{where}: the ids of blocks are not a list of numbers or strings", "line", where
        )
    return [_Prompt(ids, length, size, where)]


def _number(row: Mapping[str, Any], name: str, where: str, least: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(
            f"{where}: {name} is {shown(value)}: it must be an integer of at least {least}",
            f"{where}: {name}",
            value,
            least,
        )
    return value


def _guess_block_size(prompts: list[_Prompt]) -> int | None:
    """Return the power of two that matches most lengths; None if it matches less than half."""
    best, size = len(prompts) / 2, None
    for each in _BLOCK_SIZES:
        fits = sum(len(one.ids) in (one.length // each, -(-one.length // each)) for one in prompts)
        if fits > best:
            best, size = fits, each
    return size


@contextmanager
def record(events: EventLog, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write every prompt that a cache looks up to a file, during a ``with`` block.

    The file has one JSON object per line, for `read_trace`. It contains block hashes, no tokens.
    Recording takes about a microsecond per block.

    Parameters
    ----------
    events
        ``cache.events`` of a `PrefixCache`.
    path
        The file; replaced if it exists, compressed if its name ends with ``.gz``.

    Raises
    ------
    OSError
        The file cannot be written. If that happens within the block, the error is raised at its
        end, and later lookups are missing.
    ArgumentError
        The path is not a valid file name (also a ValueError).
    """
    if not isinstance(events, EventLog):
        raise TypeError(f"events must be an EventLog, not {type(events).__name__}")
    path = as_file_name(path)
    failed: list[OSError] = []
    lock = threading.Lock()  # another thread may be in a lookup when the block ends

    def note(lookup: Lookup) -> None:
        names = [name.hex() for name in lookup.block_hashes]
        line = json.dumps({"type": "Lookup", **vars(lookup), "block_hashes": names})
        with lock:
            if not (file.closed or failed):
                try:
                    file.write(line + "\n")
                except OSError as error:
                    failed.append(error)

    is_packed = path.endswith(".gz")
    with gzip.open(path, "wt") if is_packed else open(path, "w", encoding="utf-8") as file:
        stop = events.subscribe_lookups(note)
        try:
            yield
        finally:
            stop()
            with lock:
                try:
                    file.close()
                except OSError as error:
                    failed.append(error)
    if failed:
        raise failed[0]
