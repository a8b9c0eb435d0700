"""What a cache keeps of a sequence that is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.errors import KvCacheError, UnsupportedOperation
from pykvcache.prefix.blocks import token_bytes
from pykvcache.prefix.buffers import BufferPool
from pykvcache.prefix.ram import Buffer, RamTier, Tail
from pykvcache.prefix.tiers.stack import Tiers
from pykvcache.sequence.cells import Row, SequenceCells
from pykvcache.sequence.checkpoints import Checkpoint

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["KeepMethods"]


class _Same:
    """Raises where a sequence is not what it was: a policy that is asked may call anything."""

    def __init__(self, cells: SequenceCells) -> None:
        self._cells = cells
        self._was = self._facts()

    def _facts(self) -> tuple[object, ...]:
        cells, ledger = self._cells, self._cells.ledger
        return cells.seq_id, ledger.n_evaluated, ledger.n_held, len(ledger), ledger.version

    def check(self) -> None:
        """Raise `UnsupportedOperation` if anything has changed: nothing more is kept."""
        if self._facts() != self._was:
            raise UnsupportedOperation("PrefixCache", "a policy has changed the sequence")


class KeepMethods:
    """Taking blocks and checkpoints out; part of `PrefixCache`. The pool's lock is held."""

    _ctx: LlamaContext
    _native: lib.Context
    _ram: RamTier
    _tiers: Tiers
    _buffers: BufferPool
    _block_size: int
    _cell_bytes: int
    _needs_rest: bool
    _keep_logits: bool

    def _write_down(self, sequence: CachedSequence, n: int) -> None:
        """Give the first n tokens to the tiers; `TierMethods` does."""

    def _keep(self, sequence: CachedSequence) -> None:
        cells, space = sequence._cells, sequence._namespace
        n = cells.n_fresh
        if not n or not (self._ram.max_bytes or len(self._tiers)):
            return
        try:
            if cells.seq_id is None and self._is_known(cells, n, space):
                self._write_down(sequence, n)
                return
            cells.attach()
            cells.rewind(min(n, cells.ledger.n_evaluated))
            n = min(n, cells.n_fresh)
            self._point_at_end(cells, n)
            if n and self._ram.max_bytes:
                self._keep_blocks(cells, n, space)
            self._write_down(sequence, n)
            self._buffers.trim(self._ram.max_bytes - self._ram.nbytes)
        except (KvCacheError, MemoryError):
            return  # a cache that cannot keep something goes without it

    def _point_at_end(self, cells: SequenceCells, n: int) -> None:
        """Take the state after a last block that is full, where no tail would bring it."""
        if self._needs_rest and n and n % self._block_size == 0 and n == cells.n_held:
            point = cells.points.at_most(n)
            if point is None or point.n < n:
                state = self._native.get_partial_state(cells.live_id)
                cells.points.add(Checkpoint(n, state))

    def _is_known(self, cells: SequenceCells, n: int, space: str) -> bool:
        """Whether everything that a parked sequence holds is stored already."""
        tokens = token_bytes(cells.ledger.part(0, n).view(np.uint32))
        return self._ram.find(tokens, space, needs_rest=self._needs_rest, is_use=False).n >= n

    def _keep_blocks(self, cells: SequenceCells, n: int, space: str) -> None:
        tokens = token_bytes(cells.ledger.part(0, n).view(np.uint32))
        size = self._block_size
        full = n // size * size
        is_plain = not (self._needs_rest or self._keep_logits)
        same = _Same(cells)

        def read(first: int, n_blocks: int, n_tail: int, skip: int) -> list[Buffer]:
            same.check()
            return self._take_out(cells.live_id, first, n_blocks, n_tail, skip)

        known = tokens if is_plain else tokens[: 4 * full]
        self._ram.add(known, space, self._cell_bytes, read, with_tail=is_plain)
        same.check()
        if is_plain:
            return
        before = 0
        for point in list(cells.points):
            if point.n and point.n % size == 0 and point.n <= n:
                self._ram.add_checkpoint(
                    tokens[: 4 * point.n], space, point.state, point.n - before
                )
                before = point.n
        same.check()
        if cells.points.row is not None and (at := cells.points.row[0]) < n:
            self._keep_tail(cells, tokens, at, space)
            same.check()
        if n > full or self._keep_logits:
            self._keep_tail(cells, tokens, n, space)
            same.check()

    def _row_at(self, cells: SequenceCells, n: int) -> Row | None:
        """Return the logits after n tokens, where they are to be kept and known."""
        if not self._keep_logits:
            return None
        if n == len(cells.ledger) and cells.row is not None:
            return cells.row
        row = cells.points.row
        return row[1] if row is not None and row[0] == n else None

    def _keep_tail(self, cells: SequenceCells, tokens: bytes, n: int, space: str) -> None:
        full = n // self._block_size * self._block_size
        rest = None
        if self._needs_rest:
            point = cells.points.at_most(n)
            if point is not None and point.n == n:
                rest = point.state
            elif n == cells.n_held:
                rest = self._native.get_partial_state(cells.live_id)
            else:
                return
        row = self._row_at(cells, n)
        buffer = self._read(cells.live_id, full, n - full)
        text = tokens[4 * full : 4 * n]
        tail = Tail(text, buffer, rest, None if row is None else row.copy())
        self._ram.add_tail(tokens[: 4 * n], space, tail)

    def _read(self, seq_id: int, first: int, n: int) -> Buffer:
        return self._take_out(seq_id, first, 0, n)[0] if n else np.empty(0, np.uint8)

    def _take_out(
        self, seq_id: int, first: int, n_blocks: int, n_tail: int, skip: int = 0
    ) -> list[Buffer]:
        """Copy blocks and the cells after them; each has memory of its own, to be freed alone.

        ``skip``: without so many cells at the beginning.
        """
        size, cell = self._block_size, self._cell_bytes
        if skip:
            n = (size if n_blocks else n_tail) - skip
            begun = [self._buffers.take(cell * n)]
            if not self._native.get_blocks(seq_id, first + skip, n, begun):
                raise _missing()
            begun[0].setflags(write=False)
            if n_blocks:
                begun += self._take_out(seq_id, first + size, n_blocks - 1, n_tail)
            return begun
        found = [self._buffers.take(cell * size) for _ in range(n_blocks)]
        if n_tail:
            found.append(self._buffers.take(cell * n_tail))
        if not found or not self._cell_bytes:
            return found
        if not self._native.get_blocks(seq_id, first, size, found, n_tail or None):
            raise _missing()
        for buffer in found:
            buffer.setflags(write=False)  # its values are not looked at again
        return found


def _missing() -> UnsupportedOperation:
    return UnsupportedOperation("PrefixCache", "the cells of the sequence are not all there")
