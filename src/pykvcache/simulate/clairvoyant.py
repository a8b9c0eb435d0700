"""Upper bound: the hit rate of a cache that knows the future."""

from __future__ import annotations

import heapq

from pykvcache._arguments import as_int
from pykvcache.simulate.replay import Result
from pykvcache.simulate.traces import Trace, check_trace

__all__ = ["BOUND", "most_hits"]

#: Its name in tables.
BOUND = "bound"


def most_hits(trace: Trace, n_blocks: int) -> Result:
    """Replay with Belady's rule, adapted to trees: no policy finds more blocks.

    After each prompt, of the cached blocks and the prompt's own, the blocks that are used soonest
    stay; a new block may be refused. A block is used whenever a later one is, so of equals the
    deepest are evicted first, and the cached blocks form a tree.

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
    """Return the next prompt that uses it, for each block of each prompt; None if none does."""
    seen: dict[int, int] = {}
    found: list[list[int | None]] = []
    for at in range(len(trace.prompts) - 1, -1, -1):
        blocks = trace.prompts[at].tolist()
        found.append([seen.get(block) for block in blocks])
        seen.update(dict.fromkeys(blocks, at))
    return found[::-1]
