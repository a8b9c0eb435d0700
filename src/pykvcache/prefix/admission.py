"""Stores the tokens of a closed sequence that the cache lacks, as many as fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pykvcache.errors import KvCacheError
from pykvcache.prefix.block_cache import BlockCache
from pykvcache.prefix.match import Match, Offer
from pykvcache.prefix.memory import Buffer, CacheMemory
from pykvcache.prefix.node import EndState, Kind
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import CheckpointPolicy

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import Request
    from pykvcache.prefix.tier_link import TierLink

__all__ = ["Admission", "BlockCheckpoints", "LiveCells", "Source", "admit"]


@dataclass(frozen=True)
class BlockCheckpoints(CheckpointPolicy):
    """Checkpoints where prompts are likely to resume.

    Attributes
    ----------
    needs_state
        Whether states are saved: after the last full block of each prompt, and 1, 3, 7, 15...
        blocks before it.
    n_window
        Number of window cells of the context. A prompt of at most this many tokens keeps all its
        window cells until its end.
    """

    block_size: int = 64
    needs_state: bool = False
    n_window: int = 1 << 31

    @property
    def chunk(self) -> int:
        """Tokens per chunk of window cells."""
        return self.block_size

    def next_stop(self, begin: int, end: int) -> int:
        """Return where to pause next: every ``spacing`` tokens, and more often near the end."""
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
    """Provides the cells of inserted components."""

    def read(self, kind: Kind, begin: int, sizes: Sequence[int]) -> list[Buffer]:
        """Return the cells of consecutive chunks; raise `KvCacheError` if some are missing."""


@dataclass(frozen=True)
class LiveCells:
    """The cells of a sequence with an id, and the checkpoints of its evaluation."""

    memory: CacheMemory
    cells: SequenceCells

    def read(self, kind: Kind, begin: int, sizes: Sequence[int]) -> list[Buffer]:
        """Return the cells of consecutive chunks; window cells of checkpoints are shared."""
        if kind is Kind.ATTENTION:
            return self.memory.read(kind, self.cells.ledger.seq_id, begin, sizes)
        found: list[Buffer] = []
        for size in sizes:
            chunks = self.cells.window_cells(begin, begin + size)
            found.append(self.memory.join(kind, chunks))
            begin += size
        return found

    def offer(self, n: int, match: Match, request: Request, *, keep_logits: bool) -> Offer:
        """Return what the sequence can store for its first n tokens.

        Their cells must equal those of a fresh run. States that the tree has are not copied again.
        """
        offer = Offer(n, priority=request.priority)
        places = {request.report.n_tokens, *request.boundaries}
        offer.ends = sorted(places)
        if not self.memory.shape.is_plain:
            self._offer_more(offer, match)
        if keep_logits:
            for at in {n, request.report.n_tokens}:
                if at <= n and (row := request.row_at(at)) is not None:
                    state = offer.states.get(at, EndState()).state
                    offer.states[at] = EndState(state, row.copy())
        return offer

    def _offer_more(self, offer: Offer, match: Match) -> None:
        """Add the available window cells and states to an offer."""
        cells, points, n = self.cells, self.cells.points, offer.n
        offer.windows = [(first, min(last, n)) for first, last in points.covered() if first < n]
        offer.windows += self.memory.windows(cells.ledger.seq_id, n)
        offer.states = {one.n: EndState(one.state) for one in points.states if one.n <= n}
        is_missing = n not in offer.states and not match.end_at(n).has_state
        if self.memory.shape.needs_state and is_missing and n == cells.n_held:
            offer.states[n] = EndState(self.memory.read_state(cells.ledger.seq_id))


class Admission:
    """Stores evaluated tokens in RAM and in the tiers; the caller holds the lock."""

    def __init__(
        self, memory: CacheMemory, blocks: BlockCache, link: TierLink, keep_logits: bool
    ) -> None:
        self._memory, self._blocks, self._link = memory, blocks, link
        self._keep_logits = keep_logits

    def give(self, request: Request, *, is_last: bool = True) -> None:
        """Store the new tokens of a request; release its hold if its sequence is closing."""
        cells, blocks, keep = request.cells, self._blocks, request.keep
        n = cells.n_fresh
        if keep is not None:
            n = min(n, keep)
        wants = n > 0 and (blocks.max_bytes > 0 or self._link.has_tiers)
        source = self._source(request, n) if wants else None
        states: dict[int, EndState] = {}
        with blocks.change():
            n = min(n, cells.n_fresh)  # parked cells may have been lost
            if source is not None and n:
                tokens = cells.ledger.part(0, n).tobytes()
                match = blocks.tree.match(tokens, request.space)
                offer = source.offer(n, match, request, keep_logits=self._keep_logits)
                if blocks.max_bytes:
                    admit(blocks, source, tokens, match, request.space, offer)
                states = offer.states
            if wants and n and self._link.has_tiers:
                tokens = cells.ledger.part(0, n).tobytes()
                ends = {at for at in (request.report.n_tokens, *request.boundaries, n) if at <= n}
                self._link.write(tokens, request.space, ends, source, states, request.report)
            if is_last and self._link.has_tiers:
                self._use(request, n if wants else 0)
            if is_last:
                blocks.release(request)

    def _use(self, request: Request, n: int) -> None:
        """Refresh, in the tiers, restored tokens that this request does not store again."""
        report = request.report
        restored = min(report.ram + report.disk + report.remote, request.cells.n_fresh)
        if restored > n:
            tokens = request.cells.ledger.part(0, restored).tobytes()
            self._link.write(tokens, request.space, {restored}, None, {})

    def _source(self, request: Request, n: int) -> LiveCells | None:
        """Return the source of a request's cells; None if RAM has them or they are unreadable."""
        cells = request.cells
        if cells.seq_id is None:
            tokens = cells.ledger.part(0, n).tobytes()
            match = self._blocks.tree.match(tokens, request.space)
            if self._blocks.tree.resume(match, n).n == n:
                return None
        try:
            cells.attach()
        except (KvCacheError, MemoryError):
            return None  # it is not stored, and no error is raised
        return LiveCells(self._memory, cells)


def admit(
    blocks: BlockCache,
    source: Source,
    tokens: bytes,
    match: Match,
    space: str,
    offer: Offer,
    owner: object | None = None,
) -> None:
    """Store the missing part of an offer, within a change. Unreadable cells are not stored.

    If ``owner`` is given, it holds everything that is stored, even above the budget.
    """
    plan = blocks.tree.plan(match, offer, is_limited=owner is None)
    if plan is None:
        return
    holes = blocks.insert(tokens, plan, match, space, owner)
    try:
        for one in holes:
            n = one.n_missing
            one.chunks[:n] = source.read(one.kind, one.start, one.sizes[:n])
    except (KvCacheError, MemoryError):
        blocks.abandon(holes, owner)
