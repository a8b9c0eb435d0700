"""The sequence ids of a context, lent to LlamaSequences; who has to leave when it is full."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from pykvcache._fork import watch_forks, watch_locks
from pykvcache._native import lib
from pykvcache._threads import take
from pykvcache.context import LlamaContext
from pykvcache.errors import InternalError, NoKvCacheSlot
from pykvcache.sequence.checkpoints import Checkpoint, WindowChunk
from pykvcache.sequence.idle import IdleCost
from pykvcache.sequence.member import Member

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SequencePool", "pool_of"]


class SequencePool(lib.Turns):
    """Lends the ids of one context, least recently used first back; one per context.

    Everything that touches a LlamaSequence takes a turn (``with pool``). Ids that hold something
    and were not lent are being used by hand, and are left alone.
    """

    def __init__(self, ctx: LlamaContext) -> None:
        self._ctx = weakref.ref(ctx)
        self.watch(ctx.native)
        # Who has which id; who was used last stands last.
        self._lent: OrderedDict[int, weakref.ref[Member]] = OrderedDict()
        # All that exist, parked ones too.
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._idle = IdleCost()
        #: Called with the first token, the end and the seconds of each evaluation.
        self.note_time: Callable[[int, int, float], None] = lambda begin, end, seconds: None
        watch_forks(self)

    def _after_fork(self) -> None:
        self.renew()

    @property
    def ctx(self) -> LlamaContext:
        """The context; it outlives its sequences, which hold it."""
        ctx = self._ctx()
        assert ctx is not None
        return ctx

    def hold(self) -> Self:
        """Take a turn; ids of sequences that were dropped meanwhile are free then."""
        return self

    @property
    def is_quiet(self) -> bool:
        """Whether nobody is in the middle of something; asked with the lock held."""
        return self.depth == 0

    def join(self, cells: Member) -> None:
        """Take note of a new sequence."""
        self._members.add(cells)

    # Ids ----------------------------------------------------------------------------------

    def lend(self, cells: Member, keep: tuple[Member, ...] = ()) -> int | None:
        """Give a sequence an id, parking whom was used longest ago if need be; or None.

        Parameters
        ----------
        cells
            Who gets it.
        keep
            Who must not be parked for it.
        """
        seq_id = self._free_id()
        if seq_id is None and self._bury():
            seq_id = self._free_id()
        if seq_id is None:
            victim = next(self.idle_members((cells, *keep)), None)
            if victim is None:
                return None
            victim.park()
            seq_id = self._free_id()
            if seq_id is None:
                return None
        self._lent[seq_id] = weakref.ref(cells)
        return seq_id

    def need_id(self, cells: Member) -> int:
        """As `lend`, but raise where it cannot be."""
        seq_id = self.lend(cells)
        if seq_id is None:
            raise NoKvCacheSlot(
                f"no sequence id is free: {self.ctx.n_seq_max} exist, and those that are in use "
                "cannot be parked",
                1,
                n_seq_max=self.ctx.n_seq_max,
            )
        return seq_id

    def clear(self, seq_id: int) -> None:
        """Free what an id holds; after an InternalError all is cleared before anything is used."""
        with contextlib.suppress(InternalError):
            self.ctx.native.seq_rm(seq_id, None, None)

    def give_back(self, seq_id: int) -> None:
        """Take an id back; its cells are gone already."""
        self._lent.pop(seq_id, None)

    def touch(self, seq_id: int) -> None:
        """Take note that a sequence is used now."""
        self._lent.move_to_end(seq_id)

    def touch_all(self, members: Iterable[Member]) -> None:
        """Take note that live sequences are used now, the last of them last."""
        lent = self._lent
        for cells in members:
            assert cells.seq_id is not None
            lent.move_to_end(cells.seq_id)

    def _free_id(self) -> int | None:
        # From above: who works by hand begins at 0.
        ctx = self.ctx
        for seq_id in range(ctx.n_seq_max - 1, -1, -1):
            if not self._is_lent(seq_id) and ctx.native.seq_pos(seq_id, True) < 0:
                return seq_id
        return None

    def _is_lent(self, seq_id: int) -> bool:
        """Whether a sequence has an id; one that was interrupted while taking it does not."""
        ref = self._lent.get(seq_id)
        cells = None if ref is None else ref()
        return ref is not None and (cells is None or cells.seq_id == seq_id)

    def idle_members(self, keep: tuple[Member, ...] = ()) -> Iterator[Member]:
        """Yield who could be parked, least recently used first."""
        for ref in list(self._lent.values()):
            cells = ref()
            if cells is None or cells.seq_id is None or cells in keep or cells.is_pinned:
                continue
            yield cells

    def count_step(self, running: tuple[Member, ...]) -> None:
        """Count a decode by those who run: who is idle is parked where staying costs more."""
        if self._idle.is_due(running):
            self._idle.leave(self.ctx, running, self.idle_members)

    # Room ---------------------------------------------------------------------------------

    def make_room(self, cells: Member) -> bool:
        """Free cells that are not needed now; False if nobody has any to give."""
        if not self.ctx.kv_unified:
            return False  # a stream of cells is its sequence's own
        if self._bury():
            return True
        for other in self.idle_members((cells,)):
            if other.trim():
                return True
        for other in self.idle_members((cells,)):
            if other.n_held:
                other.park()
                return True
        return False

    # Checkpoints --------------------------------------------------------------------------

    def fit_checkpoints(self, max_bytes: int) -> None:
        """Drop checkpoints until they fit: those first that save the least evaluation."""
        while self.checkpoint_bytes() > max_bytes and self._forget_checkpoint():
            pass

    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints, those that forks share once."""
        known = {id(x.state if isinstance(x, Checkpoint) else x.cells): x for x in self._points()}
        return sum(point.nbytes for point in known.values())

    def _points(self) -> Iterator[Checkpoint | WindowChunk]:
        for cells in self._members:
            yield from cells.points

    def _forget_checkpoint(self) -> bool:
        """Forget one: window cells before a sequence's last window, then a state."""
        points = [cells.points for cells in self._members]
        longest = max((one.windows for one in points), key=len, default=[])
        if longest and longest[0].end <= longest[-1].end - 2 * self.ctx.model.n_swa:
            victim: Checkpoint | WindowChunk = longest[0]
        elif found := [gap for one in points for gap in one.gaps()]:
            victim = min(found, key=lambda one: one[0])[1]
        elif (last := next(self._points(), None)) is not None:
            victim = last
        else:
            return False
        for one in points:
            one.remove(victim)
        return True

    # Dropped sequences ----------------------------------------------------------------------

    def lending(self, seq_id: int) -> object:
        """Return what tells this lending of an id from later ones."""
        return self._lent.get(seq_id)

    def drop(self, seq_id: int, lending: object) -> None:
        """Free what a collected sequence held; may be called in the middle of anything.

        Or late: another thread may have found that it is gone, and lent its id again.
        """
        self.dropped.append((seq_id, lending))
        taken: list[bool] = []
        try:
            if take(self.lock, taken) and not self.depth:
                self.reap()
        finally:
            if True in taken:
                self.lock.release()

    def _bury(self) -> bool:
        """Free what collected sequences held whose `drop` was interrupted; tell whether any did."""
        lost = [one for one in self._lent.items() if one[1]() is None and one not in self.dropped]
        self.dropped.extend(lost)
        self.reap()
        return bool(lost)

    def reap(self) -> None:
        """Free the cells and ids of collected sequences."""
        while self.dropped:
            seq_id, lending = self.dropped[0]
            ctx = self._ctx()
            if lending is None or self._lent.get(seq_id) is not lending:
                self.dropped.popleft()
                continue
            if ctx is not None and not ctx.is_closed:
                try:
                    ctx.clear_kv_cache_seq(seq_id)
                except RuntimeError:
                    return  # inside a callback of this context, or a broken one: next time
            self._lent.pop(seq_id, None)
            self.dropped.popleft()


_pools: weakref.WeakKeyDictionary[LlamaContext, SequencePool] = weakref.WeakKeyDictionary()
_pools_lock = threading.Lock()
watch_locks(sys.modules[__name__], "_pools_lock")


def pool_of(ctx: LlamaContext) -> SequencePool:
    """Return the one pool of a context."""
    with _pools_lock:
        pool = _pools.get(ctx)
        if pool is None:
            pool = _pools[ctx] = SequencePool(ctx)
        return pool
