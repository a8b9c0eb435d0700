"""Searches all tiers for one prompt, in a thread of its own."""

from __future__ import annotations

import contextlib
import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvcache.errors import ClosedError
from pykvcache.prefix.block_hash import NamedPrompt, window_key
from pykvcache.prefix.node import Kind, MemoryShape
from pykvcache.prefix.tiers.tier import GROUP_BYTES, Tier

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TAIL_OVERHEAD", "Deliver", "Load", "Loaded", "TailRecord", "Wanted"]

Bytes = npt.NDArray[np.uint8]

#: Cells of consecutive tokens, their number, and the tier that they came from.
Cells: TypeAlias = tuple[Bytes, int, Tier]

#: A weak reference to the function that receives late results.
Deliver: TypeAlias = Callable[[], "Callable[[Load], object] | None"]

# Maximum number of candidate resume points that are tried.
_MAX_TRIES = 3


_HEADER = struct.Struct("<4sI8xQQQQ")
_MAGIC = b"pkve"

#: Bytes by which an encoded tail record is longer than its parts.
TAIL_OVERHEAD = _HEADER.size


@dataclass(frozen=True)
class TailRecord:
    """A tail record: the cells after a prompt's last full block, its state and its logits.

    ::

        header, 48 bytes                                                   cells  state  row  window
        magic n_cells zeros zeros len(cells) len(state) len(row) len(window)

    Little-endian. Cells are those of layers without a window, window those of layers with one, row
    the logits after the last token (float32). Any of the parts may be missing.
    """

    n_cells: int
    cells: Bytes
    window: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    state: Bytes | None = None
    row: npt.NDArray[np.float32] | None = None

    def has_row(self, n: int) -> bool:
        """Return whether it has n logits, all of them finite."""
        return self.row is not None and len(self.row) == n and bool(np.isfinite(self.row).all())

    def encode(self) -> bytes:
        """Return the content of the record."""
        state = b"" if self.state is None else self.state.data
        row = b"" if self.row is None else self.row.astype("<f4").tobytes()
        parts = self.cells.data, state, row, self.window.data
        head = _HEADER.pack(_MAGIC, self.n_cells, *map(len, parts))
        return b"".join((head, *parts))

    @classmethod
    def decode(cls, content: Buffer) -> TailRecord | None:
        """Decode a record, copying its parts; return None if it is malformed."""
        data = np.frombuffer(memoryview(content), np.uint8)
        if len(data) < _HEADER.size:
            return None
        magic, n_cells, *sizes = _HEADER.unpack_from(data.data)
        if magic != _MAGIC or _HEADER.size + sum(sizes) != len(data) or sizes[2] % 4:
            return None
        at, parts = _HEADER.size, []
        for size in sizes:
            parts.append(data[at : at + size].copy())
            at += size
        cells, state, row, window = parts
        return cls(
            n_cells,
            cells,
            window,
            state if len(state) else None,
            row.view("<f4").astype(np.float32) if len(row) else None,
        )


@dataclass(frozen=True)
class Wanted:
    """What to load for a prompt.

    RAM has the attention cells of the first ``begin`` full blocks, and the window cells of those
    in ``windows``.
    """

    prompt: NamedPrompt
    shape: MemoryShape
    n_blocks: int  # maximum number of full blocks to load
    begin: int
    windows: range
    known: int  # tokens that RAM or live sequences already provide; a shorter prefix is useless
    limit: int  # maximum number of tokens that the prompt can use
    tail_bytes: int  # upper bound on the bytes of a tail record without its cells
    is_good: Callable[[Kind, Bytes, int], bool]  # whether bytes are n cells with finite values
    n_row: int = 0  # logits in the tail record of the whole prompt; 0 if they are not kept

    def places(self, n_blocks: int) -> Iterator[int]:
        """Yield the tail records that could be of use after n_blocks blocks, deepest first."""
        size = self.shape.block_size
        most = min(self.limit, n_blocks * size + size - 1)
        for n in range(most, max(self.known, size - 1), -1):
            is_whole = n == len(self.prompt) and self.n_row > 0
            if n > n_blocks * size or (n % size == 0 and (self.shape.needs_state or is_whole)):
                yield n

    def missing_windows(self, n: int) -> list[int]:
        """Return the full blocks of the window before n tokens that RAM lacks, the last first."""
        size, start = self.shape.block_size, self.shape.window_start
        if start is None:
            return []
        # The last token of the prompt is evaluated again, for its logits.
        blocks = range(start(min(n, len(self.prompt) - 1)) // size, n // size)
        return [at for at in reversed(blocks) if at not in self.windows]

    @property
    def n_bytes(self) -> int:
        """Bytes of the cells to load if the tiers have the whole prompt."""
        shape, n = self.shape, len(self.prompt)
        windows = len(self.missing_windows(n)) + (n % shape.block_size > 0)
        return (
            max(0, n - self.begin * shape.block_size) * shape.attention_bytes
            + windows * shape.block_size * shape.window_bytes
        )

    def keys(self, kind: Kind, blocks: Iterable[int]) -> list[bytes]:
        """Return the keys of the cells of some blocks."""
        names = [self.prompt.names[at] for at in blocks]
        return names if kind is Kind.ATTENTION else [window_key(name) for name in names]


@dataclass
class Loaded:
    """The verified result of a search, with which a prompt can resume after n tokens."""

    n: int = 0
    #: Attention and window cells by block index, with their number and the tier they came from.
    cells: tuple[dict[int, Cells], dict[int, Cells]] = field(default_factory=lambda: ({}, {}))
    end: tuple[TailRecord, Tier] | None = None

    def count(self, medium: str) -> int:
        """Return how many of its tokens came from tiers of this medium."""
        return sum(n for _, n, tier in self.cells[0].values() if tier.medium == medium)


class Load:
    """One search of the tiers, fastest first, which `start` runs in a thread.

    Once ``done`` is set, ``found`` is its result, and ``obstacles`` say why nothing was found. If
    its requester has stopped waiting, the thread delivers the result. ``is_cancelled`` is True once
    its result is not wanted any more.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        wanted: Wanted,
        deliver: Deliver = lambda: None,
        wait: float = math.inf,
    ) -> None:
        self.tiers, self.wanted = tiers, wanted
        self.found = Loaded()
        self.obstacles: list[str] = []
        self.done = threading.Event()
        self._until = time.monotonic() + wait
        self._deliver = deliver
        self.is_cancelled = self._is_late = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Search in a new thread."""
        threading.Thread(target=self.run, name="pykvcache-load", daemon=True).start()

    @property
    def left(self) -> float:
        """Seconds to wait at most; 0 once it is done or late."""
        return 0.0 if self.done.is_set() else max(0.0, self._until - time.monotonic())

    def cancel(self) -> None:
        """Stop the search after the current read; nothing is delivered."""
        self.is_cancelled = True

    def leave(self) -> bool:
        """Stop waiting, so that a late result is delivered; return whether it was done."""
        with self._lock:
            self._is_late = not self.done.is_set()
            return not self._is_late

    def run(self) -> None:
        """Search, and read what was found."""
        try:
            with contextlib.suppress(ClosedError):  # the cache or its context was closed
                self._search()
        finally:
            with self._lock:
                self.done.set()
                is_late = self._is_late
            is_wanted = is_late and not self.is_cancelled and self.found.n > 0
            if is_wanted and (deliver := self._deliver()) is not None:
                deliver(self)

    def _search(self) -> None:
        wanted, size = self.wanted, self.wanted.shape.block_size
        n_blocks = min(wanted.n_blocks, len(wanted.prompt.names))
        where = self._where(Kind.ATTENTION, range(wanted.begin, n_blocks))
        depth = wanted.begin + len(where)
        n, end, windows = self._place(depth)
        if n <= wanted.known:
            if where and not wanted.shape.is_plain:
                part = "state" if wanted.shape.needs_state else "complete window"
                self.obstacles.append(f"tiers have {depth * size:,} tokens, but no {part} of use")
            elif not where and not wanted.begin:
                self.obstacles += filter(None, [tier.obstacle() for tier in self.tiers])
            return
        blocks = {at: tier for at, tier in where.items() if at < n // size}
        # Read both even if the first fails, so that damaged records of both kinds are removed.
        window = self._read(Kind.WINDOW, windows)
        attention = self._read(Kind.ATTENTION, blocks)
        if len(attention) < len(blocks):
            # A memory without windows and states resumes before the missing cells.
            n, end = (wanted.begin + len(attention)) * size, None
            if not wanted.shape.is_plain or n <= wanted.known:
                return
        if len(window) < len(windows):
            return
        for tier in self.tiers:
            new = [at for at, (_, _, one) in attention.items() if one is tier]
            tier.notices.stored(wanted.prompt, new)
        if end is not None and (n_cells := end[0].n_cells):
            attention[n // size] = end[0].cells, n_cells, end[1]
            if wanted.shape.window_bytes:
                window[n // size] = end[0].window, n_cells, end[1]
        self.found = Loaded(n, (attention, window), end)

    def _where(self, kind: Kind, blocks: Sequence[int]) -> dict[int, Tier]:
        """Return the tiers of the leading blocks; a tier continues where the one before ends."""
        keys, found = self.wanted.keys(kind, blocks), list[Tier]()
        for tier in self.tiers:
            found += [tier] * tier.contains(keys[len(found) :])
        return dict(zip(blocks, found, strict=False))

    # Resume points ------------------------------------------------------------------------------

    def _place(self, depth: int) -> tuple[int, tuple[TailRecord, Tier] | None, dict[int, Tier]]:
        """Return the deepest resume point with all its records, its tail record, its windows."""
        wanted = self.wanted
        shape, size = wanted.shape, wanted.shape.block_size
        places, below = list(wanted.places(depth)), min(wanted.limit + 1, depth * size)
        for _ in range(_MAX_TRIES):
            n = self._deepest_end(places)
            if shape.needs_state:
                # Prompts may have ended within blocks, too.
                least = max(n, wanted.known, size - 1)
                n = self._deepest_end([i for i in range(below - 1, least, -1) if i % size]) or n
            if not n:
                break
            reached, windows = self._windows(n)
            if reached == n and (end := self._end(n)) is not None:
                return n, end, windows
            places, below = [i for i in places if i < n], min(below, n)
        n = 0 if shape.needs_state else min(depth * size, wanted.limit // size * size)
        for _ in range(_MAX_TRIES):
            if n <= wanted.known:
                break
            reached, windows = self._windows(n)
            if reached == n:
                return n, None, windows
            n = reached
        return 0, None, {}

    def _deepest_end(self, places: Sequence[int]) -> int:
        """Return the first of some positions for which a tier has a tail record, or 0."""
        keys = [self.wanted.prompt.tail_key(n) for n in places]
        best = len(keys)
        for tier in self.tiers:
            there = tier.present(keys[:best])
            if True in there:
                best = there.index(True)
        return places[best] if best < len(keys) else 0

    def _end(self, n: int) -> tuple[TailRecord, Tier] | None:
        """Return the tail record after n tokens; None if it is missing or wrong."""
        wanted, shape, key = self.wanted, self.wanted.shape, self.wanted.prompt.tail_key(n)
        n_cells = n % shape.block_size
        size = n_cells * (shape.attention_bytes + shape.window_bytes)
        for tier in self.tiers:
            if not (found := tier.get([key], TAIL_OVERHEAD + size + wanted.tail_bytes)):
                continue
            end = TailRecord.decode(found[0])
            if (
                end is None
                or end.n_cells != n_cells
                or not wanted.is_good(Kind.ATTENTION, end.cells, n_cells)
                or (shape.window_bytes and not wanted.is_good(Kind.WINDOW, end.window, n_cells))
                or (shape.needs_state and end.state is None)
            ):
                tier.refuse([key])
                tier.discard([key])
                continue
            if shape.needs_state and n == len(wanted.prompt) and not end.has_row(wanted.n_row):
                continue  # a state cannot be truncated by a token to evaluate its logits
            return end, tier
        return None

    def _windows(self, n: int) -> tuple[int, dict[int, Tier]]:
        """Return n, or where the last missing block of its window begins, and the tiers of it."""
        missing = self.wanted.missing_windows(n)
        where = self._where(Kind.WINDOW, missing)
        if len(where) < len(missing):
            n = missing[len(where)] * self.wanted.shape.block_size
        return n, where

    # Reading ------------------------------------------------------------------------------------

    def _read(self, kind: Kind, where: dict[int, Tier]) -> dict[int, Cells]:
        """Read the leading run of intact blocks, in groups."""
        blocks, tiers = list(where), list(where.values())
        keys = self.wanted.keys(kind, blocks)
        wanted, n = self.wanted, self.wanted.shape.block_size
        size = n * wanted.shape.cell_bytes(kind)
        step = max(1, GROUP_BYTES // max(1, size))
        found: dict[int, Cells] = {}
        at = 0
        while at < len(keys) and not self.is_cancelled:
            tier, group = tiers[at], zip(keys[at : at + step], tiers[at:], strict=False)
            part = [key for key, one in group if one is tier]
            read = [np.frombuffer(one, np.uint8) for one in tier.get(part, size, exact=True)]
            is_good = [wanted.is_good(kind, cells, n) for cells in read]
            n_good = is_good.index(False) if False in is_good else len(read)
            found |= {blocks[at + i]: (read[i], n, tier) for i in range(n_good)}
            if n_good < len(read):
                # The checksum is valid, but the cells have another layout or contain NaN.
                bad = [key for key, good in zip(part, is_good, strict=False) if not good]
                tier.refuse(bad)
                tier.discard(bad)
            if n_good < len(part):
                break
            at += len(part)
        return found
