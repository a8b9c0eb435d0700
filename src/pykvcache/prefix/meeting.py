"""Loading from the back while a sequence is evaluated from the front, until they meet."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pykvcache._native import lib
from pykvcache.errors import KvCacheError
from pykvcache.prefix.gather import Gathered, gather
from pykvcache.prefix.pieces import Block, cut
from pykvcache.prefix.tiers.fetch import Fetch
from pykvcache.prefix.tiers.rule import next_part
from pykvcache.prefix.tiers.speeds import EvaluationTime
from pykvcache.prefix.tiers.stack import Tiers
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import Checkpoint
from pykvcache.sequence.ledger import common_prefix

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["Meeting"]


class Owner(Protocol):
    """What a meeting needs of its `PrefixCache`."""

    _evaluation: EvaluationTime
    _tiers: Tiers

    def _account_met(self, sequence: CachedSequence, got: Gathered, placed: int) -> None:
        """Say in the reports how many tokens came from tiers."""


class Meeting:
    """What is still coming for one sequence; asked before each part that is evaluated.

    The pool's lock is held. Nothing here raises because of what came, or did not.

    Parameters
    ----------
    owner
        The cache.
    sequence
        What is evaluated.
    fetch
        What comes.
    may_lose
        For how many seconds at most the evaluation may be cut in parts.
    """

    def __init__(
        self, owner: Owner, sequence: CachedSequence, fetch: Fetch, may_lose: float
    ) -> None:
        self._owner = owner
        self._sequence = weakref.ref(sequence)
        self._fetch = fetch
        self._may_lose = may_lose
        self._cut = 0, 0.0  # up to where the next part goes, and what it loses

    def cancel(self) -> None:
        """End the search: the sequence has changed, and needs it no longer."""
        self._fetch.cancel()

    def meet(self, cells: SequenceCells) -> int | None:
        """Put what has come where it belongs.

        The sequence is live, and holds nothing beyond what counts as evaluated.

        Returns
        -------
        int or None
            Up to where to evaluate before asking again; None where nothing more is to come.
        """
        fetch, ledger = self._fetch, cells.ledger
        size = fetch.wanted.block_size
        at = ledger.n_evaluated
        if at == self._cut[0]:
            self._may_lose -= self._cut[1]
            self._gain(cells, -self._cut[1])
        is_done = fetch.done.is_set()
        same = self._common(cells)
        if ledger.shifted_at is not None or same - at < 2:
            self._over(cells)
            return None
        fetch.front = front = at // size
        with fetch.lock:
            reach = fetch.reach(front)
            later = min((i for i in fetch.blocks if i > front), default=None)
            is_end = fetch.end is not None and fetch.end[0] > at and reach == fetch.n_blocks
        if reach > front or (is_done and is_end):
            self._join(cells, same)
            at = ledger.n_evaluated
            if not is_done or later is not None:
                return self._next(cells, same, later, is_done=is_done)
        if is_done and (later is None or later * size <= at):
            self._over(cells)
            return None
        return self._next(cells, same, later, is_done=is_done)

    def _over(self, cells: SequenceCells) -> None:
        cells.incoming = None
        self._fetch.cancel()

    def _common(self, cells: SequenceCells) -> int:
        """Return how many tokens of the search are still those of the sequence."""
        wanted = np.frombuffer(self._fetch.wanted.tokens, "<u4").astype(np.int32)
        return common_prefix(cells.ledger.part(0, len(cells.ledger)), wanted)

    def _next(self, cells: SequenceCells, same: int, later: int | None, *, is_done: bool) -> int:
        at, fetch, time = cells.ledger.n_evaluated, self._fetch, self._owner._evaluation
        end = same
        if later is not None and later * fetch.wanted.block_size > at:
            end = min(end, later * fetch.wanted.block_size)
        if is_done:
            return max(end, at + 1)
        part, loss = next_part(
            end - at,
            time.seconds(at, end),
            fetch.left if fetch.looked.is_set() else math.inf,  # perhaps nothing is there
            cells.pool.ctx.n_ubatch,
            time.cut,
            self._may_lose,
        )
        self._cut = at + part, loss
        return at + part

    def _gain(self, cells: SequenceCells, seconds: float) -> None:
        evaluation = self._owner._evaluation.seconds(0, len(cells.ledger))
        self._owner._tiers.savings.gain(evaluation, seconds)

    def _join(self, cells: SequenceCells, same: int) -> None:
        """Put evaluated cells and those that came together, in place."""
        fetch, native = self._fetch, cells.pool.ctx.native
        at = cells.ledger.n_evaluated
        front = at // fetch.wanted.block_size
        try:
            mine = self._front(native, cells, front * fetch.wanted.block_size)
            got = gather(native, fetch, mine, front)
            if got is None:
                return
            # The last token is evaluated in any case: its logits are wanted.
            n = min(got.n, same, len(cells.ledger) - 1)
            if n <= at or (n < got.n and fetch.wanted.needs_rest):
                return
            blocks, rest = cut(got.blocks, n), got.rest
            # Blocks were looked at when they came, or were taken out.
            cells.with_room(
                lambda: native.set_blocks_and_rest(cells.live_id, blocks, rest, known_values=True)
            )
        except (KvCacheError, MemoryError):
            self._over(cells)  # nothing was changed
            return
        cells.row = None
        cells._holds(n)
        if rest is not None:
            cells.points.add(Checkpoint(n, rest))
        sequence = self._sequence()
        self._gain(cells, self._owner._evaluation.seconds(at, n))
        if sequence is not None:
            self._owner._account_met(sequence, got, n - at)

    @staticmethod
    def _front(native: lib.Context, cells: SequenceCells, n: int) -> list[Block]:
        if not n:
            return []
        buffer = np.empty(native.block_bytes() * n, np.uint8)
        if len(buffer) and not native.get_block(cells.live_id, 0, n, buffer):
            return []
        return [(buffer, n, n)]
