"""One decode for all that run: which tokens go in, and what their logits become."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pykvcache._native import lib
from pykvcache.errors import ClosedError, DecodeAborted, KvCacheError, NoKvCacheSlot
from pykvcache.generate.handle import FinishReason, GenerationHandle
from pykvcache.generate.schedule import Schedule

__all__ = ["Stepper"]


class Share(NamedTuple):
    """What one sequence has in a batch: its tokens up to ``end``, with logits if that is all."""

    handle: GenerationHandle
    end: int
    row: int  # index in the batch of the last token; -1 where no logits are wanted


class Stepper:
    """Makes a batch of what is pending, decodes it and hands the logits out."""

    def __init__(self, schedule: Schedule, n_chunk: int) -> None:
        self._schedule = schedule
        self._n_chunk = n_chunk
        ctx = schedule.ctx
        self._native = ctx.native
        self._n_batch = ctx.n_batch
        self.aborted = False  # whether a handle was, of those that wait perhaps
        self._rows = lib.Rows(max(16, schedule.max_sequences), 1)

    def step(self) -> list[tuple[GenerationHandle, int]]:
        """Make one decode; return the tokens that came of it."""
        with self._schedule.pinned():
            return self._step()

    def _step(self) -> list[tuple[GenerationHandle, int]]:
        schedule = self._schedule
        self._drop_aborted()
        made: list[tuple[GenerationHandle, int]] = []
        schedule.admit()
        while True:
            if not schedule.running:
                return made
            try:
                shares = self._collect(made)
                if shares:
                    self._decode(shares)
                break
            except NoKvCacheSlot:
                if not schedule.make_room():
                    self._end(schedule.running[0], "full")
        for share in shares:
            if share.row >= 0:
                self._advance(share.handle, self._native.logits(share.row), made)
        if shares:
            schedule.pool.count_step(*(h._cells for h in schedule.running))
        return made

    # In -----------------------------------------------------------------------------------------

    def _collect(self, made: list[tuple[GenerationHandle, int]]) -> list[Share]:
        """Fill the batch: first who generates, one token each, then parts of prompts."""
        self._rows.clear()
        schedule, shares, prompts = self._schedule, [], []
        room = self._n_batch
        for handle in list(schedule.running):
            cells = handle._cells
            ledger = cells.ledger
            n = len(ledger)
            if handle._sequence.is_closed:
                error = ClosedError("the sequence was closed meanwhile")
                self._end(handle, "error", error, alone=True)
                continue
            if not n:
                lost = ValueError("the sequence has no tokens any more")
                self._end(handle, "error", lost, alone=True)
                continue
            if n > schedule.ctx.n_ctx_seq and schedule.ctx.memory_kind != "recurrent":
                self._end(handle, "full")
                continue
            if cells.row is not None and ledger.n_evaluated == n:
                self._advance(handle, cells.row, made)
                if handle._finish is not None:
                    continue
                n = len(ledger)
            cells.attach()
            cells.rewind(min(ledger.n_evaluated, n - 1))
            if n - ledger.n_evaluated == 1 and room:
                shares.append(self._put(handle, n))
                room -= 1
            else:
                prompts.append(handle)
        for handle in prompts:
            if not room:
                break
            ledger = handle._cells.ledger
            begin, n = ledger.n_evaluated, len(ledger)
            end = min(n, begin + min(room, self._n_chunk))
            if handle._cells.needs_points:
                end = handle._cells.policy.next_stop(begin, end)
            shares.append(self._put(handle, end))
            room -= end - begin
        return shares

    def _put(self, handle: GenerationHandle, end: int) -> Share:
        cells = handle._cells
        begin = cells.ledger.n_evaluated
        is_all = end == len(cells.ledger)
        rows, first = self._rows, len(self._rows)
        if end - begin > 1:
            rows.append(cells.ledger.part(begin, end - 1), cells.seq_id, False, begin)
        rows.add(cells.ledger.token_at(end - 1), end - 1, cells.seq_id, is_all)
        return Share(handle, end, first + end - begin - 1 if is_all else -1)

    # Through ------------------------------------------------------------------------------------

    def _decode(self, shares: list[Share]) -> None:
        self._check_room(len(self._rows))
        try:
            self._native.decode_batch(self._rows)
        except BaseException:
            for share in shares:
                share.handle._cells.sync()
            raise
        for share in shares:
            cells = share.handle._cells
            was_prompt = share.end - cells.ledger.n_evaluated > 1
            cells.row = None
            cells.ledger.holds(share.end)
            cells.note()
            if was_prompt and cells.needs_points:
                cells.checkpoint()

    def _check_room(self, n: int) -> None:
        """Know before computing: a window that looks for room in vain may lose cells by it."""
        ctx = self._schedule.ctx
        if ctx.kv_unified and ctx.memory_kind != "recurrent" and ctx.n_cells_used + n > ctx.n_ctx:
            raise NoKvCacheSlot(f"no room in the cache for {n} more tokens", 1)

    # Out ----------------------------------------------------------------------------------------

    def _advance(
        self,
        handle: GenerationHandle,
        row: np.ndarray[tuple[int], np.dtype[np.float32]],
        made: list[tuple[GenerationHandle, int]],
    ) -> None:
        """Let a request choose its next token; a failure ends this request alone."""
        siblings, handle._siblings = handle._siblings, []
        for sibling in siblings:
            if sibling._sequence.is_closed:
                sibling._end("error", ClosedError("the sequence was closed meanwhile"))
            elif self._branch(handle, sibling):
                self._choose(sibling, row, made)
            if sibling._finish is None:
                self._schedule.add(sibling)
            elif sibling._owns:
                sibling._sequence.close()
        self._choose(handle, row, made)
        if handle._finish is not None:
            self._schedule.remove(handle)

    def _choose(
        self,
        handle: GenerationHandle,
        row: np.ndarray[tuple[int], np.dtype[np.float32]],
        made: list[tuple[GenerationHandle, int]],
    ) -> None:
        try:
            token = handle._take(row)
        except (KvCacheError, ValueError, IndexError) as error:
            handle._end("error", error)
        else:
            if token is not None:
                made.append((handle, token))

    def _branch(self, handle: GenerationHandle, sibling: GenerationHandle) -> bool:
        """Let another sample begin with what was evaluated for this one; tell whether it is all."""
        mine, other = handle._cells, sibling._cells
        n = len(mine.ledger)
        if not np.array_equal(mine.ledger.part(0, n), other.ledger.part(0, len(other.ledger))):
            return False  # somebody edited the prompt meanwhile
        mine.fork_into(other, n)
        return True

    def _drop_aborted(self) -> None:
        looked, self.aborted = self.aborted, False
        waiting = self._schedule.waiting if looked else self._schedule.waiting[:1]
        for handle in [*self._schedule.running, *waiting]:
            if looked:
                self._drop_samples(handle)
            if handle._abort:
                self._end(handle, "aborted", alone=True)

    @staticmethod
    def _drop_samples(handle: GenerationHandle) -> None:
        for one in [sibling for sibling in handle._siblings if sibling._abort]:
            handle._siblings.remove(one)
            one._end("aborted")
            one._sequence.close()

    def _end(
        self,
        handle: GenerationHandle,
        reason: FinishReason,
        error: Exception | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """End a request; `alone`: the other samples of its prompt go on, the next one first."""
        siblings, handle._siblings = handle._siblings, []
        if alone and siblings:
            siblings[0]._siblings = siblings[1:]
            self._schedule.add(siblings[0])
            siblings = []
        for one in [*siblings, handle]:
            one._end(reason, error)
            if one is not handle:
                one._sequence.close()
        self._schedule.remove(handle)

    def abort_all(self, error: DecodeAborted) -> None:
        """End all that run, after an aborted decode that nobody waits for."""
        for handle in list(self._schedule.running):
            self._end(handle, "aborted", error)

    def fail_all(self, error: Exception) -> None:
        """End everything with an error that concerns them all."""
        for handle in [*self._schedule.running, *self._schedule.waiting]:
            self._end(handle, "error", error)

    def close(self) -> None:
        """End everything that is left."""
        for handle in [*self._schedule.running, *self._schedule.waiting]:
            self._end(handle, "aborted")
