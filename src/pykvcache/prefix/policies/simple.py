"""Policies with one heap: lru, fifo, lfu, cost-aware, and the orders of other programs."""

from __future__ import annotations

from pykvcache.prefix.node import Component
from pykvcache.prefix.policies.base import ByPriority

__all__ = ["FIFO", "LFU", "LRU", "CostAware", "WholePrompts"]


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
