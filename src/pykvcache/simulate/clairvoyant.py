"""The bound: what a cache could find that knew the future."""

from __future__ import annotations

import heapq

from pykvcache._arguments import as_int
from pykvcache.simulate.replay import Result
from pykvcache.simulate.traces import Trace, check_trace

__all__ = ["BOUND", "most_hits"]

#: Its name in tables.
BOUND = "bound"


def most_hits(trace: Trace, n_blocks: int) -> Result:
    """Return what Belady's rule finds, adapted to trees: no policy finds more blocks.

    After each prompt the blocks stay that are used soonest, of those there and the prompt's own; a
    block may be declined. A block is used whenever one after it is, so among equals the deeper ones
    leave first, and what stays is a tree.

    Parameters
    ----------
    trace
        The prompts.
    n_blocks
        Size of the cache.
    """
    check_trace(trace)
    n_blocks = as_int(n_blocks, "n_blocks", 0)
    uses = _next_uses(trace)
    kept: dict[int, int] = {}  # block: the prompt that uses it next
    # The latest next use first, of those the deepest; entries that are out of date are skipped.
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
    """Return, for each block of each prompt, the prompt that uses it next; None for none."""
    seen: dict[int, int] = {}
    found: list[list[int | None]] = []
    for at in range(len(trace.prompts) - 1, -1, -1):
        blocks = trace.prompts[at].tolist()
        found.append([seen.get(block) for block in blocks])
        seen.update(dict.fromkeys(blocks, at))
    return found[::-1]
