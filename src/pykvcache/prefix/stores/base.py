"""The contract of a store of blocks: five methods over keys and buffers, and some optional ones.

A block is bytes under a key of 32 bytes; a store never looks into it. A store of your own
subclasses `BlockStore` and writes `contains`, `get_into`, `put`, `touch` and `trim`; everything
else has a default. `pykvcache.prefix.stores.conformance` holds tests of this contract.
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

# Characters of an error's text that are kept: a server may send pages.
_MAX_TEXT = 300
# The longest timeout, in seconds.
_MAX_SECONDS = 3600.0
# In the format of a buffer: a field's name, and the codes of pointers and characters.
_FIELD_NAME = re.compile(":[^:]*:")
_NOT_NUMBERS = frozenset("OPX&uw")
_NOT_GIVEN: Any = object()


@dataclasses.dataclass
class StoreCounters:
    """What a store did since it was opened. Blocks, unless said otherwise.

    Attributes
    ----------
    hits, misses : int
        Blocks that `BlockStore.get_into` read; calls whose run ended before the last key.
    written, known : int
        Blocks that `BlockStore.put` stored; blocks that were there already, or were being
        written by another process.
    removed : int
        Blocks that were removed to make room, or by `trim` and `discard`.
    bytes_read, bytes_written : int
        Their sizes.
    too_large : int
        Blocks larger than the store or the buffer.
    full : int
        Blocks that were not stored because the disk or the server is full.
    denied : int
        Requests that the server or the file system does not allow.
    failed, timed_out : int
        Requests that ended with another error, or with no answer in time.
    skipped : int
        Requests that were not made because earlier ones had failed.
    rejected : int
        Blocks that were read and then refused: damaged, truncated, foreign or forged.
    rebuilt, swept : int
        Times that an index was rebuilt from the files; leftover files that were removed.
    last_error : str
        Text of the last error among ``full``, ``denied``, ``failed`` and ``timed_out``; empty
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
    """One block of a store.

    Attributes
    ----------
    size : int
        Bytes that it takes, with the store's own overhead where that is known.
    used : float
        When it was last used, Unix time in seconds.
    """

    key: bytes
    size: int
    used: float


class BlockStore(ABC):
    """Base class of every store: subclass it, write five methods, and pass it as a tier.

    Paths
        The keys of one call form a path: a block is useless without those before it. `contains`
        and `get_into` therefore stop at the first missing block.
    Recency
        `put` and `touch` are uses of their blocks; `contains` and `get_into` are not. A later
        call is more recent than an earlier one, and within a call the first key is the most
        recent. `trim`, and whatever else bounds the store, remove the least recently used block
        first.

        Callers touch whole paths, from the first block on, and touch the path again after they
        put the end of one. A block is then never less recent than a block that needs it, so it
        is never removed before that block. Blocks that need a missing one are not touched any
        more, so they are removed next.

        A store may record uses late and less exactly, such as to the second, and says so in
        its docstring; `StoreConformance.ordered` is False for it.
    Failures
        No method raises because of what a disk, a server or another process does. A block that
        cannot be read is a miss, a block that cannot be written is not stored, and `counters`
        tells why. Wrong arguments raise, and nothing has changed then.
    Threads and processes
        Any thread may call any method. After `close` every call is a miss. In a forked child the
        stores of this package raise `ClosedError`: open new ones there.
    """

    #: What addresses of this store begin with, for `open_store`: ``"redis"`` of ``redis://host``.
    schemes: ClassVar[frozenset[str]] = frozenset()

    #: Where the blocks are: ``"disk"`` of this machine, or ``"remote"``.
    medium: str = "remote"
    #: Number of keys for which `present` costs about one request; a cache asks for no more.
    n_probes: int = 8

    @functools.cached_property
    def counters(self) -> StoreCounters:
        """Figures of this object: requests, bytes, failures."""
        return StoreCounters()

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; the blocks may be gone right after."""

    @abstractmethod
    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, each into the front of its buffer.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 32 bytes, in the order of their path.
        buffers : sequence of Buffer
            One writable buffer per key. A block longer than its buffer ends the run. A block that
            is shorter leaves the rest of the buffer as it was; its content tells its length.

        Returns
        -------
        int
            How many blocks were read. The contents of the other buffers are undefined. The store
            must not write into any of the buffers later: the cache keeps using their memory.
        """

    @abstractmethod
    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store blocks, in the order of their path; return how many were stored.

        A block that is there already is never replaced.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, the first as the most recent; missing ones are ignored."""

    @abstractmethod
    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks until at most ``max_bytes`` are left.

        Returns their keys, in the order of their removal.
        """

    # Optional methods -------------------------------------------------------------------

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether an address names a store that is there, for tools: they make none.

        True where only its server knows.
        """
        return True

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; the keys need not be a path."""
        return [self.contains([key]) == 1 for key in check_keys(keys)]

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks, such as damaged ones, so that they can be written again.

        Returns how many were removed; 0 where the store cannot remove single blocks.
        """
        return 0

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block in no order; nothing where the store cannot list them. For tools."""
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
            text = f"a key has {KEY_SIZE} bytes, this one {len(key)}"
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
    """Return the items with their contents as flat bytes; of a key that comes twice, the first."""
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
    except ValueError as error:  # NumPy's dates and times are no buffers
        raise TypeError(f"a block's content must be a buffer of bytes: {error}") from None
    except TypeError:
        kind = type(data).__name__
        raise TypeError(f"a block's content must be a buffer of bytes, not {kind}") from None
    if not _NOT_NUMBERS.isdisjoint(_FIELD_NAME.sub("", view.format)):
        # Python would follow bytes that are read into it as pointers.
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
        raise StoreError("blocks are read into writable buffers, and this one is read-only")
    return view


def copy_run(
    counters: StoreCounters, values: Iterable[Buffer | None], views: Sequence[memoryview]
) -> int:
    """Copy blocks into the fronts of buffers, up to the first that is missing or too long.

    Counts hits, misses and bytes, and returns the number of copied blocks, as `get_into` does.
    """
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
    """Return a size in bytes; raise if it is not an integer, or too small."""
    return as_int(value, "max_bytes", least, error=StoreError)


def check_seconds(value: float, name: str = "seconds") -> float:
    """Return a time in seconds; raise unless it is above 0 and at most an hour."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, not {type(value).__name__}")
    if not 0 < value <= _MAX_SECONDS:
        text = f"{name} is {shown(value)}: above 0, at most {_MAX_SECONDS:g}"
        raise StoreError(text, name, value, _MAX_SECONDS)
    return float(value)
