"""Put together what memory and tiers have of a prompt; damaged blocks are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykvcache._native import lib
from pykvcache.errors import KvCacheError, NoKvCacheSlot
from pykvcache.prefix.pieces import Block, cut
from pykvcache.prefix.tiers.ends import End
from pykvcache.prefix.tiers.fetch import Fetch
from pykvcache.prefix.tiers.tier import Tier

__all__ = ["Gathered", "gather", "is_good", "rest_of"]


@dataclass
class Gathered:
    """A beginning of a prompt that the memory can be made to hold.

    Attributes
    ----------
    n
        How many tokens.
    blocks
        All of their blocks, and the cells after the last full one.
    loaded
        Of these, the full ones out of tiers, and where each is from.
    end, end_tier
        What stands beside them; None where nothing does, or is needed.
    rest
        The state of other parts in it.
    """

    n: int
    blocks: list[Block]
    loaded: list[tuple[Block, Tier]]
    end: End | None = None
    end_tier: Tier | None = None
    rest: lib.Partial | None = None

    @property
    def n_loaded(self) -> int:
        """Tokens out of tiers."""
        return sum(block[2] for block, _ in self.loaded) + (self.end.n_cells if self.end else 0)

    def count(self, medium: str) -> int:
        """Return how many tokens come from tiers of that medium."""
        n = sum(block[2] for block, tier in self.loaded if tier.medium == medium)
        if self.end is not None and self.end_tier is not None and self.end_tier.medium == medium:
            n += self.end.n_cells
        return n


def gather(
    native: lib.Context, fetch: Fetch, front: Sequence[Block], n_front: int
) -> Gathered | None:
    """Put together what is there and what has come; None where that is nothing more.

    Parameters
    ----------
    native
        Whose memory it is for; nothing is put into it.
    fetch
        What has come, or is still coming.
    front
        What is there; a block may be in several pieces, or all of it in one.
    n_front
        How many full blocks that is.
    """
    wanted = fetch.wanted
    size = wanted.block_size
    rest = rest_of(native, fetch) if wanted.needs_rest else None
    with fetch.lock:
        last, found = fetch.reach(n_front), fetch.end
        if wanted.needs_rest:
            place = found[0] // size if found is not None and rest is not None else last + 1
            if place > last or (place < n_front and len(front) < n_front):
                return None
            last = place
        elif found is not None and found[0] // size != last:
            found = None
        come = [fetch.blocks[i] for i in range(n_front, last)]
    front = cut(front, last * size) if last < n_front else front
    n_front = min(n_front, last)
    loaded = [((np.frombuffer(data, np.uint8), size, size), tier) for data, tier in come]
    end = found[1] if found is not None else None
    tail = [(end.cells, end.n_cells, end.n_cells)] if end is not None and end.n_cells else []
    try:
        n_good = _n_good(native, fetch, n_front, front, loaded, tail, rest)
    except NoKvCacheSlot:
        return None  # more than this memory can hold
    if n_good < len(loaded) + len(tail):
        if wanted.needs_rest:
            return None
        del loaded[n_good:]
        end, tail, found = None, [], None
    n = (n_front + len(loaded)) * size + (end.n_cells if end is not None else 0)
    if not loaded and end is None:
        return None
    return Gathered(
        n,
        [*front, *(block for block, _ in loaded), *tail],
        loaded,
        end,
        found[3] if found is not None else None,
        rest,
    )


def rest_of(native: lib.Context, fetch: Fetch) -> lib.Partial | None:
    """Return the state of other parts in the end of a search; one that is wrong is removed."""
    with fetch.lock:
        found = fetch.end
    if found is None or found[1].rest is None:
        return None
    _, end, key, tier = found
    assert end.rest is not None
    try:
        return native.make_partial_state(end.rest, end.first, end.pos)
    except (KvCacheError, ValueError, OverflowError):
        with fetch.lock:
            fetch.end = None
        tier.discard([key], refused=True)
        return None


def _n_good(
    native: lib.Context,
    fetch: Fetch,
    n_front: int,
    front: Sequence[Block],
    loaded: list[tuple[Block, Tier]],
    tail: list[Block],
    rest: lib.Partial | None,
) -> int:
    """Return how many of the new blocks, tail included, the memory may have; remove the others."""
    new = [*(block for block, _ in loaded), *tail]
    try:
        # The search has looked at the values.
        given = [*front, *new] if rest is not None else new
        native.check_blocks_and_rest(given, rest, known_values=True)
        return len(new)
    except NoKvCacheSlot:
        raise
    except KvCacheError:
        good = [is_good(native, block, rest) for block in new]
    names = fetch.wanted.names
    for i, (is_right, (_, tier)) in enumerate(zip(good, loaded, strict=False)):
        if not is_right:
            tier.discard([names[n_front + i]], refused=True)
            with fetch.lock:
                fetch.blocks.pop(n_front + i, None)
    if tail and not good[-1] and fetch.end is not None:
        fetch.end[3].discard([fetch.end[2]], refused=True)
        with fetch.lock:
            fetch.end = None
    return good.index(False) if False in good else 0


def is_good(native: lib.Context, block: Block, rest: lib.Partial | None) -> bool:
    """Whether the memory may have a block of a search; ``rest``: beside which state of others."""
    try:
        native.check_blocks_and_rest([block], rest, known_values=True)
    except NoKvCacheSlot:
        return True
    except KvCacheError:
        return False
    return True
