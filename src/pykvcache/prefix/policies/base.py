"""The interface of a policy, and a heap for policies that score components."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Any

from pykvcache.prefix.node import Component

__all__ = ["ByPriority", "Leaves", "Policy", "lower", "part_bytes"]


class Policy:
    """Decides which components are evicted first; a subclass overrides the methods it needs.

    Attributes
    ----------
    whole : bool
        Whether a component is evicted whole. Otherwise only as many of its tokens as necessary.
    declines : bool
        Whether a component that was just added may be evicted first. Otherwise it is evicted last.
    n_bytes : int
        Bytes of the policy's own records of evicted components; they count towards the budget.
    max_notes : int or None
        Upper bound on `n_bytes`, set by the cache; None if these bytes are not counted.
    """

    whole: bool = False
    declines: bool = False
    n_bytes: int = 0
    max_notes: int | None = None

    def resize(self, max_bytes: int) -> None:
        """Note the budget; called first, and again after an error has emptied the cache."""

    def added(self, component: Component) -> None:
        """Note a new component; `evictable` follows once it may be evicted."""

    def used(self, component: Component) -> None:
        """Note that a prompt used a component; the last component of a path comes first."""

    def split(self, head: Component, tail: Component) -> None:
        """Copy the history of a tail to its head, a new component that was split off in front."""

    def passed(self, component: Component) -> None:
        """Note that a prompt diverged or ended within a node; the component holds what follows."""

    def removing(self, component: Component, n_tokens: int) -> None:
        """Note that `n_tokens` of a component are about to be evicted; a state has none."""

    def evictable(self, component: Component) -> None:
        """Note that a component may be evicted now, until it is held or gets a child."""

    def victim(self) -> Component | None:
        """Return the evictable component to evict first; None if there is none."""
        raise NotImplementedError(f"{type(self).__name__} must override victim()")


# One counter for all heaps, so that moving a component to another heap invalidates its old entry.
_stamps = count()


class Leaves:
    """A heap of evictable components, which skips outdated entries."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Any, int, Component]] = []
        self._limit = 64

    def push(self, component: Component, priority: Any) -> None:
        """Add or move a component; the order is `Component.priority`, then ``priority``."""
        component.stamp = next(_stamps)
        heapq.heappush(self._heap, (component.priority, priority, component.stamp, component))
        if len(self._heap) > self._limit:
            self._heap = [x for x in self._heap if x[3].stamp == x[2] and x[3].is_evictable]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64

    def first(self) -> Component | None:
        """Return the first component without removing it."""
        while self._heap:  # `push` may replace the list
            rank, priority, stamp, component = self._heap[0]
            if component.stamp == stamp and component.is_evictable:
                if rank == component.priority:
                    return component
                self.push(component, priority)  # a later prompt raised its priority
            else:
                heapq.heappop(self._heap)
        return None


def part_bytes(component: Component, n_tokens: int) -> int:
    """Return the bytes of n_tokens of a component: of a state, which has no tokens, all."""
    whole = component.n_tokens
    return component.n_bytes * n_tokens // whole if whole else component.n_bytes


def lower(component: Component | None, other: Component | None) -> Component | None:
    """Return the component of lower priority; if they are equal, the first."""
    if component is None or other is None:
        return component or other
    return other if other.priority < component.priority else component


class ByPriority(Policy):
    """Evicts the component with the smallest `priority`, which may change when it is used."""

    def __init__(self) -> None:
        self.leaves = Leaves()

    def priority(self, component: Component) -> Any:
        """Return a value that orders components: the smallest is evicted first.

        It is called when a component becomes evictable, and when an evictable one is used.
        """
        raise NotImplementedError(f"{type(self).__name__} must override priority()")

    def used(self, component: Component) -> None:
        """Note the new priority."""
        if component.is_evictable:
            self.leaves.push(component, self.priority(component))

    def evictable(self, component: Component) -> None:
        """Note the priority."""
        self.leaves.push(component, self.priority(component))

    def victim(self) -> Component | None:
        """Return the component with the smallest priority."""
        return self.leaves.first()
