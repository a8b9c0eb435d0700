"""Parking idle sequences, as soon as keeping them has cost as much as parking would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from pykvcache.context import LlamaContext
from pykvcache.errors import UnsupportedOperation
from pykvcache.sequence.member import Member

__all__ = ["IdleCost"]

#: llama.cpp attends over multiples of so many cells: fewer cost nothing.
PADDING = 256

#: A decode reads all cells up to the highest one. Taking a sequence out and putting it back
#: copies its cells four times, plus what the calls cost: about this many steps' worth.
STEPS = 16


class IdleCost:
    """Counts the steps that idle sequences slow down, and parks them when that pays.

    The ski-rental rule: waiting until that has cost as much as leaving costs at most twice what
    knowing the future would.
    """

    __slots__ = ("_last", "_steps")

    def __init__(self) -> None:
        self._steps = 0
        self._last: int | None = None

    def is_due(self, running: tuple[Member, ...]) -> bool:
        """Count one decode by those who run; whether to look for idle ones now."""
        first = running[0].seq_id if len(running) == 1 else None
        self._steps = self._steps + 1 if first == self._last else 1
        self._last = first
        if self._steps < STEPS:
            return False
        self._steps = 0
        return True

    @staticmethod
    def leave(
        ctx: LlamaContext,
        running: tuple[Member, ...],
        idle_members: Callable[[tuple[Member, ...]], Iterable[Member]],
    ) -> None:
        """Park the idle ones where that pays.

        Parameters
        ----------
        ctx
            The context that decoded.
        running
            Those who took part.
        idle_members
            Gives those who can be parked, except the ones it is called with.
        """
        if not ctx.kv_unified or ctx.memory_kind == "recurrent":
            return
        # Without anybody to park, who holds which cell need not be known.
        candidates = list(idle_members(running))
        if candidates:
            members = ctx.cells().members
            busy = members[:, [c.seq_id for c in running if c.seq_id is not None]].any(axis=1)
            if int((~busy).sum()) >= PADDING:
                for cells in candidates:
                    assert cells.seq_id is not None
                    if int((members[:, cells.seq_id] & ~busy).sum()):
                        cells.park()
        if ctx.native.n_cells_spanned - ctx.n_cells_used >= PADDING:
            # Where cells cannot move (a plain build), decodes are slower, and as right.
            with suppress(UnsupportedOperation):
                ctx.kv_cache_compact()
