"""What a store of blocks is: five methods over keys and buffers, and what else it may offer.

A block is bytes under a key of 32 bytes; a store knows nothing of what is in it. Keys come
in the order of a chain: a block is of use only together with all those before it, so every
method speaks of the leading run that is there. A class of your own writes `contains`,
`get_into`, `put`, `touch` and `trim`; everything else has a default.
`pykvcache.prefix.stores.conformance` holds tests that any store can be put through.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pykvcache._integers import as_int
from pykvcache.errors import StoreError
from pykvcache.errors._shown import shown
from pykvcache.prefix.stores._arguments import (
    KEY_SIZE,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

__all__ = [
    "KEY_SIZE",
    "BlockStore",
    "StoreCounters",
    "StoreEntry",
    "check_facts",
    "check_items",
    "check_keys",
    "check_max_bytes",
    "check_seconds",
    "writable",
]

#: Where blocks can be, for a cache: on this machine, or elsewhere.
MEDIA = ("disk", "remote")

# Of the text of an error: a server's may be pages.
_LONGEST = 300


@dataclasses.dataclass
class StoreCounters:
    """What a store has done and what went wrong, since it was made. Blocks, unless said otherwise.

    Attributes
    ----------
    hits, misses : int
        Blocks that `BlockStore.get_into` read; calls whose run ended before the last key.
    written, known : int
        Blocks that `BlockStore.put` stored; blocks that were there already, or are being
        written by somebody else.
    removed : int
        Blocks that were dropped to make room, or through `trim` and `discard`.
    bytes_read, bytes_written : int
        Their sizes.
    too_large : int
        Blocks over what the store or the buffer can hold.
    full : int
        Blocks that were not stored because the disk or the server is full.
    denied : int
        Writes that the server or the file system does not allow.
    failed, timed_out : int
        Requests that ended with another error, or with none in time.
    skipped : int
        Requests that were not made, because the ones before had failed.
    rejected : int
        Blocks that were read and then refused: damaged, truncated, foreign or forged.
    rebuilt, swept : int
        Times that an index was made again from the files; leftovers that were removed.
    last_error : str
        What the last of ``full``, ``denied``, ``failed`` and ``timed_out`` said; empty before.
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
        """Add to counters by name; any thread may.

        Parameters
        ----------
        error : BaseException, optional
            What went wrong.
        **changes
            By how much each counter grows.
        """
        with self._lock:
            if error is not None:
                text = " ".join(str(error).split())
                self.last_error = (text or type(error).__name__)[:_LONGEST]
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)


@dataclasses.dataclass(frozen=True)
class StoreEntry:
    """One block of a store.

    Attributes
    ----------
    key : bytes
        Its key.
    size : int
        The bytes that it takes, where the store knows with what surrounds its content.
    used : float
        When it was last used, Unix time in seconds.
    """

    key: bytes
    size: int
    used: float


class BlockStore(ABC):
    """Base class of every store: subclass it, write five methods, and pass it as a tier.

    No method raises because of what a disk, a server or another process does: what cannot be
    read is a miss, what cannot be written is not stored, and `counters` says so. Wrong
    arguments raise. Any thread may call any method. After `close` everything is a miss.
    """

    @property
    def counters(self) -> StoreCounters:
        """What this object has done and what went wrong."""
        return self._counters

    @counters.setter
    def counters(self, counters: StoreCounters) -> None:
        self._counters = counters

    @cached_property
    def _counters(self) -> StoreCounters:
        return StoreCounters()

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 32 bytes, in the order of their chain.

        Returns
        -------
        int
            Length of the leading run. The blocks may be gone right after.
        """

    @abstractmethod
    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, each into the front of its buffer.

        Reading does not count as a use: `touch` does.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 32 bytes, in the order of their chain.
        buffers : sequence of Buffer
            One writable buffer per key. A block longer than its buffer ends the run; one that
            is shorter leaves the rest as it was, and says itself how long it is.

        Returns
        -------
        int
            How many blocks were read. What the other buffers hold is undefined. Nothing may write
            into any of them from then on: a cache goes on with their very memory.
        """

    @abstractmethod
    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Store blocks that are not there yet; what is there is never replaced.

        Parameters
        ----------
        items : iterable of (bytes, Buffer)
            Key and content of each block.

        Returns
        -------
        int
            How many were stored by this call.
        """

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, the first one last: the end of a chain goes first."""

    @abstractmethod
    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, least recently used first, until the store holds at most ``max_bytes``.

        Returns
        -------
        list of bytes
            Keys of what was removed.
        """

    # What a store may leave out ---------------------------------------------------------

    @property
    def medium(self) -> str:
        """Where the blocks are: ``"disk"`` of this machine, or ``"remote"``; no other word."""
        return "remote"

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there; the keys need not be a chain.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of 32 bytes.
        """
        return [self.contains([key]) == 1 for key in check_keys(keys)]

    @property
    def n_probes(self) -> int:
        """For how many keys `present` costs about one request; a cache asks for no more."""
        return 8

    @property
    def n_together(self) -> int:
        """How many keys `get_into` should be given at once: 1 where more make nothing faster.

        What was read is then checked while it is in the processor's cache.
        """
        return 1 << 20

    def expect(self, keys: Sequence[bytes]) -> None:  # noqa: B027 (may be left out)
        """Take note that blocks will be read right away, one call of `get_into` after the other."""

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks, such as damaged ones, so that they can be written again.

        Returns
        -------
        int
            How many were removed; 0 where the store cannot do that.
        """
        return 0

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block, in no order; nothing where the store cannot list. For tools only."""
        return iter(())

    def lease(self, key: bytes, seconds: float) -> bool:
        """Return whether the caller is the one to evaluate a missing block.

        Who gets True evaluates and puts the block, then calls `release`. Who gets False looks
        again a little later. A holder that dies holds it for the rest of its seconds. A store
        that has no leases says True to everybody.

        Parameters
        ----------
        key : bytes
            Key of the block; of no block where somebody waits, and says so by a lease of its own.
        seconds : float
            After how long it ends by itself: above 0, at most 3600.
        """
        return True

    def release(self, key: bytes) -> None:  # noqa: B027 (may be left out)
        """End a lease that this object holds; those of others stay."""

    def close(self) -> None:  # noqa: B027 (may be left out)
        """Finish pending work and give back what is open. Later calls are misses."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_facts(store: BlockStore) -> tuple[str, int]:
    """Return the medium of a store and for how many keys it can be asked at once.

    Raises
    ------
    StoreError, TypeError
        A property of a class of somebody's own is none that a cache can work with.
    """
    name = type(store).__name__
    try:
        medium, n_probes, counters = store.medium, store.n_probes, store.counters
    except Exception as error:
        raise StoreError(f"{name}: {type(error).__name__}: {error}", "store", name) from error
    if not isinstance(counters, StoreCounters):
        kind = type(counters).__name__
        raise TypeError(f"{name}.counters must be StoreCounters, not {kind}")
    if not isinstance(medium, str) or medium not in MEDIA:
        text = f"{name}.medium is {shown(medium)}: it must be one of {', '.join(MEDIA)}"
        raise StoreError(text, "medium", medium, MEDIA)
    return medium, max(0, as_int(n_probes, f"{name}.n_probes", error=StoreError))
