"""Policies of two queues, against prompts that come only once: slru and s3fifo."""

from __future__ import annotations

from collections import OrderedDict

from pykvcache.prefix.node import Component
from pykvcache.prefix.policies.base import Leaves, Policy, lower

__all__ = ["S3FIFO", "SLRU"]

#: Bytes that a remembered key takes.
_GHOST_BYTES = 120


class SLRU(Policy):
    """Segmented LRU: what was used again is protected, in up to 80 % of the budget.

    New components are on probation and leave first, the least recently used first. A use protects.
    What is too much there goes back on probation, the least recently used first.
    """

    protected_share = 0.8

    def __init__(self) -> None:
        self._limit = 0.0
        self._probation = Leaves()
        self._last_resort = Leaves()
        self._protected: OrderedDict[Component, int] = OrderedDict()  # and their bytes
        self._bytes = 0
        self._clock = 0

    def resize(self, max_bytes: int) -> None:
        """Give the protected queue its share of the budget."""
        self._limit = self.protected_share * max_bytes
        self._demote()

    def _stamp(self, one: Component) -> None:
        self._clock += 1
        one.notes = self._clock

    def added(self, one: Component) -> None:
        """Put a new component into the queue on probation."""
        self._stamp(one)

    def used(self, one: Component) -> None:
        """Put a used component into the protected queue."""
        self._stamp(one)
        self._protect(one)
        self._protected.move_to_end(one)
        self._enter(one)
        self._demote()

    def _protect(self, one: Component) -> None:
        """Count a component as protected, with the bytes that it has now."""
        self._bytes += one.n_bytes - self._protected.get(one, 0)
        self._protected[one] = one.n_bytes

    def _demote(self) -> None:
        while self._bytes > self._limit and self._protected:
            one, n_bytes = self._protected.popitem(last=False)
            self._bytes -= n_bytes
            self._stamp(one)
            self._enter(one)

    def split(self, head: Component, tail: Component) -> None:
        """Put the head where the tail is, a little more recent."""
        head.notes = tail.notes
        if tail in self._protected:
            for one in (head, tail):
                self._protect(one)
                self._protected.move_to_end(one, last=False)

    def removing(self, one: Component, n_tokens: int) -> None:
        """Subtract the bytes of what is evicted."""
        if (known := self._protected.get(one)) is not None:
            left = one.n_bytes * (one.n_tokens - n_tokens) // one.n_tokens if one.n_tokens else 0
            self._bytes += left - known
            self._protected[one] = left
            if not left:
                del self._protected[one]

    def evictable(self, one: Component) -> None:
        """Add the component to the queue that it belongs to."""
        self._enter(one)

    def _enter(self, one: Component) -> None:
        if one.is_evictable:
            leaves = self._last_resort if one in self._protected else self._probation
            leaves.push(one, one.notes)

    def victim(self) -> Component | None:
        """Return the least recently used on probation, or protected if there is none."""
        return lower(self._probation.first(), self._last_resort.first())


class S3FIFO(Policy):
    """Two first-in-first-out queues and a list of keys that left (Yang et al., SOSP 2023).

    New components enter a small queue of 10 % of the budget. Those used there move to the main
    queue, the rest leaves; one that comes back soon enters the main queue at once. A use in the
    main queue buys another round, up to three.
    """

    small_share = 0.1

    def __init__(self) -> None:
        self._limit = 0.0
        self._budget = 0
        self._small, self._main = Leaves(), Leaves()
        self._small_bytes = 0
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._ghost_bytes = 0
        self._clock = 0

    def resize(self, max_bytes: int) -> None:
        """Give the small queue its share."""
        self._budget = max_bytes
        self._limit = self.small_share * max_bytes

    def _place(self, one: Component, uses: int, in_main: bool) -> None:
        self._clock += 1
        one.notes = (uses, in_main, self._clock)

    def added(self, one: Component) -> None:
        """Put it into the small queue, or the main one if its first chunk left not long ago."""
        ghost = self._ghosts.pop(one.chunk_key(), None)
        if ghost is not None:
            self._ghost_bytes -= ghost
        else:
            self._small_bytes += one.n_bytes
        self._place(one, 0, ghost is not None)

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the keys of components that left."""
        return _GHOST_BYTES * len(self._ghosts)

    def used(self, one: Component) -> None:
        """Count the use, up to three."""
        uses, in_main, place = one.notes
        one.notes = (min(uses + 1, 3), in_main, place)

    def split(self, head: Component, tail: Component) -> None:
        """Put the head where the tail is."""
        head.notes = tail.notes

    def removing(self, one: Component, n_tokens: int) -> None:
        """Remember what leaves the small queue."""
        _, in_main, _ = one.notes
        if in_main:
            return
        size = one.n_bytes * n_tokens // one.n_tokens if one.n_tokens else one.n_bytes
        self._small_bytes -= size
        key = one.chunk_key(one.n_tokens - n_tokens)
        self._ghost_bytes += size - self._ghosts.pop(key, 0)
        self._ghosts[key] = size
        most = self._budget
        while self._ghosts and (
            self._ghost_bytes > most
            or (self.max_notes is not None and self.n_bytes > self.max_notes)
        ):
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def evictable(self, one: Component) -> None:
        """Append the component to its queue."""
        _, in_main, place = one.notes
        (self._main if in_main else self._small).push(one, place)

    def victim(self) -> Component | None:
        """Return the first of a queue that was not used since it entered; used ones move on."""
        while True:
            small, main = self._small.first(), self._main.first()
            is_full = self._small_bytes > self._limit
            one = lower(small, main) if is_full else lower(main, small)
            if one is None:
                return None
            uses, in_main, _ = one.notes
            if uses == 0:
                return one
            if not in_main:
                self._small_bytes -= one.n_bytes
            self._place(one, uses - 1 if in_main else 0, True)
            self.evictable(one)
