"""What a context's memory holds of one LlamaSequence: lending, rewinding, evaluating, parking."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache._ranges import Range, deepest
from pykvcache.errors import (
    NoKvCacheSlot,
    PartialStateError,
    PositionError,
    StateError,
    UnsupportedOperation,
)
from pykvcache.sequence.checkpoints import CheckpointPolicy, Checkpoints, WindowChunk
from pykvcache.sequence.ledger import Ledger
from pykvcache.sequence.pool import SequencePool, Stage

__all__ = ["PutBack", "SequenceCells", "check_length", "least_cut"]

Row = npt.NDArray[np.float32]
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class PutBack:
    """What is kept of a parked sequence.

    Attributes
    ----------
    put
        Called with an id, it makes the memory hold the sequence there.
    least
        To how many tokens a window of it can be cut, or more; to fewer the cells are missing.
    """

    put: Callable[[int], object]
    least: int


class Twins:
    """Sequences that hold the same: a fork and its origin, until one of them changes.

    The state is kept by those that are parked, not here.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: Callable[[], PutBack | None] = lambda: None

    def is_parked_with(self, state: PutBack) -> bool:
        """Whether this is the state of those that are parked."""
        return self._state() is state

    def state(self, take_out: Callable[[], PutBack]) -> PutBack:
        """Return the state of those that are parked, or take it out for the first of them."""
        known = self._state()
        if known is None:
            known = take_out()
            self._state = weakref.ref(known)
        return known


class SequenceCells:
    """A ledger, and the cells or the saved state that follow it. The pool's lock is held.

    Live: it has an id, and the memory holds ``ledger.n_held`` tokens under it. Parked: it has
    none, and `state` is what the memory held. Neither: nothing was evaluated yet.
    """

    def __init__(
        self,
        pool: SequencePool,
        ledger: Ledger,
        policy: CheckpointPolicy,
        points: Checkpoints | None = None,
    ) -> None:
        self.pool = pool
        self.ledger = ledger
        self.policy = policy
        self.points = Checkpoints() if points is None else points
        self.seq_id: int | None = None
        self.state: PutBack | None = None
        self._row: tuple[int, Row] | None = None
        self.pins = 0
        self.branches: set[int] = set()  # where others went another way: places for checkpoints
        self.stage: Stage | None = None
        self._twins: tuple[tuple[int, int], Twins] | None = None  # and what they hold by name
        self._native = pool.native
        self.needs_points = self._native.has_rest
        self._has_state, self._has_window = self._native.has_state_part, self._native.has_window
        pool.join(self)

    @property
    def n_held(self) -> int:
        """Tokens that the memory or the saved state holds."""
        return self.ledger.n_held

    @property
    def row(self) -> Row | None:
        """Logits after the last token; an edit of the tokens forgets them."""
        row = self._row
        return row[1] if row is not None and row[0] == self.ledger.edits else None

    @row.setter
    def row(self, row: Row | None) -> None:
        self._row = None if row is None else (self.ledger.edits, row)

    @property
    def is_pinned(self) -> bool:
        """Whether it takes part in what runs now, and cannot be parked."""
        return self.pins > 0 or (self.stage is not None and self.stage.is_on)

    # Coming and going -----------------------------------------------------------------------

    def attach(self) -> int:
        """Make the sequence live, and what it holds certain; return its id."""
        if self.seq_id is None:
            self._own(self.pool.need_id(self))
            if self.state is not None:
                self._unpark(self.state)
            else:
                self._emptied()
        else:
            self.pool.touch(self.seq_id)
        self._verify()
        return self.ledger.seq_id

    def _own(self, seq_id: int) -> None:
        self.seq_id = self.ledger.seq_id = seq_id

    def _disown(self) -> None:
        self.pool.take_back(self.ledger.seq_id)
        self.seq_id, self.ledger.seq_id = None, -1

    def _unpark(self, state: PutBack) -> None:
        try:
            self.with_room(partial(state.put, self.ledger.seq_id))
        except BaseException:
            self._disown()
            raise
        self.state = None
        self.note()
        if self._twins is not None and self._twins[1].is_parked_with(state):
            self._be_twin(self._twins[1])

    def park(self) -> None:
        """Leave the cells and keep the state; what has no state is evaluated again later."""
        if self.seq_id is None:
            return
        self._verify()
        self.trim()
        if self.n_held:
            try:
                self.state = self.twins.state(self._taken_out)
            except UnsupportedOperation:
                self._emptied()
        self._disown()

    def _taken_out(self) -> PutBack:
        return _taken_out(self._native, self.ledger.seq_id, self.n_held)

    @property
    def twins(self) -> Twins:
        """Those that hold the same as this one; it is live, and was verified just now."""
        name = self.ledger.version, self.n_held
        if self._twins is None or self._twins[0] != name:
            self._twins = name, Twins()
        return self._twins[1]

    def _be_twin(self, twins: Twins) -> None:
        self._twins = (self.ledger.version, self.n_held), twins

    def release(self) -> None:
        """Free everything; the ledger stays."""
        self.state = self._row = None
        self.points = Checkpoints()
        if self.seq_id is not None:
            self._disown()
        self._emptied()

    # What is certain --------------------------------------------------------------------------

    def note(self) -> None:
        """Remember what the memory holds now, to find out later whether others changed it."""
        self.ledger.version = self._native.prefix_version(self.ledger.seq_id)

    def _verify(self) -> None:
        """Drop what was changed by hand, or lost when a decode of another sequence failed."""
        n, last = self.ledger.n_held, self._native.seq_pos(self.ledger.seq_id, True)
        # A decode that was stopped leaves states behind that no position shows.
        is_cut = self.needs_points and self._native.needs_removal(self.ledger.seq_id)
        if n and self._native.holds_prefix(self.ledger.seq_id, self.ledger.version):
            is_whole = self._go_back(self.ledger.n_evaluated) if is_cut else last == n - 1
            if is_whole or (
                last >= n and not is_cut and self._native.seq_rm(self.ledger.seq_id, n, None)
            ):
                return
        if n or last >= 0 or is_cut:
            self._restart()

    def _restart(self) -> None:
        """Begin again with an empty memory."""
        self._native.seq_rm(self.ledger.seq_id, None, None)
        self._emptied()

    def _emptied(self) -> None:
        self.ledger.holds(0)
        self.ledger.shifted_at = None
        if self.needs_points or self.points.row is not None:
            self.points.drop_after(0)  # other tokens may take their place

    # Rewinding --------------------------------------------------------------------------------

    def trim(self) -> bool:
        """Give cells back that hold tokens of the past, where the memory can; tell whether."""
        if self.seq_id is None or not len(self.ledger.stale):
            return False
        self._verify()
        n = self.ledger.n_evaluated
        if n == 0:
            self._restart()
        elif not self._native.seq_rm(self.ledger.seq_id, n, None):
            return False
        self._holds(n)
        return True

    def rewind(self, n: int) -> None:
        """Make the memory hold the first n evaluated tokens, or fewer where it cannot."""
        if n == self.ledger.n_held and self._native.can_resume(self.ledger.seq_id, n):
            return
        if n == 0:
            self._restart()
        elif self._native.can_resume(self.ledger.seq_id, n) and self._native.seq_rm(
            self.ledger.seq_id, n, None
        ):
            self._holds(n)
        elif not self._go_back(n):
            self._restart()

    def _go_back(self, n: int) -> bool:
        """Go back to the deepest checkpoint that lies at n tokens or before."""
        while n := self._kept(n):
            try:
                self.with_room(partial(self._put_back, n))
            except (PartialStateError, UnsupportedOperation, NoKvCacheSlot):
                n -= 1
            else:
                self._holds(n)
                return True
        return False

    def _windows(self) -> list[Range]:
        """Return the tokens whose window cells are in the memory or in checkpoints."""
        if not self._has_window:
            return []
        held = [] if self.seq_id is None else [self._native.window_range(self.seq_id)]
        return [*self.points.covered(), *held]

    def _kept(self, n: int) -> int:
        """Return the most tokens up to n that checkpoints let the sequence go back to."""
        return deepest(
            n,
            self._windows(),
            [point.n for point in self.points.states],
            window_start=self._native.window_needed if self._has_window else None,
            needs_state=self._has_state,
        )

    def _put_back(self, n: int) -> None:
        """Make the memory hold the first n tokens, out of its own cells and of checkpoints."""
        native, seq_id = self._native, self.ledger.seq_id
        attention: list[tuple[npt.NDArray[np.uint8], int, int]] = []
        cell = native.block_bytes()
        if cell or self._has_window:
            cells = np.empty(n * cell, np.uint8)
            if cell and not native.get_block(seq_id, 0, n, cells):
                raise PartialStateError("the attention cells are not all there", seq_id, n - 1)
            attention.append((cells, n, n))
        first = native.window_needed(n)
        window = self.window_cells(first, n) if self._has_window else None
        state = self.points.state_at(n)
        native.set_blocks(seq_id, attention, window, first, state, known_values=True)

    def window_cells(self, begin: int, end: int) -> list[tuple[npt.NDArray[np.uint8], int, int]]:
        """Return the window cells of some tokens, out of checkpoints and of the memory.

        Each chunk as bytes, how many cells they are, and how many of these count.

        Raises
        ------
        PartialStateError
            They are not all there.
        """
        found, native = [], self._native
        layout = native.block_layout("window")
        for chunk in [*self.points.window_chunks(begin, end), None]:
            until = end if chunk is None else min(end, chunk.first)
            if begin < until:
                cells = np.empty((until - begin) * layout.cell_bytes, np.uint8)
                size = until - begin
                if not native.get_block(self.ledger.seq_id, begin, size, cells, "window"):
                    raise PartialStateError("window cells are missing", self.ledger.seq_id, begin)
                found.append((cells, size, size))
                begin = until
            if chunk is None or begin >= end:
                break
            cells, skipped = chunk.cells, begin - chunk.first
            used = min(chunk.end, end) - begin
            if skipped:
                cells = np.empty(used * layout.cell_bytes, np.uint8)
                layout.copy_cells(chunk.cells, skipped, used, cells, 0)
            found.append((cells, used if skipped else chunk.n, used))
            begin += used
        return found

    def reachable(self, n: int) -> int:
        """Return how many of its first n tokens a fork holds without evaluating."""
        if not self.needs_points or n == self.n_held:
            return n
        if self.seq_id is None:
            # A state can be cut as far as its window reaches.
            if self.state is not None and not self._has_state and n >= self.state.least:
                return n
        elif self._native.can_resume(self.seq_id, n):
            return n
        return self._kept(n)

    @property
    def n_fresh(self) -> int:
        """How many evaluated tokens are what a fresh run makes of them: all, before a shift."""
        n = self.ledger.n_evaluated
        return n if self.ledger.shifted_at is None else min(n, self.ledger.shifted_at)

    def _holds(self, n: int) -> None:
        self.ledger.holds(n)
        if self.ledger.shifted_at is not None and n <= self.ledger.shifted_at:
            self.ledger.shifted_at = None
        self.points.drop_after(n)
        if self.seq_id is not None:
            self.note()

    # Dropping tokens out of the middle -----------------------------------------------------------

    def discard(self, begin: int, end: int) -> None:
        """Drop held tokens and move those after them down; UnsupportedOperation changes nothing."""
        native = self._native
        try:
            native.remove(self.ledger.seq_id, begin, end)
        except UnsupportedOperation:
            if not (native.can_shift() and self._is_shared() and self._is_whole_in_state()):
                raise
            # Shared cells cannot be moved: out and in again, they are its own.
            self.park()
            self.attach()
            native.remove(self.ledger.seq_id, begin, end)
        self.points.drop_after(begin)
        ledger = self.ledger
        at = ledger.shifted_at
        ledger.shifted_at = begin if at is None else min(begin, at)
        ledger.n_evaluated -= end - begin
        ledger.delete(begin, end)
        self.note()

    def _is_shared(self) -> bool:
        members = self.pool.ctx.cells().members
        mine = members[members[:, self.seq_id]]
        return bool((mine.sum(axis=1) > 1).any())

    def _is_whole_in_state(self) -> bool:
        """Whether a state has all of its cells: of a window it has what the next token sees."""
        try:
            self._native.state_size(self.ledger.seq_id)
        except UnsupportedOperation:
            return False
        is_attention = self._native.memory_kind == "attention"
        return is_attention or self.n_held <= self.pool.ctx.model.n_swa

    # Evaluating -------------------------------------------------------------------------------

    def evaluate(self, *, want_row: bool) -> Row | None:
        """Compute what is pending; with `want_row` the logits after the last token."""
        ledger = self.ledger
        n = len(ledger)
        if n > self.pool.most_tokens:
            check_length(self.pool, n)
        if ledger.n_evaluated == n and (not want_row or self.row is not None):
            return self.row
        self._begin(n, want_row)
        is_prompt = n - ledger.n_evaluated > 1
        begin, began = ledger.n_evaluated, time.perf_counter()
        while ledger.n_evaluated < n:
            is_part = self.needs_points and is_prompt
            end = self.next_stop(n) if is_part else n
            if not self._decode(end, want_row and end == n):
                self._begin(n, want_row)  # it was changed by hand meanwhile
            elif is_part:
                self.checkpoint()
        if want_row:  # without them nobody has waited for the end of the computation
            self.pool.note_time(begin, n, time.perf_counter() - began)
        return self.row

    def _begin(self, n: int, want_row: bool) -> None:
        self.attach()
        # Logits are made by a decode: the last token is decoded again where all are held.
        self.rewind(min(self.ledger.n_evaluated, n - 1) if want_row else self.ledger.n_evaluated)

    def _decode(self, end: int, want_row: bool) -> bool:
        """Decode up to a token; False, and nothing done, where the cells are not what was noted."""

        def run() -> tuple[bool, Row | None]:
            try:
                return self._native.decode_pending(self.ledger, self.ledger.seq_id, end, want_row)
            except BaseException:
                self.failed()
                raise

        self._row = None
        done, row = self.with_room(run)
        self.row = row
        if done:
            self.pool.count_step((self,))
        return done

    def failed(self) -> None:
        """After a decode that failed: the ledger knows what is held, checkpoints beyond go."""
        self.points.drop_after(self.ledger.n_evaluated)

    def with_room(self, call: Callable[[], _T]) -> _T:
        """Call, and park an idle sequence whenever there is no room."""
        self.pins += 1
        try:
            while True:
                try:
                    return call()
                except NoKvCacheSlot:
                    if not self.pool.make_room(self):
                        raise
        finally:
            self.pins -= 1

    def next_stop(self, end: int) -> int:
        """Where to pause an evaluation up to ``end``, to take a checkpoint there."""
        begin = self.ledger.n_evaluated
        stop = self.policy.next_stop(begin, end)
        return min([n for n in self.branches if begin < n < stop], default=stop)

    def checkpoint(self) -> None:
        """Keep the part of the memory that cannot be rewound, where there is such a part."""
        if not self.needs_points or not self.policy.max_bytes or self.seq_id is None:
            return
        if len(self.ledger.stale) or not self.n_held:
            return
        native = self._native
        try:
            if self._has_state:
                state = native.get_state_part(self.ledger.seq_id)
                if state.nbytes <= self.policy.max_bytes:
                    self.points.add_state(self.n_held, state)
            if self._has_window:
                self._take_window()
        except (UnsupportedOperation, StateError):
            return
        self.pool.fit_checkpoints(self.policy.max_bytes)

    def _take_window(self) -> None:
        """Keep window cells that the memory will drop, as far as they are not kept yet."""
        native, size = self._native, self.policy.chunk
        begin, end = native.window_range(self.ledger.seq_id)
        # Of those before the last kept ones a budget has let some go.
        begin = max([begin, *(last for _, last in self.points.covered())])
        cell = native.block_bytes("window")
        while begin < end:
            n = min(end, begin - begin % size + size) - begin
            cells = np.empty(n * cell, np.uint8)
            if native.get_block(self.ledger.seq_id, begin, n, cells, "window"):
                cells.setflags(write=False)
                self.points.add_window(WindowChunk(begin, n, n, cells))
            begin += n

    # Other cells ------------------------------------------------------------------------------

    def fork_into(self, child: SequenceCells, n: int) -> None:
        """Let a new sequence begin with what this one holds of the first n tokens."""
        held = min(n, self.ledger.n_evaluated)
        if held and self.seq_id is not None:
            self._verify()
            held = min(n, self.ledger.n_evaluated)
        if not held:
            return
        child.ledger.shifted_at = self.ledger.shifted_at
        if self.seq_id is not None:
            if n == self.n_held:
                self.checkpoint()
            self.pins += 1
            try:
                seq_id = self.pool.lend(child)
            finally:
                self.pins -= 1
            if seq_id is not None:
                child._own(seq_id)
                self._copy_to(child, held)
                child.points = self.points.up_to(child.n_held)
                if child.ledger.shifted_at is not None and child.n_held <= child.ledger.shifted_at:
                    child.ledger.shifted_at = None
                return
            try:
                child.state = self.twins.state(self._taken_out)
            except UnsupportedOperation:
                return  # evaluated again
        else:
            child.state = self.state
        child.points = self.points.up_to(self.n_held)
        child.ledger.n_evaluated = held
        child.ledger.stale = self._beyond(held)

    def _copy_to(self, child: SequenceCells, n: int) -> None:
        whole = n == self.n_held
        try:
            if whole:
                self._native.seq_cp(self.ledger.seq_id, child.ledger.seq_id, None, None, "fork")
            else:
                self._native.copy_prefix(self.ledger.seq_id, child.ledger.seq_id, n)
            child.ledger.n_evaluated = n
        except UnsupportedOperation:
            # Parts cannot be copied: all of it, to be rewound when it is used.
            if whole or (
                not self.reachable(n) and not self.pool.ctx.memory_info.can_remove_partial
            ):
                child._restart()
                return
            self._native.seq_cp(self.ledger.seq_id, child.ledger.seq_id, None, None, "fork")
            child.ledger.n_evaluated = n
            child.ledger.stale = self._beyond(n)
        child.note()
        if whole:
            child._be_twin(self.twins)

    def _beyond(self, n: int) -> npt.NDArray[np.int32]:
        """Return the tokens that the memory holds after the first n."""
        own = self.ledger.part(n, self.ledger.n_evaluated)
        return np.concatenate([own, self.ledger.stale])


def least_cut(n: int, n_swa: int) -> int:
    """Return to how many of n tokens a window can be cut that has all that its last token saw."""
    return 1 if n <= n_swa else n - 1


def _taken_out(native: lib.Context, seq_id: int, n: int) -> PutBack:
    """Return what puts a sequence of n tokens back; of a window, with all that a rewind may need.

    A memory without a known layout takes back its own sequences only.
    """
    if not native.has_layout:
        state = native.get_state_part(seq_id)
        return PutBack(lambda dst: native.set_blocks(dst, [], state=state), n)
    least = n
    if native.has_window and not native.has_state_part:
        least = min(n, max(1, native.least_cut(native.spare_begin(seq_id))))
    data = native.get_state(seq_id, None, spare=True)
    return PutBack(lambda dst: native.set_state(dst, [data], None), least)


def check_length(pool: SequencePool, n: int) -> None:
    """Refuse what could not be evaluated if it were alone, before anybody leaves for it."""
    if n <= pool.most_tokens:
        return
    ctx = pool.ctx
    if ctx.memory_kind == "recurrent" or n <= ctx.n_ctx_seq:
        last = ctx.max_position
        raise PositionError(
            f"the sequence has {n} tokens, and the highest position of this model is {last}: "
            "truncate or discard some",
            what="n_tokens",
            value=n - 1,
            limit=last,
        )
    why = f"n_ctx is {ctx.n_ctx}, always a multiple of 256"
    if ctx.n_ctx_seq < ctx.n_ctx:
        why += f", n_seq_max {ctx.n_seq_max} without kv_unified"
    raise NoKvCacheSlot(
        f"the sequence has {n} tokens, and one sequence has room for {ctx.n_ctx_seq} ({why}): "
        'truncate or discard some, let LlamaSequence.generate(on_full="shift") do so, or make the '
        "context with a larger n_ctx",
        1,
        n_tokens=n,
        n_cells=ctx.n_ctx_seq,
    )
