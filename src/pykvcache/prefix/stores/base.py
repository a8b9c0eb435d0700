"""The contract of a store of blocks, which `pykvcache.prefix.stores.conformance` tests.

A block is bytes under a key of 32 bytes; a store never interprets it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pykvcache._arguments import as_int, as_list
from pykvcache.errors import ClosedError, StoreError, shown

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = [
    "KEY_SIZE",
    "BlockStore",
    "StoreCounters",
    "StoreEntry",
    "check_items",
    "check_keys",
    "check_max_bytes",
    "check_process",
    "check_seconds",
    "copy_run",
    "flat",
    "writable",
]

#: Length of a key in bytes, that of SHA-256.
KEY_SIZE = 32

# Characters kept of an error's text, which may be long.
_MAX_TEXT = 300
# The longest timeout, in seconds.
_MAX_SECONDS = 3600.0
# In a buffer's format string: a field's name, and the codes of pointers and characters.
_FIELD_NAME = re.compile(":[^:]*:")
_NOT_NUMBERS = frozenset("OPX&uw")
_NOT_GIVEN: Any = object()


@dataclasses.dataclass
class StoreCounters:
    """Counters of a store since it was opened. They count blocks unless stated otherwise.

    Attributes
    ----------
    hits, misses : int
        Blocks that `BlockStore.get_into` read; calls whose run ended before the last key.
    written, known : int
        Blocks that `BlockStore.put` stored; blocks that the store had already, or that another
        process was writing.
    removed : int
        Blocks that were removed to make room, or by `trim` and `discard`.
    bytes_read, bytes_written : int
        Bytes of the blocks read and written.
    too_large, full : int
        Blocks larger than the store or the buffer; not stored because the disk is full.
    denied, failed, timed_out, skipped : int
        Requests that were denied, ended with another error, were not answered in time, or were not
        made because earlier ones had failed.
    rejected : int
        Blocks whose check failed after reading: damaged, truncated, foreign or forged.
    rebuilt, swept : int
        How often an index was rebuilt from the files; leftover files that were removed.
    last_error : str
        Text of the last error counted as ``full``, ``denied``, ``failed`` or ``timed_out``; empty
        before the first.
    """

    hits: int = 0
    misses: int = 0
    written: int = 0
    known: int = 0
    removed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    too_large: int = 0
    full: int = 0
    denied: int = 0
    failed: int = 0
    timed_out: int = 0
    skipped: int = 0
    rejected: int = 0
    rebuilt: int = 0
    swept: int = 0

    def __post_init__(self) -> None:
        self.last_error = ""
        self._lock = threading.Lock()

    def add(self, *, error: BaseException | None = None, **changes: int) -> None:
        """Add to counters by name; thread-safe. The text of an error becomes `last_error`."""
        with self._lock:
            if error is not None:
                text = " ".join(str(error).split())
                self.last_error = (text or type(error).__name__)[:_MAX_TEXT]
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)


@dataclasses.dataclass(frozen=True)
class StoreEntry:
    """One block of a store."""

    key: bytes
    size: int  # its bytes, including the store's overhead if that is known
    used: float  # time of its last use, Unix time in seconds


class BlockStore(ABC):
    """Base class of every store: subclass it, implement five methods, and pass it as a tier.

    Paths
        The keys of one call form a path: a block is useless without those before it. `contains`
        and `get_into` therefore stop at the first missing block.
    Recency
        `put` and `touch` are uses of their blocks; `contains` and `get_into` are not. A later
        call is more recent than an earlier one, and within a call the first key is the most
        recent. Any eviction, by `trim` or to bound the store, removes the least recently used
        block first.

        Callers touch whole paths, from the first block on, and touch the path again after they
        put the end of one. A block is then never less recent than a block that needs it, so it
        is never removed before that block. Blocks that need a missing one are not touched any
        more, so they are removed next.

        A store may record uses late and less precisely, such as to the second, and says so in
        its docstring; `StoreConformance.ordered` is False for it.
    Failures
        No method raises because of a failing disk, server or other process. A block that
        cannot be read is a miss, a block that cannot be written is not stored, and `counters`
        counts the reason. Wrong arguments raise, without any change.
    Threads and processes
        Every method is thread-safe. After `close` every call is a miss. In a forked child the
        stores of this package raise `ClosedError`: open new ones there.
    """

    #: URL schemes of this store, for `open_store`: ``"redis"`` of ``redis://host``.
    schemes: ClassVar[frozenset[str]] = frozenset()

    #: ``"disk"`` of this machine, or ``"remote"``.
    medium: str = "remote"
    #: Number of keys for which `present` costs about one request; a cache checks no more at once.
    n_probes: int = 8

    @functools.cached_property
    def counters(self) -> StoreCounters:
        """Counters of this object: requests, bytes, failures."""
        return StoreCounters()

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored; blocks may be removed right after."""

    @abstractmethod
    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, each into the front of its buffer.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 32 bytes, in the order of their path.
        buffers : sequence of Buffer
            One writable buffer per key. A block longer than its buffer ends the run. A shorter
            block leaves the rest of the buffer unchanged; its content includes its length.

        Returns
        -------
        int
            Number of blocks read. The contents of the other buffers are undefined. The store must
            not write into any of the buffers later: the cache reuses their memory.
        """

    @abstractmethod
    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store blocks, in the order of their path; return how many were stored.

        A stored block is never replaced.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, the first as the most recent; ignore missing ones."""

    @abstractmethod
    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks until at most ``max_bytes`` remain.

        Returns their keys, in the order of their removal.
        """

    # Optional methods -------------------------------------------------------------------

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether the store at an address exists; True if only its server can tell."""
        return True

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored; the keys need not be a path."""
        return [self.contains([key]) == 1 for key in check_keys(keys)]

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; return how many, 0 if the store cannot remove single blocks."""
        return 0

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block in no order, or nothing if the store cannot list them. For tools."""
        return iter(())

    def close(self) -> None:  # noqa: B027 (optional)
        """Finish pending work and free resources. Later calls are misses."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_process(pid: int) -> None:
    """Raise `ClosedError` unless this is the process that opened the store."""
    if pid != os.getpid():
        raise ClosedError("this store belongs to the process before the fork: open a new one")


# Arguments ------------------------------------------------------------------------------


def check_keys(keys: Sequence[bytes], buffers: Sequence[Buffer] = _NOT_GIVEN) -> list[bytes]:
    """Return the keys as a list; raise if one is not 32 bytes, or if buffers do not match them."""
    found = as_list(keys, "keys", "bytes")
    for key in found:
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        if len(key) != KEY_SIZE:
            text = f"a key must have {KEY_SIZE} bytes, not {len(key)}"
            raise StoreError(text, value=len(key), limit=KEY_SIZE)
    if buffers is not _NOT_GIVEN:
        if not isinstance(buffers, Sequence):
            kind = type(buffers).__name__
            raise TypeError(f"buffers must be a sequence of buffers, not {kind}")
        if len(buffers) != len(found):
            text = f"{len(found)} keys need as many buffers, not {len(buffers)}"
            raise StoreError(text, value=len(buffers), limit=len(found))
    return found


def check_items(items: Iterable[tuple[bytes, Buffer]]) -> list[tuple[bytes, memoryview]]:
    """Return the items with their contents as flat bytes; the first of each key."""
    found: dict[bytes, memoryview] = {}
    for item in as_list(items, "items", "(key, content)"):
        try:
            key, data = item
        except (TypeError, ValueError):
            kind = type(item).__name__
            raise TypeError(f"an item is a pair of key and content, not this {kind}") from None
        check_keys([key])
        found.setdefault(key, flat(data))
    return list(found.items())


def flat(data: Buffer) -> memoryview:
    """Return a contiguous buffer as bytes, without a copy."""
    try:
        view = memoryview(data)
    except ValueError as error:  # NumPy's dates and times do not export a buffer
        raise TypeError(f"a block's content must be a buffer of bytes: {error}") from None
    except TypeError:
        kind = type(data).__name__
        raise TypeError(f"a block's content must be a buffer of bytes, not {kind}") from None
    if not _NOT_NUMBERS.isdisjoint(_FIELD_NAME.sub("", view.format)):
        # Python would dereference the bytes read into it.
        raise TypeError(
            "a block's content must be a buffer of bytes or numbers, not of objects or characters "
            f"(format {shown(view.format)})"
        )
    if not view.c_contiguous:
        raise StoreError("a block's buffer is not contiguous", value=view.strides)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def writable(buffer: Buffer) -> memoryview:
    """Return a contiguous writable buffer as bytes, without a copy."""
    view = flat(buffer)
    if view.readonly:
        raise StoreError("a buffer to read a block into is read-only")
    return view


def copy_run(
    counters: StoreCounters, values: Iterable[Buffer | None], views: Sequence[memoryview]
) -> int:
    """Copy blocks up to the first that is missing or too long; count and return them."""
    done = n_bytes = 0
    for value, view in zip(values, views, strict=False):
        if value is None:
            break
        data = memoryview(value)
        if len(data) > len(view):
            counters.add(too_large=1)
            break
        view[: len(data)] = data
        done += 1
        n_bytes += len(data)
    counters.add(hits=done, misses=done < len(views), bytes_read=n_bytes)
    return done


def check_max_bytes(value: int, least: int = 0) -> int:
    """Return a size in bytes; raise if it is no integer, or too small."""
    return as_int(value, "max_bytes", least, error=StoreError)


def check_seconds(value: float, name: str = "seconds") -> float:
    """Return a time in seconds; raise unless it is above 0 and at most an hour."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 < value <= _MAX_SECONDS:
        text = f"{name} is {shown(value)}: it must be above 0 and at most {_MAX_SECONDS:g}"
        raise StoreError(text, name, value, _MAX_SECONDS)
    return float(value)
