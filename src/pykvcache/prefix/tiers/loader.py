"""The search for one prompt in all tiers, in a thread of its own."""

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

__all__ = ["END_OVERHEAD", "Deliver", "End", "Load", "Loaded", "Wanted"]

Bytes = npt.NDArray[np.uint8]

#: Refers to what takes a search that came too late; None once that is gone.
Deliver: TypeAlias = Callable[[], "Callable[[Load], object] | None"]

# After how many places that turn out to be of no use the search is given up.
_MAX_TRIES = 3


_HEADER = struct.Struct("<4sI8xQQQQ")
_MAGIC = b"pkve"

#: By how many bytes an encoded end is longer than what is in it.
END_OVERHEAD = _HEADER.size


@dataclass(frozen=True)
class End:
    """An end record: what a memory holds at one place, without the full blocks before.

    ::

        header, 48 bytes                                                   cells  state  row  window
        magic n_cells zeros zeros len(cells) len(state) len(row) len(window)

    Little-endian. The cells are those after the last full block, of layers without and with a
    window; the state is that of recurrent parts; the row is the logits after the last token,
    float32. Any of them may be missing.
    """

    n_cells: int
    cells: Bytes
    window: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    state: Bytes | None = None
    row: npt.NDArray[np.float32] | None = None

    def has_row(self, n: int) -> bool:
        """Return whether it has that many logits, all of them finite."""
        return self.row is not None and len(self.row) == n and bool(np.isfinite(self.row).all())

    def encode(self) -> bytes:
        """Return the bytes that a store gets."""
        state = b"" if self.state is None else self.state.data
        row = b"" if self.row is None else self.row.astype("<f4").tobytes()
        parts = self.cells.data, state, row, self.window.data
        head = _HEADER.pack(_MAGIC, self.n_cells, *map(len, parts))
        return b"".join((head, *parts))

    @classmethod
    def decode(cls, content: Buffer) -> End | None:
        """Return what bytes say, as copies; None where they make no sense."""
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
    """What a prompt could use.

    Attributes
    ----------
    n_blocks
        Full blocks that may be loaded.
    begin, window_begin, window_end
        Full blocks whose attention and window cells are in memory.
    known
        Tokens that need no evaluation without the tiers: what is not more is of no use.
    limit
        Most tokens that can be used.
    end_bytes
        Upper bound on the bytes of an end record without its cells.
    is_good
        Tells whether bytes are that many cells of a part, whose values a memory may have.
    n_row
        How many logits an end of the whole prompt has; 0 where they are of no use.
    """

    prompt: NamedPrompt
    shape: MemoryShape
    n_blocks: int
    begin: int
    window_begin: int
    window_end: int
    known: int
    limit: int
    end_bytes: int
    is_good: Callable[[Kind, Bytes, int], bool]
    n_row: int = 0

    def places(self, n_blocks: int) -> Iterator[int]:
        """Yield where an end could be of use, deepest first, given so many attention blocks."""
        size = self.shape.block_size
        most = min(self.limit, n_blocks * size + size - 1)
        for n in range(most, max(self.known, size - 1), -1):
            is_whole = n == len(self.prompt) and self.n_row > 0
            if n > n_blocks * size or (n % size == 0 and (self.shape.needs_state or is_whole)):
                yield n

    def window_blocks(self, n: int) -> range:
        """Return the full blocks whose window cells are needed to go on after n tokens."""
        size, start = self.shape.block_size, self.shape.window_start
        if start is None:
            return range(0)
        # The last token of the prompt is evaluated again, for its logits.
        return range(start(min(n, len(self.prompt) - 1)) // size, n // size)

    def missing_windows(self, n: int) -> list[int]:
        """Return those of `window_blocks` that are not in memory, the last first."""
        known = range(self.window_begin, self.window_end)
        return [at for at in reversed(self.window_blocks(n)) if at not in known]

    @property
    def n_bytes(self) -> int:
        """Bytes of the cells that come where the tiers have the whole prompt."""
        shape, n = self.shape, len(self.prompt)
        windows = len(self.missing_windows(n)) + (n % shape.block_size > 0)
        return (
            max(0, n - self.begin * shape.block_size) * shape.attention_bytes
            + windows * shape.block_size * shape.window_bytes
        )

    def window_keys(self, blocks: Iterable[int]) -> list[bytes]:
        """Return the keys of the window cells of some blocks."""
        return [window_key(self.prompt.names[at]) for at in blocks]


@dataclass
class Loaded:
    """What has come of a search, all of it right: n tokens can be gone on from with it.

    Cells of full blocks are by index of the block; each comes with the tier that it is from.
    """

    n: int = 0
    attention: dict[int, tuple[Bytes, Tier]] = field(default_factory=dict)
    window: dict[int, tuple[Bytes, Tier]] = field(default_factory=dict)
    end: tuple[End, Tier] | None = None

    def count(self, medium: str, block_size: int) -> int:
        """Return how many tokens come from tiers of that medium."""
        n = block_size * sum(tier.medium == medium for _, tier in self.attention.values())
        if self.end is not None and self.end[1].medium == medium:
            n += self.end[0].n_cells
        return n


class Load:
    """One search of the tiers, the nearest first. `start` lets a thread make it.

    A search whose requester did not wait for it is delivered by its thread. What has come is
    ``found``, and ``obstacles`` say why nothing came: to be read once ``done`` is set.
    ``is_cancelled`` tells that nothing of it is wanted any more.
    """

    def __init__(
        self, tiers: Sequence[Tier], wanted: Wanted, deliver: Deliver = lambda: None
    ) -> None:
        self.tiers, self.wanted = tiers, wanted
        self.found = Loaded()
        self.obstacles: list[str] = []
        self.done = threading.Event()
        self.began = time.monotonic()
        #: When to stop waiting for it, on the monotonic clock.
        self.until = math.inf
        self._deliver = deliver
        self.is_cancelled = self._is_late = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Let a thread search."""
        threading.Thread(target=self.run, name="pykvcache-load", daemon=True).start()

    @property
    def left(self) -> float:
        """Seconds to wait at most; 0 where it is done, or late."""
        return 0.0 if self.done.is_set() else max(0.0, self.until - time.monotonic())

    def cancel(self) -> None:
        """Let the thread stop after what it is reading; nothing is delivered."""
        self.is_cancelled = True

    def leave(self) -> bool:
        """Stop waiting; return whether it was done. What comes later is delivered."""
        with self._lock:
            self._is_late = not self.done.is_set()
            return not self._is_late

    def run(self) -> None:
        """Search, and read what was found."""
        try:
            with contextlib.suppress(ClosedError):  # the cache and its context went first
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
        spans = self._look()
        depth = spans[-1][1].stop if spans else wanted.begin
        n, end = self._place(depth)
        if n <= wanted.known:
            if spans and not wanted.shape.is_plain:
                part = "state" if wanted.shape.needs_state else "complete window"
                self.obstacles.append(f"tiers have {depth * size:,} tokens, but no {part} of use")
            elif not spans and not wanted.begin:
                self.obstacles += filter(None, [tier.obstacle() for tier in self.tiers])
            return
        found = Loaded(n, end=end)
        # Both in any case: whatever is wrong is removed at once, and written again.
        has_all = [self._read_windows(found), self._read_attention(found, spans)]
        if not all(has_all):
            return
        for tier, blocks in spans:
            tier.notices.stored(wanted.prompt, [at for at in blocks if at in found.attention])
        self.found = found

    def _look(self) -> list[tuple[Tier, range]]:
        """Return which attention blocks are where: each tier goes on where the one above ends."""
        spans, at = list[tuple[Tier, range]](), self.wanted.begin
        for tier in self.tiers:
            if n := tier.contains(self.wanted.prompt.names[at : self.wanted.n_blocks]):
                spans.append((tier, range(at, at + n)))
                at += n
        return spans

    # Where to go on -----------------------------------------------------------------------------

    def _place(self, depth: int) -> tuple[int, tuple[End, Tier] | None]:
        """Return the deepest place that all is there for, and the end record that belongs to it."""
        wanted = self.wanted
        shape, size = wanted.shape, wanted.shape.block_size
        places, below = list(wanted.places(depth)), min(wanted.limit + 1, depth * size)
        for _ in range(_MAX_TRIES):
            n = self._deepest_end(places) or 0
            if shape.needs_state:
                # Prompts may have ended within blocks, too.
                least = max(n, wanted.known, size - 1)
                n = self._deepest_end([i for i in range(below - 1, least, -1) if i % size]) or n
            if not n:
                break
            if self._has_windows(n) == n and (end := self._end(n)) is not None:
                return n, end
            places, below = [i for i in places if i < n], min(below, n)
        if shape.needs_state:
            return 0, None
        n = min(depth * size, wanted.limit // size * size)
        for _ in range(_MAX_TRIES):
            if n <= wanted.known or (reached := self._has_windows(n)) == n:
                return n, None
            n = reached
        return 0, None

    def _deepest_end(self, places: Sequence[int]) -> int | None:
        """Return the first of some places that a tier has an end record for."""
        keys = [self.wanted.prompt.end_key(n) for n in places]
        best: int | None = None
        for tier in self.tiers:
            there = tier.present(keys if best is None else keys[:best])
            if True in there:
                best = there.index(True)
        return None if best is None else places[best]

    def _end(self, n: int) -> tuple[End, Tier] | None:
        """Return the end record after n tokens; None where it is missing or wrong."""
        wanted, shape, key = self.wanted, self.wanted.shape, self.wanted.prompt.end_key(n)
        n_cells = n % shape.block_size
        size = n_cells * (shape.attention_bytes + shape.window_bytes)
        for tier in self.tiers:
            if not (found := tier.get([key], END_OVERHEAD + size + wanted.end_bytes)):
                continue
            end = End.decode(found[0])
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
                continue  # a state cannot go back a token, to have its logits evaluated
            return end, tier
        return None

    def _has_windows(self, n: int) -> int:
        """Return n where the window cells before it are there, or the end of the last gap."""
        wanted, size = self.wanted, self.wanted.shape.block_size
        missing = wanted.missing_windows(n)
        keys = wanted.window_keys(missing)
        there = max((tier.contains(keys) for tier in self.tiers), default=0) if keys else 0
        return n if there == len(missing) else missing[there] * size

    # Reading ------------------------------------------------------------------------------------

    def _read_windows(self, found: Loaded) -> bool:
        """Read the window cells before a place; return whether all came."""
        wanted, blocks = self.wanted, self.wanted.missing_windows(found.n)
        for tier in self.tiers:
            if not blocks:
                break
            keys = wanted.window_keys(blocks)
            n = tier.contains(keys) if len(self.tiers) > 1 else len(keys)
            read = self._read(tier, Kind.WINDOW, blocks[:n], keys[:n])
            found.window.update((at, (cells, tier)) for at, cells in read)
            blocks = blocks[len(read) :]
        return not blocks

    def _read_attention(self, found: Loaded, spans: Sequence[tuple[Tier, range]]) -> bool:
        """Read the attention cells before a place, the first ones first.

        Where some do not come, a memory without windows and states goes on from those before.
        """
        wanted, size = self.wanted, self.wanted.shape.block_size
        for tier, there in spans:
            blocks = [at for at in there if at < found.n // size]
            keys = [wanted.prompt.names[at] for at in blocks]
            read = self._read(tier, Kind.ATTENTION, blocks, keys)
            found.attention.update((at, (cells, tier)) for at, cells in read)
            if len(read) < len(blocks):
                found.n, found.end = (blocks[0] + len(read)) * size, None
                return wanted.shape.is_plain and found.n > wanted.known
        return True

    def _read(
        self, tier: Tier, kind: Kind, blocks: Sequence[int], keys: Sequence[bytes]
    ) -> list[tuple[int, Bytes]]:
        """Read blocks of one tier in groups, as far as they are there and right."""
        wanted, n = self.wanted, self.wanted.shape.block_size
        size = n * wanted.shape.cell_bytes(kind)
        step = max(1, GROUP_BYTES // max(1, size))
        found: list[tuple[int, Bytes]] = []
        for begin in range(0, len(keys), step):
            if self.is_cancelled:
                break
            part = keys[begin : begin + step]
            read = [np.frombuffer(one, np.uint8) for one in tier.get(part, size, exact=True)]
            is_good = [wanted.is_good(kind, cells, n) for cells in read]
            n_good = is_good.index(False) if False in is_good else len(read)
            found += zip(blocks[begin : begin + n_good], read, strict=False)
            if n_good < len(read):
                # Their writer had the right to write them, and they are none of ours, or hold NaN.
                bad = [key for key, good in zip(part, is_good, strict=False) if not good]
                tier.refuse(bad)
                tier.discard(bad)
            if n_good < len(part):
                break
        return found
