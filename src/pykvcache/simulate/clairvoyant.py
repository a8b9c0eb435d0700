"""The bound: what a cache could find that knew the future."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from pykvcache._integers import as_int
from pykvcache.simulate.replay import Result
from pykvcache.simulate.traces import Trace, check_trace

__all__ = ["BOUND", "most_hits", "next_uses"]

#: Its name in tables.
BOUND = "bound"


def next_uses(trace: Trace) -> list[NDArray[np.int64]]:
    """Return, for each block of each prompt, the prompt that uses it next; their number if none."""
    sizes = [len(ids) for ids in trace.prompts]
    n = len(sizes)
    if not n:
        return []
    ids = np.concatenate(trace.prompts)
    prompt = np.repeat(np.arange(n), sizes)
    order = np.lexsort((prompt, ids))
    following = np.full(len(ids), n, np.int64)
    same = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][same]] = prompt[order[1:][same]]
    return np.split(following, np.cumsum(sizes)[:-1])


def most_hits(trace: Trace, n_blocks: int) -> Result:
    """Return what Belady's rule finds, adapted to trees: no policy finds more blocks.

    After each prompt the blocks stay that are used soonest, of those there and the prompt's own; a
    block may be declined. A block is used whenever one after it is, so among equals the deeper ones
    leave first, and what stays is a tree.
    """
    check_trace(trace)
    n_blocks = as_int(n_blocks, "n_blocks", 0)
    kept: dict[int, int] = {}  # block: the prompt that uses it next
    # (-next use, -depth, block); outdated entries are skipped when popped.
    farthest: list[tuple[int, int, int]] = []
    hits, never = 0, len(trace.prompts)
    for ids, following, length in zip(trace.prompts, next_uses(trace), trace.lengths, strict=True):
        blocks = ids.tolist()
        found = 0
        while found < len(blocks) and blocks[found] in kept:
            found += 1
        hits += min(found * trace.block_size, length)
        for depth, (block, when) in enumerate(zip(blocks, following.tolist(), strict=True)):
            if when < never:
                kept[block] = when
                heapq.heappush(farthest, (-when, -depth, block))
            else:
                kept.pop(block, None)
        while len(kept) > n_blocks:
            when, _, block = heapq.heappop(farthest)
            if kept.get(block) == -when:
                del kept[block]
    return Result(BOUND, n_blocks, hits, trace.n_tokens)
