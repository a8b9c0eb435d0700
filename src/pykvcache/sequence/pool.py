"""The sequence ids of a context, lent to LlamaSequences; LRU parking when it is full."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.errors import (
    ClosedError,
    InternalError,
    NoKvCacheSlot,
    PositionError,
    UnsupportedOperation,
)

if TYPE_CHECKING:
    from pykvcache.sequence.cells import SequenceCells

__all__ = ["SequencePool", "pool_of"]

#: llama.cpp pads the attended cells to a multiple of this: fewer cells cost the same.
PADDING = 256

#: A decode reads all cells up to the highest one. Parking and restoring a sequence copies its
#: cells four times, plus call overhead: about this many steps' worth.
IDLE_STEPS = 16


class SequencePool(lib.Turns):
    """Lends the ids of one context and reclaims the least recently used; one per context.

    Every operation on a LlamaSequence takes a turn (``with pool``). Ids that hold cells but were
    not lent are in use through the low-level API, and are left alone.
    """

    def __init__(self, ctx: LlamaContext) -> None:
        self._ctx = weakref.ref(ctx)
        self.native, self._n_seq_max = ctx.native, ctx.n_seq_max
        #: Whether all sequences share one set of attention cells.
        self.shares_cells = ctx.kv_unified and ctx.memory_kind != "recurrent"
        #: How many tokens one sequence can have.
        self.most_tokens = ctx.max_position + 1
        if ctx.memory_kind != "recurrent":
            self.most_tokens = min(ctx.n_ctx_seq, self.most_tokens)
        # Owner of each id, least recently used first. Weak: a collected sequence frees its id.
        self._lent: OrderedDict[int, weakref.ref[SequenceCells]] = OrderedDict()
        # All existing sequences, including parked ones.
        self.members: weakref.WeakSet[SequenceCells] = weakref.WeakSet()
        #: What makes a step now; the sequences of this stage are not parked.
        self.stage: object = None
        self._idle_steps = 0
        self._last_alone: int | None = None
        #: Called with the first token, the end and the duration in seconds of each evaluation.
        self.note_time: Callable[[int, int, float], None] = lambda begin, end, seconds: None

    @property
    def ctx(self) -> LlamaContext:
        """The context. Its sequences hold a reference to it, so it outlives them."""
        ctx = self._ctx()
        assert ctx is not None
        return ctx

    def if_quiet(self, call: Callable[[], object]) -> None:
        """Make a call under the lock unless a turn is in progress. For finalizers."""
        if self.lock.acquire(blocking=False):
            try:
                if self.depth == 0:
                    with self:
                        call()
            finally:
                self.lock.release()

    # Ids ----------------------------------------------------------------------------------

    def lend(self, cells: SequenceCells) -> int | None:
        """Lend an id, parking the least recently used sequence if needed; None if impossible."""
        while (seq_id := self._free_id()) is None:
            if self.dropped:
                self.reap()
            elif (victim := next(self.idle_members((cells,)), None)) is not None:
                victim.park()
            else:
                return None
        self._lent[seq_id] = weakref.ref(cells, self.drop)
        return seq_id

    def need_id(self, cells: SequenceCells) -> int:
        """Lend an id as `lend` does, but raise NoKvCacheSlot if impossible."""
        seq_id = self.lend(cells)
        if seq_id is None:
            raise NoKvCacheSlot(
                f"no sequence id is free: all {self.ctx.n_seq_max} are in use, and none of their "
                "sequences can be parked",
                1,
                n_seq_max=self.ctx.n_seq_max,
            )
        return seq_id

    def take_back(self, seq_id: int) -> None:
        """Free the cells of an id, and return it to the pool."""
        # After an InternalError the memory is cleared before its next use.
        with contextlib.suppress(InternalError, ClosedError):
            self.native.seq_rm(seq_id, None, None)
        self._lent.pop(seq_id, None)

    def touch(self, seq_id: int) -> None:
        """Mark a sequence as the most recently used."""
        self._lent.move_to_end(seq_id)

    def touch_all(self, members: Iterable[SequenceCells]) -> None:
        """Mark live sequences as the most recently used, in this order."""
        for cells in members:
            self.touch(cells.ledger.seq_id)

    def _free_id(self) -> int | None:
        # From the top: users of the low-level API start at 0.
        for seq_id in range(self._n_seq_max - 1, -1, -1):
            if seq_id not in self._lent and self.native.seq_pos(seq_id, True) < 0:
                return seq_id
        return None

    def idle_members(self, keep: tuple[SequenceCells, ...]) -> Iterator[SequenceCells]:
        """Yield the other sequences that can be parked, least recently used first."""
        for ref in list(self._lent.values()):
            cells = ref()
            if cells is not None and cells not in keep and not cells.is_pinned:
                yield cells

    # Room ---------------------------------------------------------------------------------

    def check_length(self, n: int) -> None:
        """Raise if n tokens could never fit even alone, before a sequence is parked for them."""
        if n <= self.most_tokens:
            return
        ctx = self.ctx
        if ctx.memory_kind == "recurrent" or n <= ctx.n_ctx_seq:
            last = ctx.max_position
            raise PositionError(
                f"the sequence has {n} tokens, but the highest position of this model is {last}: "
                "truncate or discard some",
                what="n_tokens",
                value=n - 1,
                limit=last,
            )
        why = f"n_ctx is {ctx.n_ctx}, always a multiple of 256"
        if ctx.n_ctx_seq < ctx.n_ctx:
            why += f", n_seq_max {ctx.n_seq_max} without kv_unified"
        raise NoKvCacheSlot(
            f"the sequence has {n} tokens, but one sequence has room for {ctx.n_ctx_seq} ({why}): "
            'truncate or discard some, let LlamaSequence.generate(on_full="shift") do so, or make '
            "the context with a larger n_ctx",
            1,
            n_tokens=n,
            n_cells=ctx.n_ctx_seq,
        )

    def make_room(self, cells: SequenceCells) -> bool:
        """Free cells that are not needed now; return False if no sequence has any to free."""
        if not self.ctx.kv_unified:
            return False  # each sequence has a private stream
        if self.dropped:
            self.reap()
            return True
        for other in self.idle_members((cells,)):
            if other.trim():
                return True
        for other in self.idle_members((cells,)):
            if other.n_held:
                other.park()
                return True
        return False

    def count_step(self, running: tuple[SequenceCells, ...]) -> None:
        """Count a decode; park idle sequences once keeping them has cost as much as parking.

        The ski-rental rule: at most twice the cost of the optimal offline policy.
        """
        alone = running[0].ledger.seq_id if len(running) == 1 else None
        self._idle_steps = self._idle_steps + 1 if alone == self._last_alone else 1
        self._last_alone = alone
        if self._idle_steps >= IDLE_STEPS:
            self._idle_steps = 0
            self._park_idle(running)

    def _park_idle(self, running: tuple[SequenceCells, ...]) -> None:
        ctx = self.ctx
        if not self.shares_cells:
            return
        # Without a candidate, skip the query for the owners of cells.
        candidates = list(self.idle_members(running))
        if candidates:
            members = ctx.cells().members
            busy = members[:, [c.seq_id for c in running if c.seq_id is not None]].any(axis=1)
            if int((~busy).sum()) >= PADDING:
                for cells in candidates:
                    if int((members[:, cells.seq_id] & ~busy).sum()):
                        cells.park()
        if ctx.native.n_cells_spanned - ctx.n_cells_used >= PADDING:
            # Where cells cannot move (a plain build), decodes are slower but still correct.
            with contextlib.suppress(UnsupportedOperation):
                ctx.kv_cache_compact()

    # Dropped sequences ----------------------------------------------------------------------

    def reap(self) -> None:
        """Free the cells and ids of collected sequences."""
        while self.dropped:
            for seq_id in [i for i, ref in self._lent.items() if ref is self.dropped[0]]:
                self.take_back(seq_id)
            self.dropped.popleft()

    def renounce(self) -> None:
        """Treat the cells of all sequences as not evaluated: other adapters computed them."""
        for cells in list(self.members):
            cells.release()
            cells.ledger.set_invocation(self.native.invocation)


_pools: weakref.WeakKeyDictionary[LlamaContext, SequencePool] = weakref.WeakKeyDictionary()


def pool_of(ctx: LlamaContext) -> SequencePool:
    """Return the one pool of a context."""
    pool = _pools.get(ctx)
    return _pools.setdefault(ctx, SequencePool(ctx)) if pool is None else pool
