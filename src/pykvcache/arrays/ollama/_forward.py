"""How a forward pass begins in a cache of cells: all of it, or nothing."""

from __future__ import annotations

from pykvcache.arrays.ollama._batch import Batch
from pykvcache.arrays.ollama._cell_mask import batch_mask
from pykvcache.arrays.ollama._cells import Before, Write, commit
from pykvcache.arrays.ollama._placement import find_room, needed_cells
from pykvcache.arrays.ollama._setup import Pass, Setup

__all__ = ["Start"]


class Start:
    """One ``start_forward``, and how to take it back.

    Where the cells need not be defragmented they are changed in place, and `undo` knows what
    they were. Otherwise a copy of their table is changed, which takes the place of the old one
    once the data has followed.

    Parameters
    ----------
    setup : Setup
        The cache as it is.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._ids: list[int] = []
        self._before: Before | None = None
        self._overwritten: list[Write] = []

    def run(self, batch: Batch, reserve: bool, window: int, chunk: int) -> tuple[Setup, Pass]:
        """Slide the window, find cells for the batch and build its mask.

        Returns
        -------
        setup, pass
            What the cache is to have from now on.

        Raises
        ------
        KvCacheFull
            Too few cells are free.
        CacheValueError
            No array is large enough for the mask.
        """
        setup, n, moves = self._setup, len(batch), None
        cells, start, low, high = setup.cells, 0, 0, setup.cells.size - 1
        if not reserve:
            place = find_room(cells, batch, setup.memory)
            if place.start is None:
                cells = cells.copy()
                cells.expire(place.losing, place.expired)
                moves = cells.compact()
                # Once defragmented, the free cells follow those in use.
                start = cells.in_use
            else:
                start, self._ids = place.start, batch.ids
                cells.own_rows(batch.ids)
                self._before = cells.before(batch, start, place.losing, place.expired)
                cells.expire(place.losing, place.expired)
            low, high = needed_cells(cells, batch, window, setup.memory)
            cells.claim(start, batch)
            low, high = min(low, start), max(high, start + n - 1)
        padding = setup.config.cache_padding
        history = slice(low // padding * padding, -(-(high + 1) // padding) * padding)
        mask = batch_mask(cells, batch, history, frozenset(), window, chunk, setup.config)
        if moves is not None:
            dst, src = moves
            # Cells that the window gives up still belong to somebody if this is taken back.
            self._overwritten = setup.store.held(dst[setup.cells.refs[dst] > 0])
            setup.store.move(dst, src)
        slot = slice(start, start + n)
        return setup._replace(cells=cells), Pass(batch, reserve, slot, history, frozenset(), mask)

    def undo(self) -> None:
        """Make cells and data what they were before `run`, however far it came."""
        cells = self._setup.cells
        if self._before is not None:
            cells.restore(self._before)
        for seq in self._ids:
            cells.forget(seq)
        commit(self._overwritten)
