"""Replay a trace with one policy and one size."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache._arguments import as_int
from pykvcache.prefix.match import Offer
from pykvcache.prefix.node import MemoryShape
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import PrefixTree
from pykvcache.simulate.traces import Trace, check_trace

__all__ = ["Result", "replay"]


@dataclass(frozen=True)
class Result:
    """The result of a replay.

    Attributes
    ----------
    policy : str
        Name of the policy.
    n_blocks : int
        Size of the cache in blocks.
    hit_tokens, n_tokens : int
        Prompt tokens that hit the cache, and all prompt tokens.
    """

    policy: str
    n_blocks: int
    hit_tokens: int
    n_tokens: int

    @property
    def hit_rate(self) -> float:
        """Fraction of prompt tokens that hit the cache."""
        return self.hit_tokens / self.n_tokens if self.n_tokens else 0.0


def replay(trace: Trace, policy: str | Policy, n_blocks: int) -> Result:
    """Replay a trace's prompts one after the other through a cache of `n_blocks` blocks.

    Answers are not modelled: a prompt stores its own blocks, and the next prompt can hit all but
    a partial last one.

    Parameters
    ----------
    trace
        The prompts.
    policy
        A name, or a new policy object.
    n_blocks
        Size of the cache in blocks.
    """
    check_trace(trace)
    n_blocks = as_int(n_blocks, "n_blocks", 0)
    name = policy if isinstance(policy, str) else type(policy).__name__
    # In this tree an id is a token, and a block has one token and one byte.
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
