"""The simple policies: lru, fifo, lfu, and what a block costs to compute again."""

from __future__ import annotations

from pykvcache.prefix.policies.base import ByPriority
from pykvcache.prefix.runs import Run

__all__ = ["FIFO", "LFU", "LRU", "CostAware"]


class LRU(ByPriority):
    """Least recently used first."""

    def priority(self, run: Run) -> int:
        """Return when it was used last."""
        return run.last_use


class FIFO(ByPriority):
    """First made, first out, used or not."""

    def priority(self, run: Run) -> int:
        """Return when it was made."""
        return run.created


class LFU(ByPriority):
    """Least often used first; among equals the least recently used."""

    def priority(self, run: Run) -> tuple[int, int]:
        """Return how often it was used, and when last."""
        return run.uses, run.last_use


class CostAware(ByPriority):
    """Least evaluation time saved per byte first (GreedyDual-Size-Frequency).

    The worth of a block is how often it was used times the time to evaluate its tokens, divided by
    its bytes. What is evicted raises the floor that everything used later starts from, so that old
    fame fades.

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

    def added(self, run: Run) -> None:
        """Begin with the floor as priority."""
        run.state = self._floor

    def used(self, run: Run) -> None:
        """Begin with the floor of now as priority."""
        run.state = self._floor
        super().used(run)

    def split(self, head: Run, tail: Run) -> None:
        """Give the head the floor of its tail."""
        head.state = tail.state

    def priority(self, run: Run) -> float:
        """Return floor + uses x time saved / bytes, of its last block."""
        tokens = run.tokens_saved
        end = run.end * (run.step // 4)
        # The time of the last `tokens` of the first `end`.
        time = tokens * (self.linear + self.quadratic * (2 * end - tokens))
        return float(run.state + (run.uses + 1) * time / max(run.block_bytes, 1))

    def removing(self, run: Run, n_blocks: int) -> None:
        """Raise the floor."""
        self._floor = max(self._floor, self.priority(run))
