"""One trace, one policy, one size: how many of the tokens were there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pykvcache._integers import as_int
from pykvcache._native.shadows import POLICIES as SHADOWS
from pykvcache._native.shadows import Shadow
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import BlockTree
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
        A name, which is replayed in C++, or a new object, which is asked as the cache asks it; of
        one class both find the same.
    n_blocks
        Size of the cache.
    """
    check_trace(trace)
    n_blocks = as_int(n_blocks, "n_blocks", 0)
    name = policy if isinstance(policy, str) else type(policy).__name__
    send = _sender(policy, n_blocks)
    hits = 0
    for ids, length in zip(trace.prompts, trace.lengths, strict=True):
        hits += min(send(ids.tobytes()) * trace.block_size, length)
    return Result(name, n_blocks, hits, trace.n_tokens)


def _sender(policy: str | Policy, n_blocks: int) -> Callable[[bytes], int]:
    """Return what sends a prompt to a cache, and says how many of its blocks were there."""
    # One id is one token of the tree, a block has one of them, and takes one byte.
    if isinstance(policy, str) and policy in SHADOWS:
        shadow = Shadow(policy, n_blocks)
        return lambda tokens: shadow.send(tokens, 1)
    tree = BlockTree(1, policy, max_bytes=n_blocks)

    def send(tokens: bytes) -> int:
        match = tree.lookup(tokens)
        tree.extend(match.run, tokens[4 * match.n_blocks :], 1)
        return match.n_blocks

    return send
