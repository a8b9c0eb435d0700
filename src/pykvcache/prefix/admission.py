"""What a closing sequence can store: its cells, its logits, and the states that were saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pykvcache.prefix.match import Match, Offer
from pykvcache.prefix.memory import Buffer, CacheMemory
from pykvcache.prefix.node import EndState, Kind
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import CheckpointPolicy

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import Request

__all__ = ["BlockCheckpoints", "LiveCells"]


@dataclass(frozen=True)
class BlockCheckpoints(CheckpointPolicy):
    """Checkpoints where prompts are likely to resume.

    States are saved after the last full block of each prompt, and 1, 3, 7, 15... blocks before it.
    """

    block_size: int = 64
    needs_state: bool = False
    n_window: int = 1 << 31  # a prompt of at most this many tokens keeps all its window cells

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
        offer.ends = sorted({request.report.n_tokens, *request.boundaries})
        if not self.memory.shape.is_plain:
            seq_id, points = self.cells.ledger.seq_id, self.cells.points
            windows = [*points.covered(), *self.memory.windows(seq_id)]
            offer.windows = [(first, min(last, n)) for first, last in windows if first < n]
            offer.states = {one.n: EndState(one.state) for one in points.states if one.n <= n}
            is_missing = n not in offer.states and not match.end_at(n).has_state
            if self.memory.shape.needs_state and is_missing and n == self.cells.n_held:
                offer.states[n] = EndState(self.memory.read_state(seq_id))
        if keep_logits:
            for at in {n, request.report.n_tokens}:
                if at <= n and (row := request.row_at(at)) is not None:
                    state = offer.states.get(at, EndState()).state
                    offer.states[at] = EndState(state, row.copy())
        return offer
