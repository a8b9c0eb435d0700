"""The RAM cache: the tree, its budget in bytes, holds and pins."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pykvcache._native import lib
from pykvcache.errors import ReentryError
from pykvcache.prefix.block_hash import TOKEN_SIZE, NameRoot, block_names
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved, EventLog, Stored
from pykvcache.prefix.match import Hold, Match, Plan, Resume
from pykvcache.prefix.memory import CacheMemory
from pykvcache.prefix.node import Component
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import PrefixTree
from pykvcache.sequence.pool import SequencePool

__all__ = ["CHUNK_BYTES", "NODE_BYTES", "Actions", "BlockCache", "Pin"]

#: Overhead in bytes of a node or component, of a chunk, and of an empty cache (by tracemalloc).
NODE_BYTES, CHUNK_BYTES, _FIXED_BYTES = 800, 250, 24_000

#: After evicting these bytes, or an eighth of the budget if more, free memory goes to the system.
_TRIMMED_BYTES = 4 << 20


@dataclass
class Actions:
    """The result of a change: blocks stored, hashes removed, or all cleared after an error."""

    stored: Stored | None = None
    removed: list[bytes] = field(default_factory=list)
    cleared: bool = False

    def publish(self, events: EventLog) -> None:
        """Publish them as events."""
        if self.cleared:
            events.add(AllBlocksCleared())
        if self.removed:
            events.add(BlockRemoved(tuple(self.removed)))
        if self.stored is not None:
            events.add(self.stored)


class _Owned(NamedTuple):
    """The hold of one sequence or pin."""

    owner: weakref.ref[object]
    hold: Hold


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
        root: NameRoot,
        events: EventLog,
        pool: SequencePool,
    ) -> None:
        self.shape, self.max_bytes = memory.shape, max_bytes
        self.stored = self.removed = 0
        self._policy, self._root = policy, root
        self._events, self._memory, self._pool = events, memory, pool
        #: The pins with a hold.
        self.pins: dict[Pin, None] = {}
        self._fixed_bytes = min(_FIXED_BYTES, max_bytes // 16)
        self._holds: dict[int, _Owned] = {}
        self._is_changing, self._actions = False, Actions()
        self.tree = self._new_tree()

    def _new_tree(self) -> PrefixTree:
        return PrefixTree(self.shape, self._policy, max_bytes=self._room(), root=self._root)

    @property
    def nbytes(self) -> int:
        """Bytes that count towards the budget, overhead included."""
        more = self._fixed_bytes + self._events.nbytes + self._memory.free_bytes
        return self.tree.used_bytes + more

    # Changing -----------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator[Actions]:
        """Context of one change; yields its `Actions`. An exception in it empties the cache.

        Raises
        ------
        ReentryError
            A change is in progress: a policy has called the cache.
        """
        if self._is_changing:
            raise ReentryError("a policy must not call the cache")
        self._is_changing = True
        actions = self._actions = Actions()
        try:
            for key, owned in list(self._holds.items()):
                if owned.owner() is None:  # dropped without a release
                    self.tree.release(self._holds.pop(key).hold, is_use=False)
            yield actions
            self.tree.fit()
            if self._memory.free_bytes or self.tree.evicted_bytes:
                self._trim()
        except BaseException:
            self._drop_all()
            raise
        finally:
            self._is_changing = False
            if self.tree.removed:
                actions.removed += self.tree.removed
                self.removed += len(self.tree.removed)
                self.tree.removed = []
            if actions.stored or actions.removed or actions.cleared:
                actions.publish(self._events)

    def _room(self) -> int:
        """Return the tree's share of the budget, which leaves room for all events."""
        return max(0, self.max_bytes - self._fixed_bytes - self._events.max_bytes)

    def _trim(self) -> None:
        """Return free memory to the system, as much as the budget requires."""
        self._memory.trim(max(0, self._room() - self.tree.used_bytes))
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
        self._memory.trim()
        actions = self._actions
        actions.stored, actions.removed, actions.cleared = None, [], True

    # Looking up and using -----------------------------------------------------------------------

    def hold(self, owner: object, match: Match, resume: Resume) -> None:
        """Hold what an owner uses until it is released or gone, or holds something else."""
        new, key = self.tree.hold(match, resume), id(owner)
        self.release(owner)
        if new is not None:
            self._holds[key] = _Owned(weakref.ref(owner), new)

    def hold_as(self, owner: object, other: object) -> None:
        """Give an owner a hold of the components that another one holds."""
        owned = self._holds.get(id(other))
        if owned is not None and (hold := self.tree.hold_again(owned.hold)) is not None:
            self._holds[id(owner)] = _Owned(weakref.ref(owner), hold)

    def release(self, owner: object, *, is_use: bool = True) -> None:
        """Release the hold of an owner, if it has one; within a change."""
        owned = self._holds.pop(id(owner), None)
        if owned is not None:
            self.tree.release(owned.hold, is_use=is_use)

    def holds(self, owner: object) -> bool:
        """Return whether an owner has a hold that was not cleared."""
        owned = self._holds.get(id(owner))
        return owned is not None and owned.hold.node.parent is not None

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

    def insert(
        self,
        tokens: bytes,
        plan: Plan,
        match: Match,
        space: str,
        owner: object | None = None,
    ) -> list[Component]:
        """Insert a plan, within a change, and evict to make room for it.

        The plan must have been made from this match. An owner gets a hold of all of it. Returns
        the components that lack contents, for the caller to fill, or to pass to `abandon`.
        """
        tree, size = self.tree, self.shape.block_size
        known, n_removed = match.n // size, len(tree.removed)
        # Before the eviction, which may remove known blocks to make room for new ones.
        parent = match.node.name_at(known, size) if known else b""
        match, hold = tree.insert(tokens, plan, match, space, keep=owner is not None)
        if hold is not None:
            self.release(owner, is_use=False)
            self._holds[id(owner)] = _Owned(weakref.ref(owner), hold)
        parent = parent or match.node.name_at(0, size)
        text = tokens[known * size * TOKEN_SIZE :]
        if len(tree.removed) > n_removed:
            # New blocks that were evicted at once are not reported.
            new = set(block_names(parent, text, size * TOKEN_SIZE))
            tree.removed[n_removed:] = [x for x in tree.removed[n_removed:] if x not in new]
        if (n := match.n // size - known) > 0:
            before = parent if known else None
            text = text[: n * size * TOKEN_SIZE]
            self._actions.stored = Stored(parent, before, text, size, space)
            self.stored += n
        return tree.holes(match)

    def abandon(self, holes: list[Component], owner: object | None) -> None:
        """Roll back the last insertion, whose cells cannot be read."""
        self.release(owner, is_use=False)
        stored, self._actions.stored = self._actions.stored, None
        new = set() if stored is None else set(stored.names)
        n_removed = len(self.tree.removed)
        self.tree.discard(holes)
        left = [name for name in self.tree.removed[n_removed:] if name not in new]
        self.tree.removed[n_removed:] = left
        self.stored -= len(new)

    def clear(self, space: str | None) -> None:
        """Remove all tokens of a space, or of all."""
        self.tree.clear(space)
        self._memory.trim()


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
