"""Dropping tokens out of the middle of what a memory holds."""

from __future__ import annotations

from pykvcache.errors import UnsupportedOperation
from pykvcache.sequence.cells import SequenceCells

__all__ = ["discard"]


def discard(cells: SequenceCells, begin: int, end: int) -> None:
    """Drop held tokens and move those after them down; UnsupportedOperation changes nothing.

    The sequence is live, and the pool's lock is held.
    """
    ctx = cells.pool.ctx
    native = ctx.native
    try:
        native.remove(cells.live_id, begin, end)
    except UnsupportedOperation:
        if not (native.can_shift() and _is_shared(cells) and _is_whole_in_state(cells)):
            raise
        # Shared cells cannot be moved: out and in again, they are its own.
        cells.park()
        cells.attach()
        native.remove(cells.live_id, begin, end)
    cells.points.drop_after(begin)
    at = cells.ledger.shifted_at
    cells.ledger.shifted_at = begin if at is None else min(begin, at)


def _is_shared(cells: SequenceCells) -> bool:
    members = cells.pool.ctx.cells().members
    mine = members[members[:, cells.seq_id]]
    return bool((mine.sum(axis=1) > 1).any())


def _is_whole_in_state(cells: SequenceCells) -> bool:
    """Whether a state has all of its cells: of a window it has what the next token sees."""
    ctx = cells.pool.ctx
    try:
        ctx.native.state_size(cells.live_id)
    except UnsupportedOperation:
        return False
    return ctx.native.memory_kind == "attention" or cells.n_held <= ctx.model.n_swa
