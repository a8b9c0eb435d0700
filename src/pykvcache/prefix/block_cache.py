"""The RAM cache: the tree, its budget in bytes, holds and pins."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from pykvcache._native import lib
from pykvcache.errors import KvCacheError, ReentryError
from pykvcache.prefix.block_hash import TOKEN_SIZE, block_names
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved, EventLog, Stored
from pykvcache.prefix.memory import Buffer, CacheMemory
from pykvcache.prefix.node import Hold, Kind, Match, Offer, Resume
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import PrefixTree
from pykvcache.sequence.pool import SequencePool

__all__ = ["BlockCache", "Pin", "Read"]

#: Returns the cells of consecutive chunks from a token on; raises `KvCacheError` if some are
#: missing.
Read: TypeAlias = Callable[[Kind, int, Sequence[int]], list[Buffer]]

#: Overhead in bytes of an empty cache (by tracemalloc).
_FIXED_BYTES = 24_000

#: After evicting these bytes, or an eighth of the budget if more, free memory goes to the system.
_TRIMMED_BYTES = 4 << 20


class BlockCache:
    """The tree of a cache, its budget, and the holds of sequences and pins.

    Every change is made within `change`: an exception in it empties the cache. The budget covers
    cells, states, bookkeeping, unread events and free buffers.
    """

    def __init__(
        self,
        memory: CacheMemory,
        max_bytes: int,
        policy: str | Policy,
        events: EventLog,
        pool: SequencePool,
    ) -> None:
        self.memory, self.shape, self.max_bytes = memory, memory.shape, max_bytes
        self.events = events
        self.stored = self.removed = 0
        self._policy, self._pool = policy, pool
        #: The pins with a hold.
        self.pins: dict[Pin, None] = {}
        self._fixed_bytes = min(_FIXED_BYTES, max_bytes // 16)
        self._holds: dict[weakref.ref[object], Hold] = {}  # by sequence or pin
        self._is_changing = False
        self._new: Stored | None = None  # stored by the change in progress
        self.tree = self._new_tree()

    def _new_tree(self) -> PrefixTree:
        return PrefixTree(self.shape, self._policy, max_bytes=self._room(), root=self.memory.root)

    @property
    def nbytes(self) -> int:
        """Bytes that count towards the budget, overhead included."""
        more = self._fixed_bytes + self.events.nbytes + self.memory.free_bytes
        return self.tree.used_bytes + more

    # Changing -----------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator[None]:
        """Context of one change, which ends with its events. An exception empties the cache.

        Raises
        ------
        ReentryError
            A change is in progress: a policy has called the cache.
        """
        if self._is_changing:
            raise ReentryError("a policy must not call the cache")
        self._is_changing = True
        try:
            for owner in list(self._holds):
                if owner() is None:  # dropped without a release
                    self.tree.release(self._holds.pop(owner), is_use=False)
            yield
            self.tree.fit()
            if self.memory.free_bytes or self.tree.evicted_bytes:
                self._trim()
        except BaseException:
            self._drop_all()
            raise
        finally:
            self._is_changing = False
            removed, self.tree.removed = self.tree.removed, []
            stored, self._new = self._new, None
            if removed:
                self.removed += len(removed)
                self.events.add(BlockRemoved(tuple(removed)))
            if stored is not None:
                self.events.add(stored)

    def _room(self) -> int:
        """Return the tree's share of the budget, which leaves room for all events."""
        return max(0, self.max_bytes - self._fixed_bytes - self.events.max_bytes)

    def _trim(self) -> None:
        self.memory.trim(max(0, self._room() - self.tree.used_bytes))
        if self.tree.evicted_bytes > max(self.max_bytes // 8, _TRIMMED_BYTES):
            self.tree.evicted_bytes = 0
            lib.trim_memory()  # small chunks fragment the allocator's memory

    def _drop_all(self) -> None:
        """Empty the cache, whose tree may be inconsistent."""
        self.removed = self.stored
        for node in list(self.tree.nodes()):
            node.parent = None  # so that no hold and no policy can still refer to it
        self.tree = self._new_tree()
        self._holds.clear()
        self.memory.trim()
        self._new, self._is_changing = None, False
        self.events.add(AllBlocksCleared())

    # Looking up and using -----------------------------------------------------------------------

    def hold(self, owner: object, match: Match, resume: Resume) -> None:
        """Hold what an owner uses until it is released or gone, or holds something else."""
        new = self.tree.hold(match, resume)
        self.release(owner)
        if new is not None:
            self._holds[weakref.ref(owner)] = new

    def hold_as(self, owner: object, other: object) -> None:
        """Let an owner hold the components that another one holds."""
        if (hold := self._holds.get(weakref.ref(other))) is not None:
            self.tree.hold_again(hold)
            self._holds[weakref.ref(owner)] = hold

    def release(self, owner: object, *, is_use: bool = True) -> None:
        """Release the hold of an owner, if it has one; within a change."""
        if (hold := self._holds.pop(weakref.ref(owner), None)) is not None:
            self.tree.release(hold, is_use=is_use)

    def holds(self, owner: object) -> bool:
        """Return whether an owner has a hold that was not cleared."""
        hold = self._holds.get(weakref.ref(owner))
        return hold is not None and hold.node.parent is not None

    # Pins ---------------------------------------------------------------------------------------

    def pin(self, tokens: bytes, space: str, until: float) -> Pin:
        """Hold the cached prefix of some tokens until a time on the monotonic clock."""
        with self.change():
            match = self.tree.match(tokens, space)
            resume = self.tree.resume(match, match.n)
            pin = Pin(self, resume.n, until)
            if resume.n:
                self.tree.use(match, resume)
                self.hold(pin, match, resume)
                self.pins[pin] = None  # keeps the pin alive if the caller drops it
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release the hold of a pin; takes the pool's lock."""
        with self._pool:
            if self.pins.pop(pin, ...) is not ...:
                with self.change():
                    self.release(pin)

    def expire_pins(self) -> None:
        """Release the expired pins."""
        now = time.monotonic()
        for pin in [pin for pin in self.pins if pin.is_over(now)]:
            self.unpin(pin)

    # Storing ------------------------------------------------------------------------------------

    def admit(
        self,
        read: Read,
        tokens: bytes,
        match: Match,
        space: str,
        offer: Offer,
        owner: object | None = None,
    ) -> None:
        """Store the missing part of an offer, within a change: evict, then read its cells.

        ``match`` is that of the tokens. If ``owner`` is given, it holds everything that is stored,
        even above the budget. Unreadable cells are not stored.
        """
        tree, size = self.tree, self.shape.block_size
        plan = tree.plan(match, offer, is_limited=owner is None)
        if plan is None:
            return
        known, n_removed = match.n // size, len(tree.removed)
        # Before the eviction, which may remove known blocks to make room for new ones.
        parent = match.node.name_at(known, size)
        match, hold = tree.insert(tokens, plan, match, space, keep=owner is not None)
        if hold is not None:
            self.release(owner, is_use=False)
            self._holds[weakref.ref(owner)] = hold
        n_new, holes = match.n // size - known, tree.holes(match)
        try:
            for one in holes:
                n = one.n_missing
                one.chunks[:n] = read(one.kind, one.start, one.sizes[:n])
        except (KvCacheError, MemoryError):
            if hold is not None:
                self.release(owner, is_use=False)
            tree.discard(holes)
            n_new = 0
        text = tokens[known * size * TOKEN_SIZE :]
        if len(tree.removed) > n_removed:
            # New blocks that were removed at once are not reported.
            new = set(block_names(parent, text, size * TOKEN_SIZE))
            tree.removed[n_removed:] = [x for x in tree.removed[n_removed:] if x not in new]
        if n_new > 0:
            text = text[: n_new * size * TOKEN_SIZE]
            self._new = Stored(parent, parent if known else None, text, size, space)
            self.stored += n_new

    def clear(self, space: str | None) -> None:
        """Remove all tokens of a space, or of all."""
        self.tree.clear(space)
        self.memory.trim()


class Pin:
    """A cached prefix that is not evicted until it is released or expires."""

    def __init__(self, blocks: BlockCache, n_tokens: int, until: float) -> None:
        self._blocks, self._n_tokens, self._until = blocks, n_tokens, until

    @property
    def n_tokens(self) -> int:
        """Number of protected tokens; 0 once it is released, expired or cleared."""
        is_over = self.is_over(time.monotonic()) or not self._blocks.holds(self)
        return 0 if is_over else self._n_tokens

    def is_over(self, now: float) -> bool:
        """Return whether it has expired."""
        return self._until <= now

    def release(self) -> None:
        """Release the prefix; a second call does nothing."""
        self._blocks.unpin(self)

    def __repr__(self) -> str:
        return f"<Pin: {self.n_tokens} tokens>"
