"""Policies of a few lines: lru, fifo, lfu, cost-aware, whole prompts; with queues: slru, s3fifo."""

from __future__ import annotations

import math
from collections import OrderedDict

from pykvcache.prefix.node import Component
from pykvcache.prefix.policies.base import ByPriority, Leaves, Policy, lower, part_bytes

__all__ = ["FIFO", "LFU", "LRU", "S3FIFO", "SLRU", "CostAware", "WholePrompts"]

#: Bytes of a ghost entry.
_GHOST_BYTES = 120


class LRU(ByPriority):
    """Least recently used first."""

    def priority(self, component: Component) -> int:
        """Return the time of its last use."""
        return component.last_use


class FIFO(ByPriority):
    """First in, first out, whether used or not."""

    def priority(self, component: Component) -> int:
        """Return when it was created."""
        return component.created


class LFU(ByPriority):
    """Least often used first; among equals the least recently used."""

    def priority(self, component: Component) -> tuple[int, int]:
        """Return the number of its uses, and the time of the last."""
        return component.uses, component.last_use


class CostAware(ByPriority):
    """Least evaluation time saved per byte first (GreedyDual-Size-Frequency).

    A component's priority is a floor plus its uses times the time to evaluate its tokens, divided
    by its bytes. Each eviction raises the floor of components used later, so that past popularity
    ages.

    Parameters
    ----------
    linear, quadratic
        Evaluating ``n`` tokens takes ``linear * n + quadratic * n**2``: only their ratio matters.
    """

    def __init__(self, linear: float = 1.0, quadratic: float = 1 / 16384) -> None:
        super().__init__()
        self.linear = linear
        self.quadratic = quadratic
        self._floor = 0.0

    def added(self, component: Component) -> None:
        """Store the current floor."""
        component.notes = self._floor

    def used(self, component: Component) -> None:
        """Store the current floor."""
        component.notes = self._floor
        super().used(component)

    def split(self, head: Component, tail: Component) -> None:
        """Give the head the floor of its tail."""
        head.notes = tail.notes

    def priority(self, component: Component) -> float:
        """Return floor + (uses + 1) x time saved / bytes, by the time of its last token."""
        time = self.linear + 2 * self.quadratic * component.end
        return float(component.notes + (component.uses + 1) * time * component.weight)

    def removing(self, component: Component, n_tokens: int) -> None:
        """Raise the floor."""
        self._floor = max(self._floor, self.priority(component))


class WholePrompts(ByPriority):
    """As the prompt caches of llama-server and mlx-lm: whole prompts in the order of storage.

    A prompt that is used or extended is stored again, as the newest. Once a prompt is evicted in
    part, the rest of it is evicted next. Unlike there, each block is stored once.
    """

    whole = True

    def added(self, component: Component) -> None:
        """Note that a prompt ends here, and that its parent is no longer the end of one."""
        component.notes = component.last_use
        if component.parent is not None:
            component.parent.notes = -1

    def used(self, component: Component) -> None:
        """Count a prompt that ends here as stored now."""
        if component.notes >= 0:
            component.notes = component.last_use
        super().used(component)

    def split(self, head: Component, tail: Component) -> None:
        """Note that no prompt ends at the head."""
        head.notes = -1

    def priority(self, component: Component) -> int:
        """Return when the prompt that ends here was stored; -1 if none ends here (any more)."""
        return int(component.notes)


class SLRU(ByPriority):
    """Segmented LRU: its first use moves a component to a protected segment of 80 % of the budget.

    New components are on probation and are evicted first. If the protected segment is too large,
    its least recently used components return to probation. Both segments are LRU.
    """

    protected_share = 0.8

    def __init__(self) -> None:
        super().__init__()
        self._limit = 0.0
        self._protected: OrderedDict[Component, int] = OrderedDict()  # with their bytes
        self._bytes = 0
        self._clock = 0

    def priority(self, component: Component) -> tuple[bool, int]:
        """Return whether it is protected, and when it entered its segment or was last used."""
        return component in self._protected, component.notes

    def resize(self, max_bytes: int) -> None:
        """Set the limit of the protected segment."""
        self._limit = self.protected_share * max_bytes
        self._demote()

    def _stamp(self, component: Component) -> None:
        self._clock += 1
        component.notes = self._clock

    def added(self, component: Component) -> None:
        """Put a new component on probation."""
        self._stamp(component)

    def used(self, component: Component) -> None:
        """Put a used component into the protected segment."""
        self._stamp(component)
        self._protect(component)
        self._protected.move_to_end(component)
        super().used(component)
        self._demote()

    def _protect(self, component: Component) -> None:
        self._bytes += component.n_bytes - self._protected.get(component, 0)
        self._protected[component] = component.n_bytes

    def _demote(self) -> None:
        while self._bytes > self._limit and self._protected:
            component, n_bytes = self._protected.popitem(last=False)
            self._bytes -= n_bytes
            self._stamp(component)
            super().used(component)

    def split(self, head: Component, tail: Component) -> None:
        """Put the head into the tail's segment, next to it."""
        head.notes = tail.notes
        if tail in self._protected:
            for component in (head, tail):
                self._protect(component)
                self._protected.move_to_end(component, last=False)

    def removing(self, component: Component, n_tokens: int) -> None:
        """Subtract the evicted bytes."""
        if (known := self._protected.get(component)) is not None:
            left = component.n_bytes - part_bytes(component, n_tokens)
            self._bytes += left - known
            self._protected[component] = left
            if not left:
                del self._protected[component]


class S3FIFO(Policy):
    """Two FIFO queues and a ghost queue (Yang et al., SOSP 2023).

    New components enter a small queue of 10 % of the budget. Those used there move to the main
    queue; the rest are evicted. A component that returns while its key is remembered (a ghost hit)
    enters the main queue directly. Each use, up to three, gains another round in the main queue.
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
        """Set the limit of the small queue."""
        self._budget = max_bytes
        self._limit = self.small_share * max_bytes

    def _place(self, component: Component, uses: int, in_main: bool) -> None:
        self._clock += 1
        component.notes = (uses, in_main, self._clock)

    def added(self, component: Component) -> None:
        """Put it into the small queue, or the main one after a ghost hit."""
        ghost = self._ghosts.pop(component.chunk_key(), None)
        if ghost is not None:
            self._ghost_bytes -= ghost
        else:
            self._small_bytes += component.n_bytes
        self._place(component, 0, ghost is not None)

    @property
    def n_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the ghosts."""
        return _GHOST_BYTES * len(self._ghosts)

    def used(self, component: Component) -> None:
        """Count the use, up to three."""
        uses, in_main, place = component.notes
        component.notes = (min(uses + 1, 3), in_main, place)

    def split(self, head: Component, tail: Component) -> None:
        """Put the head into the tail's queue."""
        head.notes = tail.notes

    def removing(self, component: Component, n_tokens: int) -> None:
        """Add a ghost of what is evicted from the small queue."""
        _, in_main, _ = component.notes
        if in_main:
            return
        size = part_bytes(component, n_tokens)
        self._small_bytes -= size
        key = component.chunk_key(component.n_tokens - n_tokens)
        self._ghost_bytes += size - self._ghosts.pop(key, 0)
        self._ghosts[key] = size
        most = math.inf if self.max_notes is None else self.max_notes
        while self._ghosts and (self._ghost_bytes > self._budget or self.n_bytes > most):
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def evictable(self, component: Component) -> None:
        """Append the component to its queue."""
        _, in_main, place = component.notes
        (self._main if in_main else self._small).push(component, place)

    def victim(self) -> Component | None:
        """Return the first component without uses left; move used ones to the main queue's end."""
        while True:
            small, main = self._small.first(), self._main.first()
            is_full = self._small_bytes > self._limit
            component = lower(small, main) if is_full else lower(main, small)
            if component is None:
                return None
            uses, in_main, _ = component.notes
            if uses == 0:
                return component
            if not in_main:
                self._small_bytes -= component.n_bytes
            self._place(component, uses - 1 if in_main else 0, True)
            self.evictable(component)
