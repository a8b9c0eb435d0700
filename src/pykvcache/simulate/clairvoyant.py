"""The bound: what a cache could find that knew the future."""

from __future__ import annotations

import numpy as np

from pykvcache._integers import as_int
from pykvcache._native.shadows import most_hits as _most_hits
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
    if not trace.prompts:
        return Result(BOUND, n_blocks, 0, 0)
    ids = np.ascontiguousarray(np.concatenate(trace.prompts), np.uint32)
    sizes = np.array([len(prompt) for prompt in trace.prompts], np.int64)
    lengths = np.array(trace.lengths, np.int64)
    room = min(n_blocks, len(ids))
    hits = _most_hits(ids, sizes, lengths, trace.block_size, room)
    return Result(BOUND, n_blocks, hits, trace.n_tokens)
