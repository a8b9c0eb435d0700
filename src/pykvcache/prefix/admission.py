"""What a cache takes over of a sequence that closes: all that is missing, as far as it fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pykvcache.errors import KvCacheError
from pykvcache.prefix.block_cache import Actions, BlockCache
from pykvcache.prefix.match import Match
from pykvcache.prefix.memory import Buffer, CacheMemory
from pykvcache.prefix.node import Component, EndState, Kind
from pykvcache.prefix.tree import Offer
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import CheckpointPolicy

__all__ = ["BlockCheckpoints", "LiveCells", "Source", "admit"]

Row = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BlockCheckpoints(CheckpointPolicy):
    """Checkpoints where a prefix cache can use them.

    Attributes
    ----------
    block_size
        Tokens per block.
    needs_state
        Whether states are taken: after the last full block of each prompt, and 1, 3, 7, 15...
        blocks before, where prompts are likely to part.
    n_window
        Window cells of the context: of a prompt that is not longer none are lost before its end.
    """

    block_size: int = 64
    needs_state: bool = False
    n_window: int = 1 << 31

    @property
    def chunk(self) -> int:
        """Tokens per chunk of window cells."""
        return self.block_size

    def next_stop(self, begin: int, end: int) -> int:
        """Where to pause an evaluation: every ``spacing`` tokens, and denser towards the end."""
        if not self.max_bytes or (not self.needs_state and end <= self.n_window):
            return end
        block = self.block_size
        stops = [super().next_stop(begin, end) // block * block]
        if self.needs_state:
            n_blocks = end // block
            before = (n_blocks - 2**k + 1 for k in range(n_blocks.bit_length() + 1))
            stops += [block * n for n in before]
        return min([n for n in stops if begin < n < end], default=end)


class Source(Protocol):
    """Where the cells of inserted components come from."""

    def read(self, kind: Kind, begin: int, sizes: Sequence[int]) -> list[Buffer]:
        """Return the cells of consecutive chunks; raises `KvCacheError` where they are missing."""


class LiveCells:
    """The cells of a sequence that has an id, and what was taken while it was evaluated.

    Parameters
    ----------
    memory
        Of the cache.
    cells
        Of the sequence.
    """

    def __init__(self, memory: CacheMemory, cells: SequenceCells) -> None:
        self._memory, self._cells = memory, cells

    def read(self, kind: Kind, begin: int, sizes: Sequence[int]) -> list[Buffer]:
        """Return cells of chunks; window cells that were taken before are shared."""
        if kind is Kind.ATTENTION:
            return self._memory.read(kind, self._cells.live_id, begin, sizes)
        found: list[Buffer] = []
        for size in sizes:
            chunks = self._cells.window_cells(begin, begin + size)
            found.append(self._memory.join(kind, chunks))
            begin += size
        return found

    def offer(
        self,
        n: int,
        match: Match,
        *,
        ends: Iterable[int],
        row: Row | None = None,
        priority: int = 0,
    ) -> Offer:
        """Return what the sequence can give of its first n tokens.

        Parameters
        ----------
        n
            Tokens that it holds as a fresh run would.
        match
            What is known of them: a state that is known is not taken again.
        ends
            Where prompts are likely to go on.
        row
            The logits after n tokens, where they are kept.
        priority
            Of the sequence.
        """
        cells, points = self._cells, self._cells.points
        windows = [(first, min(last, n)) for first, last in points.covered() if first < n]
        windows += self._memory.windows(cells.live_id, n)
        states = {one.n: EndState(one.state) for one in points.states if one.n <= n}
        if self._memory.shape.needs_state and n not in states and n == cells.n_held:
            known = match.end_at(n)
            if known is None or not known.has_state:
                states[n] = EndState(self._memory.read_state(cells.live_id))
        rows = {n: row} if row is not None else {}
        if points.row is not None and points.row[0] <= n:
            rows.setdefault(*points.row)
        for at, logits in rows.items():
            state = states.get(at, EndState()).state
            states[at] = EndState(state, logits.copy())
        places = sorted({end for end in ends if 0 < end < n})
        return Offer(n, windows, states, places, priority)


def admit(
    blocks: BlockCache,
    source: Source,
    tokens: bytes,
    namespace: str,
    offer: Offer,
    actions: Actions,
    owner: object | None = None,
) -> None:
    """Store what is missing of an offer; within a change. What cannot be read is not stored.

    Parameters
    ----------
    blocks
        Where to store it.
    source
        Where its cells come from.
    tokens, namespace
        Whose cells they are.
    offer
        What there is.
    actions
        Takes what was done.
    owner
        What holds it from now on, all of it, even above the budget; None where it may leave.
    """
    plan = blocks.plan(tokens, offer, namespace, is_limited=owner is None)
    if plan is None:
        return
    holes = blocks.insert(tokens, plan, namespace, actions, owner)
    try:
        for one in holes:
            _fill(one, source)
    except (KvCacheError, MemoryError):
        blocks.abandon(holes, actions)


def _fill(one: Component, source: Source) -> None:
    """Read the chunks of a component that are None, which come first."""
    n = one.n_missing
    one.chunks[:n] = source.read(one.kind, one.start, one.sizes[:n])
