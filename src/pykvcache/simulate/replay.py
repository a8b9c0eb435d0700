"""Replay a trace with one policy and one size, or with knowledge of the future."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from pykvcache._arguments import as_int
from pykvcache.prefix.node import MemoryShape, Offer
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.tree import PrefixTree
from pykvcache.simulate.traces import Trace, check_trace

__all__ = ["BOUND", "Result", "most_hits", "replay"]

#: Name of the upper bound in tables.
BOUND = "bound"


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

    Answers are not modelled: a prompt stores its own blocks, and later prompts can hit all of them
    except a partial last one.

    Parameters
    ----------
    trace
        The prompts.
    policy
        A name, or a policy object that no cache has used.
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


def most_hits(trace: Trace, n_blocks: int) -> Result:
    """Replay with Belady's rule, adapted to trees: no policy finds more blocks.

    After each prompt the cache keeps the blocks with the nearest next use, among those cached and
    the prompt's own, so a new block may be refused. A use of a block is also a use of the blocks
    before it; among blocks with the same next use the deepest is evicted first, so the cached
    blocks form a tree.

    Parameters
    ----------
    trace
        The prompts.
    n_blocks
        Size of the cache in blocks.
    """
    check_trace(trace)
    n_blocks = as_int(n_blocks, "n_blocks", 0)
    uses = _next_uses(trace)
    kept: dict[int, int] = {}  # block: next prompt that uses it
    # Latest next use first, then deepest; stale entries are skipped.
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for ids, length, following in zip(trace.prompts, trace.lengths, uses, strict=True):
        blocks = ids.tolist()
        found = next((i for i, block in enumerate(blocks) if block not in kept), len(blocks))
        hits += min(found * trace.block_size, length)
        for depth, (block, when) in enumerate(zip(blocks, following, strict=True)):
            if when is None:
                kept.pop(block, None)
            else:
                kept[block] = when
                heapq.heappush(farthest, (-when, -depth, block))
        while len(kept) > n_blocks:
            when, _, block = heapq.heappop(farthest)
            if kept.get(block) == -when:
                del kept[block]
    return Result(BOUND, n_blocks, hits, trace.n_tokens)


def _next_uses(trace: Trace) -> list[list[int | None]]:
    """Return, for each block of each prompt, the next prompt that uses it; None if none does."""
    seen: dict[int, int] = {}
    found: list[list[int | None]] = []
    for at in range(len(trace.prompts) - 1, -1, -1):
        blocks = trace.prompts[at].tolist()
        found.append([seen.get(block) for block in blocks])
        seen.update(dict.fromkeys(blocks, at))
    return found[::-1]
