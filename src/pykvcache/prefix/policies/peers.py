"""The orders in which other programs evict, for comparison.

Here their blocks are stored once, as all blocks are: llama-server and mlx-lm store whole prompts,
what two of them share twice, so that they hold less in the same memory.
"""

from __future__ import annotations

from pykvcache.prefix.policies.base import ByPriority
from pykvcache.prefix.policies.simple import LRU
from pykvcache.prefix.runs import Run

__all__ = ["VLLM", "LlamaServer", "MlxLm"]


class VLLM(LRU):
    """As vLLM: least recently used first, and of one prompt the last block first."""


class _WholePrompts(ByPriority):
    """Whole prompts, first in, first out: once one began to leave, the rest of it goes next."""

    whole = True

    def added(self, run: Run) -> None:
        """Store a prompt: its end is here, and no longer in what it goes on from."""
        run.state = run.last_use
        if run.parent is not None:
            run.parent.state = -1

    def split(self, head: Run, tail: Run) -> None:
        """No prompt ends between the two."""
        head.state = -1

    def priority(self, run: Run) -> int:
        """Return when the prompt was stored that ends here; -1 for the rest of one that left."""
        return int(run.state)


class MlxLm(_WholePrompts):
    """As mlx-lm's prompt cache: in the order of storing, whether used or not."""


class LlamaServer(_WholePrompts):
    """As llama-server's prompt cache: a prompt that is loaded is taken out and stored again."""

    def used(self, run: Run) -> None:
        """Store the prompt again, if one ends here."""
        if run.state >= 0:
            run.state = run.last_use
        super().used(run)
