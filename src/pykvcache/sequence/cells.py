"""The cells or saved state of a LlamaSequence: attach, rewind, evaluate, park."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import IntArray
from pykvcache._ranges import Range, deepest
from pykvcache.errors import (
    NoKvCacheSlot,
    PartialStateError,
    StateError,
    UnsupportedOperation,
)
from pykvcache.sequence.checkpoints import (
    DEFAULT_POLICY,
    CheckpointPolicy,
    Checkpoints,
    WindowChunk,
    fit,
)
from pykvcache.sequence.ledger import NOTHING, Ledger
from pykvcache.sequence.pool import SequencePool

__all__ = ["PutBack", "SequenceCells"]

Row = npt.NDArray[np.float32]
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class PutBack:
    """The saved state of a parked sequence: `put` restores it under an id.

    The restored sequence can be truncated to `least` tokens; below that, window cells are missing.
    """

    put: Callable[[int], object]
    least: int


class SequenceCells:
    """A ledger, and the cells or saved state behind it. The pool's lock is held.

    Live: the sequence has an id, and the memory holds ``ledger.n_held`` tokens under it. Parked:
    it has no id, and `state` is its saved state. Otherwise nothing was evaluated yet.
    """

    def __init__(
        self,
        pool: SequencePool,
        policy: CheckpointPolicy | None = None,
        tokens: IntArray = NOTHING,
    ) -> None:
        self.pool = pool
        self.ledger = Ledger(tokens)
        self.policy = policy or DEFAULT_POLICY
        self.points = Checkpoints()
        self.state: PutBack | None = None
        self._row: tuple[int, Row] | None = None
        self.pins = 0
        self.branches: set[int] = set()  # points where other prompts diverge: checkpoint candidates
        self.stage: object = None
        # The saved state that equal sequences (a fork and its origin) share while one of them is
        # parked. Keyed by (version, n_held).
        self._twins: tuple[tuple[int, int], weakref.WeakSet[PutBack]] | None = None
        self._native = pool.native
        self.needs_points = self._native.has_rest
        self._has_state, self._has_window = self._native.has_state_part, self._native.has_window
        if self._native.invocation:
            self.ledger.set_invocation(self._native.invocation)
        pool.members.add(self)

    @property
    def seq_id(self) -> int | None:
        """The id in the memory; None while it has none."""
        seq_id = self.ledger.seq_id
        return None if seq_id < 0 else seq_id

    @property
    def n_held(self) -> int:
        """Tokens that the memory or the saved state holds."""
        return self.ledger.n_held

    @property
    def row(self) -> Row | None:
        """Logits after the last token; an edit of the tokens discards them."""
        row = self._row
        return row[1] if row is not None and row[0] == self.ledger.edits else None

    @row.setter
    def row(self, row: Row | None) -> None:
        self._row = None if row is None else (self.ledger.edits, row)

    @property
    def is_pinned(self) -> bool:
        """Whether it takes part in the current step and must not be parked."""
        return self.pins > 0 or (self.stage is not None and self.stage is self.pool.stage)

    # Attach and park ------------------------------------------------------------------------

    def attach(self) -> int:
        """Make the sequence live, verify its cells, and return its id."""
        ledger = self.ledger
        if ledger.seq_id < 0:
            ledger.seq_id = self.pool.need_id(self)
            if self.state is not None:
                self._unpark(self.state)
            else:
                self._emptied()
        else:
            self.pool.touch(ledger.seq_id)
        self._verify()
        return ledger.seq_id

    def _disown(self) -> None:
        self.pool.take_back(self.ledger.seq_id)
        self.ledger.seq_id = -1

    def _unpark(self, state: PutBack) -> None:
        try:
            self.with_room(partial(state.put, self.ledger.seq_id))
        except BaseException:
            self._disown()
            raise
        self.state = None
        self.note()
        if self._twins is not None and state in self._twins[1]:
            self._be_twin(self._twins[1])

    def park(self) -> None:
        """Free the cells and keep the state; without a state, tokens are evaluated again later."""
        if self.seq_id is None:
            return
        self._verify()
        self.trim()
        if self.n_held:
            try:
                self.state = self._shared_state()
            except UnsupportedOperation:
                self._emptied()
        self._disown()

    def _save_state(self) -> PutBack:
        """Save the held tokens; of a window, include all cells that a rewind may need.

        Without a known layout, only the same context can restore it.
        """
        native, seq_id, n = self._native, self.ledger.seq_id, self.n_held
        if not native.has_layout:
            state = native.get_state_part(seq_id)
            return PutBack(lambda dst: native.set_blocks(dst, [], state=state), n)
        least = n
        if self._has_window and not self._has_state:
            least = min(n, max(1, native.least_cut(native.spare_begin(seq_id))))
        data = native.get_state(seq_id, None, spare=True)
        return PutBack(lambda dst: native.set_state(dst, [data], None), least)

    def _shared_state(self) -> PutBack:
        """Return the saved state that equal sequences share; save it if none of them is parked."""
        state = next(iter(self.twins), None)
        if state is None:
            state = self._save_state()
            self.twins.add(state)
        return state

    @property
    def twins(self) -> weakref.WeakSet[PutBack]:
        """The saved state of sequences equal to this one, which is live and verified."""
        name = self.ledger.version, self.n_held
        if self._twins is None or self._twins[0] != name:
            self._twins = name, weakref.WeakSet()
        return self._twins[1]

    def _be_twin(self, twins: weakref.WeakSet[PutBack]) -> None:
        self._twins = (self.ledger.version, self.n_held), twins

    def release(self) -> None:
        """Free everything but the ledger."""
        self.state = self._row = None
        self.points = Checkpoints()
        if self.ledger.seq_id >= 0:
            self._disown()
        self._emptied()

    # Verification -----------------------------------------------------------------------------

    def note(self) -> None:
        """Record the memory's prefix version, to detect changes made outside the sequence."""
        self.ledger.version = self._native.prefix_version(self.ledger.seq_id)

    def _verify(self) -> None:
        """Drop cells that were changed outside, or lost when another sequence's decode failed."""
        n, last = self.ledger.n_held, self._native.seq_pos(self.ledger.seq_id, True)
        # An aborted decode may leave changed states, which positions do not reveal.
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
        """Start over with an empty memory."""
        self._native.seq_rm(self.ledger.seq_id, None, None)
        self._emptied()

    def _emptied(self) -> None:
        self.ledger.holds(0)
        if self.needs_points or self.points.row is not None:
            self.points.drop_after(0)  # other tokens may take their place

    # Rewinding --------------------------------------------------------------------------------

    def trim(self) -> bool:
        """Free the cells of stale tokens if the memory can; return whether it did."""
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
        """Make the memory hold the first n evaluated tokens, or fewer if it cannot."""
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
        """Roll back to the deepest checkpoint at or before n tokens."""
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
        """Return the ranges of tokens with window cells in the memory or in checkpoints."""
        if not self._has_window:
            return []
        held = [] if self.seq_id is None else [self._native.window_range(self.seq_id)]
        return [*self.points.covered(), *held]

    def _kept(self, n: int) -> int:
        """Return the greatest length up to n that checkpoints can restore."""
        return deepest(
            n,
            self._windows(),
            self.points.states,
            window_start=self._native.window_needed if self._has_window else None,
            needs_state=self._has_state,
        )

    def _put_back(self, n: int) -> None:
        """Restore the first n tokens from the memory's own cells and from checkpoints."""
        native, seq_id = self._native, self.ledger.seq_id
        attention: list[tuple[npt.NDArray[np.uint8], int, int]] = []
        cell = native.block_bytes()
        if cell or self._has_window:
            cells = np.empty(n * cell, np.uint8)
            if cell and not native.get_block(seq_id, 0, n, cells):
                raise PartialStateError("attention cells are missing", seq_id, n - 1)
            attention.append((cells, n, n))
        first = native.window_needed(n)
        window = self.window_cells(first, n) if self._has_window else None
        state = self.points.states.get(n)
        native.set_blocks(seq_id, attention, window, first, state, known_values=True)

    def window_cells(self, begin: int, end: int) -> list[tuple[npt.NDArray[np.uint8], int, int]]:
        """Return the window cells of ``[begin, end)``, from checkpoints and the memory.

        Each chunk is a tuple: its bytes, its number of cells, and how many of them are used.

        Raises
        ------
        PartialStateError
            A cell is in neither.
        """
        found, layout = [], self._native.block_layout("window")
        for chunk in self.points.windows:
            first, last = max(begin, chunk.first), min(end, chunk.end)
            if first >= last:
                continue
            if begin < first:
                found.append(self._live_window(begin, first))
            cells, n, used = chunk.cells, chunk.n, last - first
            if first > chunk.first:
                cells, n = np.empty(used * layout.cell_bytes, np.uint8), used
                layout.copy_cells(chunk.cells, first - chunk.first, used, cells, 0)
            found.append((cells, n, used))
            begin = last
        if begin < end:
            found.append(self._live_window(begin, end))
        return found

    def _live_window(self, begin: int, end: int) -> tuple[npt.NDArray[np.uint8], int, int]:
        native, n = self._native, end - begin
        cells = np.empty(n * native.block_bytes("window"), np.uint8)
        if not native.get_block(self.ledger.seq_id, begin, n, cells, "window"):
            raise PartialStateError("window cells are missing", self.ledger.seq_id, begin)
        return cells, n, n

    def reachable(self, n: int) -> int:
        """Return how many of the first n tokens a fork holds without evaluation."""
        if not self.needs_points or n == self.n_held:
            return n
        if self.seq_id is None:
            # A saved state can be truncated as far as its window reaches.
            if self.state is not None and not self._has_state and n >= self.state.least:
                return n
        elif self._native.can_resume(self.seq_id, n):
            return n
        return self._kept(n)

    @property
    def n_fresh(self) -> int:
        """Number of leading tokens whose cells equal a fresh run's without an activated adapter.

        They end where a shift moved tokens, or where the adapter was activated.
        """
        ledger, n = self.ledger, self.ledger.n_evaluated
        if ledger.shifted_at is not None:
            n = min(n, ledger.shifted_at)
        return n if ledger.activated_at < 0 else min(n, ledger.activated_at)

    def _holds(self, n: int) -> None:
        """Record that the live sequence holds exactly the first n tokens."""
        self.ledger.holds(n)
        self.points.drop_after(n)
        self.note()

    # Context shift --------------------------------------------------------------------------

    def discard(self, begin: int, end: int) -> None:
        """Remove ``[begin, end)`` and shift the rest down; UnsupportedOperation changes nothing."""
        native = self._native
        try:
            native.remove(self.ledger.seq_id, begin, end)
        except UnsupportedOperation:
            if not (native.can_shift() and self._is_shared() and self._is_whole_in_state()):
                raise
            # Shared cells cannot be shifted: parking and restoring makes private copies.
            self.park()
            self.attach()
            native.remove(self.ledger.seq_id, begin, end)
        self.points.drop_after(begin)
        ledger = self.ledger
        at = ledger.shifted_at
        ledger.shifted_at = begin if at is None else min(begin, at)
        if ledger.activated_at >= 0:
            ledger.activated_at -= max(0, min(end, ledger.activated_at) - begin)
        ledger.n_evaluated -= end - begin
        ledger.delete(begin, end)
        self.note()

    def _is_shared(self) -> bool:
        members = self.pool.ctx.cells().members
        mine = members[members[:, self.seq_id]]
        return bool((mine.sum(axis=1) > 1).any())

    def _is_whole_in_state(self) -> bool:
        """Whether a saved state has all cells: for a window it has those the next token sees."""
        try:
            self._native.state_size(self.ledger.seq_id)
        except UnsupportedOperation:
            return False
        is_attention = self._native.memory_kind == "attention"
        return is_attention or self.n_held <= self.pool.ctx.model.n_swa

    # Evaluating -------------------------------------------------------------------------------

    def evaluate(self, *, want_row: bool) -> Row | None:
        """Evaluate the pending tokens; with `want_row` return the logits after the last token."""
        ledger = self.ledger
        n = len(ledger)
        self.pool.check_length(n)
        if ledger.n_evaluated == n and (not want_row or self.row is not None):
            return self.row
        self._begin(n, want_row)
        is_prompt = n - ledger.n_evaluated > 1
        begin, began = ledger.n_evaluated, time.perf_counter()
        while ledger.n_evaluated < n:
            is_part = self.needs_points and is_prompt
            end = self.next_stop(n) if is_part else ledger.same_until(n)
            if not self._decode(end, want_row and end == n):
                self._begin(n, want_row)  # the cells were changed outside in between
            elif is_part:
                self.checkpoint()
        if want_row:  # without logits, the computation may not be finished
            self.pool.note_time(begin, n, time.perf_counter() - began)
        return self.row

    def _begin(self, n: int, want_row: bool) -> None:
        self.attach()
        # Logits come from a decode: if all tokens are held, decode the last one again.
        self.rewind(min(self.ledger.n_evaluated, n - 1) if want_row else self.ledger.n_evaluated)

    def _decode(self, end: int, want_row: bool) -> bool:
        """Decode up to a token; return False, with nothing done, if the cells were changed."""

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
        """After a failed decode, drop the checkpoints beyond the evaluated tokens."""
        self.points.drop_after(self.ledger.n_evaluated)

    def with_room(self, call: Callable[[], _T]) -> _T:
        """Run `call`; park an idle sequence and retry while the cache is full."""
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
        """Return where to pause an evaluation up to ``end``, to take a checkpoint there."""
        begin = self.ledger.n_evaluated
        stop = self.ledger.same_until(self.policy.next_stop(begin, end))
        return min([n for n in self.branches if begin < n < stop], default=stop)

    def checkpoint(self) -> None:
        """Save the part of the memory that cannot be rewound, if it has one."""
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
        every = [cells.points for cells in self.pool.members]
        fit(every, self.policy.max_bytes, self.pool.ctx.model.n_swa)

    def _take_window(self) -> None:
        """Save window cells that the memory is about to drop, unless they are saved already."""
        native, size = self._native, self.policy.chunk
        begin, end = native.window_range(self.ledger.seq_id)
        # Gaps before the last saved cells were evicted by the budget: do not fill them again.
        begin = max([begin, *(last for _, last in self.points.covered())])
        cell = native.block_bytes("window")
        while begin < end:
            n = min(end, begin - begin % size + size) - begin
            cells = np.empty(n * cell, np.uint8)
            if native.get_block(self.ledger.seq_id, begin, n, cells, "window"):
                cells.setflags(write=False)
                self.points.windows.append(WindowChunk(begin, n, n, cells))
            begin += n

    # Forks ----------------------------------------------------------------------------------

    def fork_into(self, child: SequenceCells, n: int) -> None:
        """Share the cells or state of the first n tokens with a new sequence."""
        mine, ledger = self.ledger, child.ledger
        if n and mine.n_evaluated and self.seq_id is not None:
            self._verify()
        if n == len(ledger) == len(mine):
            ledger.invoked_at = mine.invoked_at  # generated tokens activate nothing
        ledger.shifted_at, ledger.activated_at = mine.shifted_at, mine.activated_at
        held = min(n, mine.n_evaluated, ledger.limit)
        if held:
            self._give(child, n, held)
        ledger.drop_marks()

    def _give(self, child: SequenceCells, n: int, held: int) -> None:
        """Share the first `held` tokens with a fork of n tokens."""
        if self.seq_id is not None:
            if n == self.n_held:
                self.checkpoint()
            self.pins += 1
            try:
                seq_id = self.pool.lend(child)
            finally:
                self.pins -= 1
            if seq_id is not None:
                child.ledger.seq_id = seq_id
                self._copy_to(child, held)
                child.points = self.points.up_to(child.n_held)
                return
            try:
                child.state = self._shared_state()
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
            # No partial copy here: copy everything, and rewind it at its first use.
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
        """Return the held tokens after the first n."""
        own = self.ledger.part(n, self.ledger.n_evaluated)
        return np.concatenate([own, self.ledger.stale])
