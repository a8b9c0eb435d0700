"""The search for one prompt in all tiers, from the back, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.tiers.ends import END_OVERHEAD, End, end_key
from pykvcache.prefix.tiers.leases import Lease, Leases
from pykvcache.prefix.tiers.notices import place
from pykvcache.prefix.tiers.tier import GROUP_BYTES, Tier

__all__ = ["Fetch", "Wanted"]

# After how many ends that turn out to be of no use the search is given up.
_MAX_TRIES = 3


@dataclass(frozen=True)
class Wanted:
    """What a prompt could use.

    Attributes
    ----------
    tokens
        The prompt, as `token_bytes` gives it.
    names
        Names of its full blocks.
    block_size
        Tokens per block.
    cell_bytes
        Bytes of one cell of a block.
    end_bytes
        Most bytes of an end beside its cells.
    begin
        The first block that is not in memory.
    known
        Tokens that are known without the tiers: what is not more is of no use.
    limit
        Most tokens that can be used.
    needs_rest
        Whether only places are of use where an end has the state of other parts.
    is_good
        Tells whether bytes are that many cells, whose values a memory may have.
    n_row
        How many logits an end of the whole prompt needs; 0 where it is of use without them.
    wants_row
        Whether logits after the whole prompt are of use where nothing else is.
    namespace
        Whose it is.
    """

    tokens: bytes
    names: Sequence[bytes]
    block_size: int
    cell_bytes: int
    end_bytes: int
    begin: int
    known: int
    limit: int
    needs_rest: bool
    is_good: Callable[[npt.NDArray[np.uint8], int], bool]
    n_row: int = 0
    wants_row: bool = False
    namespace: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.cell_bytes

    def ends(self, n_blocks: int) -> Iterator[tuple[int, bytes]]:
        """Yield the places that could be of use, and their keys, the deepest first."""
        size = self.block_size
        if n_blocks:
            name, at = self.names[n_blocks - 1], 4 * n_blocks * size
            most = min(self.limit, len(self.tokens) // 4) - n_blocks * size
            for n in range(min(most, size - 1), 0, -1):
                if n_blocks * size + n > self.known:
                    yield n_blocks * size + n, end_key(name, self.tokens[at : at + 4 * n])
            if self.wants_row and not self.needs_rest and at == len(self.tokens):
                yield at // 4, end_key(name, b"")
        if self.needs_rest:
            for block in range(min(n_blocks, self.limit // size), self.known // size, -1):
                yield block * size, end_key(self.names[block - 1], b"")


@dataclass
class Span:
    """Consecutive blocks that one tier has."""

    tier: Tier
    begin: int
    end: int


@dataclass
class Fetch:
    """One search; `start` lets a thread make it, which never touches a memory.

    What was loaded can be read at any time under `lock`. It is loaded from the back, so that it
    meets an evaluation from the front.

    Attributes
    ----------
    blocks
        What has come, by index of the block, with the tier that it is from.
    end
        The end that is used: its place in tokens, itself, its key and its tier; None without.
    n_blocks
        How many of the prompt's blocks are known; None before that is.
    leases
        Those of the cache.
    seconds
        For how long to lease what is missing; 0 for not at all.
    lease
        The lease of the first block that is missing; None where none is, or nobody asked.
    to_load
        How many blocks each tier is to give.
    depth
        Up to which block it loads.
    moved
        When something came last.
    n_threads
        How many threads read.
    front
        Blocks before this one are not needed any more.
    after
        A search that found somebody else evaluating what is missing: this one begins when that
        has come, or is given up.
    was_followed
        Whether somebody else was waited for already.
    thread
        Who asked for it.
    """

    tiers: Sequence[Tier]
    wanted: Wanted
    blocks: dict[int, tuple[memoryview, Tier]] = field(default_factory=dict)
    end: tuple[int, End, bytes, Tier] | None = None
    n_blocks: int | None = None
    front: int = 0
    leases: Leases = field(default_factory=Leases)
    seconds: float = 0.0
    lease: Lease | None = None
    to_load: dict[Tier, int] = field(default_factory=dict)
    depth: int = 0
    n_threads: int = 1
    after: Fetch | None = None
    was_followed: bool = False
    is_cancelled: bool = False
    is_abandoned: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    looked: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)

    @property
    def left(self) -> float:
        """Seconds until it is done, from what is known of the tiers; more where nothing comes."""
        since = time.monotonic() - self.moved
        if not self.looked.is_set():
            return max(since, sum(tier.estimate(0) for tier in self.tiers))
        with self.lock:
            come = Counter(tier for _, tier in self.blocks.values())
            to_load = {tier: n - come[tier] for tier, n in self.to_load.items()}
        size = self.wanted.block_bytes
        tiers = [(tier, n * size) for tier, n in to_load.items() if n > 0]
        n_groups = sum(-(-n_bytes // GROUP_BYTES) for _, n_bytes in tiers)
        seconds = max(since * n_groups, sum(tier.estimate(n_bytes) for tier, n_bytes in tiers))
        return seconds / 2 if self.n_threads > 1 else seconds

    def come(self) -> tuple[int, int]:
        """Return which tokens need not be evaluated: what has come up to the last block."""
        size = self.wanted.block_size
        with self.lock:
            begin = next(at for at in count(self.depth, -1) if at - 1 not in self.blocks)
            return begin * size, self.depth * size

    def start(self) -> None:
        """Let a thread search."""
        threading.Thread(target=self.run, name="pykvcache-fetch", daemon=True).start()

    def cancel(self) -> None:
        """Let the thread stop after what it is reading."""
        self.is_cancelled = True

    def abandon(self, release: Callable[[Lease], None]) -> None:
        """As `cancel`, and nobody will evaluate what is missing: a lease is given back.

        Parameters
        ----------
        release
            Gives it back without waiting for the store, where the search is done already.
        """
        self.is_abandoned = self.is_cancelled = True
        if (after := self.after) is not None:
            after.is_abandoned = True
        lease = self.lease
        if self.done.is_set() and lease is not None and lease.held:
            release(lease)

    def run(self) -> None:
        """Search, and read from the back."""
        try:
            if self.after is not None:
                self.after.follow()
                self.began = self.moved = time.monotonic()
                self.after = None
            wanted, spans = self.wanted, self.look()
            depth = self.n_blocks or 0
            if wanted.needs_rest:
                depth = self.end[0] // wanted.block_size if self.end is not None else 0
            with self.lock:
                self.to_load = {s.tier: max(0, min(s.end, depth) - s.begin) for s in spans}
                self.depth, self.moved = depth, time.monotonic()
            self.looked.set()
            self._read_all(spans, depth)
        finally:
            self.looked.set()
            self.done.set()
            if self.is_abandoned and self.lease is not None:
                self.lease.release()

    def look(self) -> list[Span]:
        """Find out what is there, take a lease of what is missing, and read the deepest end."""
        wanted, spans = self.wanted, self._look()
        while self.seconds and (at := self.n_blocks or 0) < len(wanted.names):
            self.lease = Lease(self.leases, self.tiers, wanted.names[at], self.seconds, self.thread)
            if self.lease.follows is not None or not self._has_come(at):
                break
            # Who had it before wrote and released between the look and the lease.
            self.lease.release()
            spans = self._look()
            if (self.n_blocks or 0) <= at:
                break  # it is gone again
        self._find_end()
        return spans

    def _has_come(self, block: int) -> bool:
        name = self.wanted.names[block : block + 1]
        return any(tier.contains(name) for tier in self.tiers)

    def _look(self) -> list[Span]:
        """Find out who has which blocks: each tier goes on where the one above ends."""
        wanted, spans = self.wanted, []
        at = wanted.begin
        for tier in self.tiers:
            n = tier.contains(wanted.names[at:])
            if n:
                spans.append(Span(tier, at, at + n))
                at += n
        with self.lock:
            self.n_blocks = at
        return spans

    def _find_end(self) -> None:
        """Find the deepest end that is right."""
        ends = list(self.wanted.ends(self.n_blocks or 0))
        for _ in range(_MAX_TRIES):
            best: tuple[int, Tier] | None = None
            for tier in self.tiers:
                asked = ends if best is None else ends[: best[0]]
                there = tier.present([key for _, key in asked])
                if True in there:
                    best = there.index(True), tier
                if best is not None and best[0] == 0:
                    break
            if best is None:
                return
            place, tier = best
            n, key = ends[place]
            end = self._end(n, key, tier)
            if end is not None:
                with self.lock:
                    self.end = (n, end, key, tier)
                return
            ends = ends[place + 1 :]

    def _end(self, n: int, key: bytes, tier: Tier) -> End | None:
        wanted = self.wanted
        n_cells = n % wanted.block_size
        size = n_cells * wanted.cell_bytes
        found = tier.get([key], END_OVERHEAD + size + wanted.end_bytes)
        if not found:
            return None
        end = End.decode(found[0])
        if end is None or end.n_cells != n_cells or not wanted.is_good(end.cells, n_cells):
            tier.discard([key], refused=True)
            return None
        if wanted.needs_rest and (end.rest is None or end.pos != n - 1):
            return None
        # A memory that cannot be rewound would have nothing to make the logits from.
        if wanted.n_row and 4 * n == len(wanted.tokens) and not end.has_row(wanted.n_row):
            return None
        return end

    def _read_all(self, spans: list[Span], depth: int) -> None:
        """Read from the back, in groups; two threads where there is much."""
        step = max(1, GROUP_BYTES // max(1, self.wanted.block_bytes))
        groups: deque[Span] = deque()
        for span in reversed(spans):
            end = min(span.end, depth)
            while end > span.begin:
                begin = max(span.begin, end - step)
                groups.append(Span(span.tier, begin, end))
                end = begin
        if len(groups) < 4:
            self._read(groups)
            return
        other = threading.Thread(
            target=self._read, name="pykvcache-fetch-2", args=(groups,), daemon=True
        )
        other.start()
        self.n_threads += 1
        self._read(groups)
        other.join()

    def _read(self, groups: deque[Span]) -> None:
        while not self.is_cancelled:
            try:
                group = groups.popleft()
            except IndexError:
                return
            if group.end <= self.front:
                return
            self.read(group)

    def read(self, span: Span) -> None:
        """Read consecutive blocks of one tier, as far as they are there and right."""
        wanted, tier, begin = self.wanted, span.tier, span.begin
        size = wanted.block_bytes
        names = wanted.names[begin : span.end]
        good: list[bool] = []
        found = tier.get(
            names,
            size,
            exact=True,
            seen=lambda one: good.append(
                wanted.is_good(np.frombuffer(one, np.uint8), wanted.block_size)
            ),
        )
        right = [i for i in range(len(found)) if good[i]]
        with self.lock:
            for i in right:
                self.blocks[begin + i] = (found[i], tier)
            self.moved = time.monotonic()
        tier.notices.stored(
            place(wanted.names, wanted.tokens, wanted.block_size, begin + i, wanted.namespace)
            for i in right
        )
        if len(right) < len(found):
            # Whoever wrote it had the right to, and it is none of ours, or holds NaN.
            tier.discard([names[i] for i in range(len(found)) if i not in right], refused=True)

    def follow(self) -> None:
        """Wait for another process that evaluates what is missing."""
        lease, names, at = self.lease, self.wanted.names, self.n_blocks or 0
        if lease is not None and (tier := lease.follows) is not None:
            lease.wait(lambda: tier.contains(names[at : at + 1]) > 0, lambda: self.is_abandoned)

    def again(self) -> Fetch:
        """Return the same search once more, for after somebody else has evaluated."""
        again = Fetch(self.tiers, self.wanted, leases=self.leases)
        again.lease, again.was_followed = self.lease, True
        return again

    # For who evaluates --------------------------------------------------------------------------

    def reach(self, begin: int) -> int:
        """Return up to which block everything from that one on has come; the lock is held."""
        at = begin
        while at in self.blocks:
            at += 1
        return at
