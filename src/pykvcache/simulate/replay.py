"""One trace, one policy, one size: how many of the tokens were there."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache._arguments import as_int
from pykvcache.prefix.node import MemoryShape
from pykvcache.prefix.plan import Offer
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import PrefixTree
from pykvcache.simulate.traces import Trace, check_trace

__all__ = ["Result", "replay"]


@dataclass(frozen=True)
class Result:
    """What a replay found.

    Attributes
    ----------
    policy : str
        Its name.
    n_blocks : int
        How many blocks the cache could hold.
    hit_tokens, n_tokens : int
        Prompt tokens that were there, of all.
    """

    policy: str
    n_blocks: int
    hit_tokens: int
    n_tokens: int

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that needed no evaluation."""
        return self.hit_tokens / self.n_tokens if self.n_tokens else 0.0


def replay(trace: Trace, policy: str | Policy, n_blocks: int) -> Result:
    """Send a trace's prompts one after the other through a cache of so many blocks.

    Answers are not modelled: a prompt stores its own blocks, and those before its partial last one
    are what the next prompt can find.

    Parameters
    ----------
    trace
        The prompts.
    policy
        A name, or a new object.
    n_blocks
        Size of the cache.
    """
    check_trace(trace)
    n_blocks = as_int(n_blocks, "n_blocks", 0)
    name = policy if isinstance(policy, str) else type(policy).__name__
    # One id is one token of the tree, a block has one of them, and takes one byte.
    tree = PrefixTree(MemoryShape(1), policy, max_bytes=n_blocks)
    hits = 0
    for ids, length in zip(trace.prompts, trace.lengths, strict=True):
        tokens = ids.astype("<u4", copy=False).tobytes()
        match = tree.match(tokens)
        tree.use(match, tree.resume(match, match.n))
        plan = tree.plan(match, Offer(len(ids)))
        if plan is not None:
            tree.insert(tokens, plan, match)
        hits += min(match.n * trace.block_size, length)
    return Result(name, n_blocks, hits, trace.n_tokens)
