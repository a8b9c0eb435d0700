"""Policies of one heap: lru, fifo, lfu, cost-aware, and the orders of other programs."""

from __future__ import annotations

from pykvcache.prefix.node import Component
from pykvcache.prefix.policies.base import ByPriority

__all__ = ["FIFO", "LFU", "LRU", "VLLM", "CostAware", "LlamaServer", "MlxLm"]


class LRU(ByPriority):
    """Least recently used first."""

    def priority(self, one: Component) -> int:
        """Return when it was used last."""
        return one.last_use


class FIFO(ByPriority):
    """First made, first out, used or not."""

    def priority(self, one: Component) -> int:
        """Return when it was made."""
        return one.created


class LFU(ByPriority):
    """Least often used first; among equals the least recently used."""

    def priority(self, one: Component) -> tuple[int, int]:
        """Return how often it was used, and when last."""
        return one.uses, one.last_use


class CostAware(ByPriority):
    """Least evaluation time saved per byte first (GreedyDual-Size-Frequency).

    The worth of a component is how often it was used times the time to evaluate its tokens, divided
    by its bytes. What is evicted raises the floor that everything used later starts from, so that
    old fame fades.

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

    def added(self, one: Component) -> None:
        """Begin with the floor as priority."""
        one.notes = self._floor

    def used(self, one: Component) -> None:
        """Begin with the floor of now as priority."""
        one.notes = self._floor
        super().used(one)

    def split(self, head: Component, tail: Component) -> None:
        """Give the head the floor of its tail."""
        head.notes = tail.notes

    def priority(self, one: Component) -> float:
        """Return floor + uses x time saved / bytes, of its last token."""
        time = self.linear + 2 * self.quadratic * one.end
        return float(one.notes + (one.uses + 1) * time * one.weight)

    def removing(self, one: Component, n_tokens: int) -> None:
        """Raise the floor."""
        self._floor = max(self._floor, self.priority(one))


# The orders in which other programs evict, for comparison. Here their blocks are stored once, as
# all blocks are: llama-server and mlx-lm store whole prompts, and what prompts share with each.


class VLLM(LRU):
    """As vLLM: least recently used first, and of one prompt the last block first."""


class _WholePrompts(ByPriority):
    """Whole prompts, first in, first out: once one began to leave, the rest of it goes next."""

    whole = True

    def added(self, one: Component) -> None:
        """Store a prompt: its end is here, and no longer in what it goes on from."""
        one.notes = one.last_use
        if one.parent is not None:
            one.parent.notes = -1

    def split(self, head: Component, tail: Component) -> None:
        """No prompt ends between the two."""
        head.notes = -1

    def priority(self, one: Component) -> int:
        """Return when the prompt was stored that ends here; -1 for the rest of one that left."""
        return int(one.notes)


class MlxLm(_WholePrompts):
    """As mlx-lm's prompt cache: in the order of storing, whether used or not."""


class LlamaServer(_WholePrompts):
    """As llama-server's prompt cache: a prompt that is loaded is taken out and stored again."""

    def used(self, one: Component) -> None:
        """Store the prompt again, if one ends here."""
        if one.notes >= 0:
            one.notes = one.last_use
        super().used(one)
