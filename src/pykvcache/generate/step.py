"""Stepper: one decode for all running requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pykvcache._native import lib
from pykvcache.errors import ClosedError, NoKvCacheSlot, OvertakenError
from pykvcache.generate.request import FinishReason, GenerationRequest
from pykvcache.generate.schedule import Schedule
from pykvcache.sequence.cells import Row, SequenceCells

__all__ = ["Stepper"]

#: Minimum number of prompt tokens in a batch from which evaluation time is learned.
_LEAST_TIMED = 16


class Share(NamedTuple):
    """A sequence's part of a batch: tokens up to ``end``, with logits if none is left."""

    request: GenerationRequest
    end: int
    row: int  # batch index of the last token; -1 if no logits are wanted


class Stepper:
    """Makes a batch of pending tokens, decodes it and passes the logits to the requests.

    Unchanged sequences that lack one token share a single call of the compiled layer, which
    verifies that they are unchanged, decodes, chooses the tokens and appends them. Python
    collects the parts of prompts for the same decode. If no request joins or leaves, that call is
    the whole step.

    Adapters apply to a whole decode. So with an activated adapter a step makes two: one for tokens
    before the activation, and one for those after it.
    """

    def __init__(self, schedule: Schedule, n_chunk: int) -> None:
        self._schedule = schedule
        self._n_chunk = n_chunk
        ctx = schedule.ctx
        self._native = ctx.native
        self._n_batch = ctx.n_batch
        self.aborted = False  # whether to look for aborted requests
        self._rows = lib.Rows(max(16, schedule.max_sequences), 1)
        self._looks: list[GenerationRequest] = []  # requests that may have ended
        # The requests of the last step, reused for the next one if nothing changes.
        self._owners: tuple[GenerationRequest, ...] = ()
        self._lanes: tuple[lib.Lane, ...] = ()
        self._cells: tuple[SequenceCells, ...] = ()
        self._n_waiting = 0
        self._turns = 0  # the pool's turn counter after the last step
        self._made: list[tuple[GenerationRequest, int]] = []  # new tokens, not yet returned
        # Tokens and seconds of batches since logits were last read; devices may still run them.
        self._n_timed, self._seconds = 0, 0.0

    def step(self) -> list[tuple[GenerationRequest, int]]:
        """Make one decode; return the new tokens."""
        schedule = self._schedule
        if self._looks:
            self._look()
        # A step of a small model takes 30 us in all, so avoid needless calls.
        if (
            self._owners
            and not self.aborted
            and (len(schedule.waiting) == self._n_waiting or not self._may_join())
            and (schedule.cache is None or not schedule.is_arrival)
        ):
            made = self._step_together()
            if made is not None:
                return made
        self._ungroup()
        try:
            schedule.pool.stage = schedule.stage
            self._step()
        finally:
            schedule.pool.stage = None
        self._turns = schedule.pool.turns
        made, self._made = self._made, []
        return made

    def _may_join(self) -> bool:
        """Return whether a new request may be able to run."""
        if self._schedule.is_taken:
            self._n_waiting = len(self._schedule.waiting)
            return False
        return True

    def _step_together(self) -> list[tuple[GenerationRequest, int]] | None:
        """Repeat the last step's requests; return None and do nothing if any has changed."""
        pool, looks = self._schedule.pool, self._looks
        try:
            found = self._native.step(self._lanes, self._owners, looks)
        except NoKvCacheSlot:
            return None
        except BaseException:
            looks[:] = self._owners
            self._ungroup()
            raise
        if found is None:
            return None
        if pool.turns != self._turns + 1:
            # Other sequences were used between the steps; mark these as the latest.
            pool.touch_all(self._cells)
        pool.count_step(self._cells)
        if looks:
            self._look()
            if not self._owners and not self._schedule.waiting:
                self._regroup()
        self._turns = pool.turns
        return found[0]

    def _look(self) -> None:
        """Process requests that may have ended."""
        while self._looks:
            request = self._looks[-1]
            request.look()
            if request.finish is not None:
                self._ungroup()
                self._schedule.remove(request)
            self._looks.pop()

    def _step(self) -> None:
        """Let requests join, and decode; if that raises, the next step returns the new tokens."""
        schedule = self._schedule
        self.drop_aborted()
        schedule.admit()
        before = schedule.running.copy(), schedule.waiting.copy()
        kinds = [False, True] if self._native.invocation else [False]
        done = [self._decode_kind(is_active) for is_active in kinds]
        if done.count(None) == len(done):
            return
        schedule.pool.count_step(tuple([request.cells for request in schedule.running]))
        # Waiting requests did not fit before; they do not fit now if nothing has changed.
        unchanged = (schedule.running, schedule.waiting) == before and False not in done
        if unchanged or not schedule.waiting or schedule.is_taken:
            self._regroup()

    def _decode_kind(self, is_active: bool) -> bool | None:
        """Make one decode, of tokens before an activation or of those after it.

        Return whether it had one token of each request; None if it had none at all.
        """
        schedule = self._schedule
        together, done = True, False
        while not done:
            able = [one for one in schedule.running if one.cells.ledger.is_active == is_active]
            if not able:
                return None
            try:
                ready = self._ready(able) if together else []
                others = [request for request in able if request not in ready]
                shares = self._collect(others, self._n_batch - len(ready))
                if not shares and not ready:
                    return None
                done = self._decode(ready, shares)
                # Too many for one call, changed concurrently, or back before an activation.
                together = False
            except NoKvCacheSlot as error:
                if not schedule.make_room():
                    self._refuse(schedule.running[0], error)
        return len(self._rows) == len(shares)

    def _ready(self, running: list[GenerationRequest]) -> list[GenerationRequest]:
        """Return the unchanged requests that lack one token."""
        able = [request for request in running if not request.siblings]
        others = self._native.not_ready([request.lane for request in able], able)
        ready = [request for request in able if request not in others] if others else able
        self._schedule.pool.touch_all([request.cells for request in ready])
        return ready[: self._n_batch]

    def _regroup(self) -> None:
        """Prepare the next step as a single call, which verifies the requests itself."""
        running = self._schedule.running
        if any([request.siblings for request in running]):
            return
        self._owners = tuple(running)
        self._lanes = tuple([request.lane for request in running])
        self._cells = tuple([request.cells for request in running])
        self._n_waiting = len(self._schedule.waiting)

    def _ungroup(self) -> None:
        """Let the next step examine all requests, and drop references to ended ones."""
        self._owners, self._lanes, self._cells = (), (), ()

    # In -----------------------------------------------------------------------------------------

    def _collect(self, requests: list[GenerationRequest], room: int) -> list[Share]:
        """Fill the batch: first generating requests, one token each, then parts of prompts."""
        self._rows.clear()
        shares, prompts = [], []
        for request in requests:
            cells = request.cells
            ledger = cells.ledger
            if (problem := _problem(request)) is not None:
                self._end(request, "error", problem, alone=True)
                continue
            if len(ledger) > self._schedule.pool.most_tokens:
                self._end(request, "full")
                continue
            if cells.row is not None and ledger.n_evaluated == len(ledger):
                row, cells.row = cells.row, None
                self._advance(request, row)
                if request.finish is not None:
                    continue
            n = len(ledger)
            cells.attach()
            cells.rewind(min(ledger.n_evaluated, n - 1))
            if n - ledger.n_evaluated == 1 and room:
                shares.append(self._put(request, n))
                room -= 1
            else:
                prompts.append(request)
        for request in prompts:
            if not room:
                break
            ledger = request.cells.ledger
            begin, n = ledger.n_evaluated, len(ledger)
            end = min(n, begin + min(room, self._n_chunk))
            if request.cells.needs_points:
                end = _end_of_part(request.cells, end, room)
            end = ledger.same_until(end)
            shares.append(self._put(request, end))
            room -= end - begin
        return shares

    def _put(self, request: GenerationRequest, end: int) -> Share:
        cells = request.cells
        begin = cells.ledger.n_evaluated
        is_all = end == len(cells.ledger)
        rows, first = self._rows, len(self._rows)
        if end - begin > 1:
            rows.append(cells.ledger.part(begin, end - 1), cells.seq_id, False, begin)
        rows.add(cells.ledger.token_at(end - 1), end - 1, cells.seq_id, is_all)
        return Share(request, end, first + end - begin - 1 if is_all else -1)

    # Through ------------------------------------------------------------------------------------

    def _decode(self, ready: list[GenerationRequest], shares: list[Share]) -> bool:
        """Decode and distribute tokens; return False and do nothing if the call is refused."""
        self._check_room(len(self._rows) + len(ready))
        prompts = [request.cells for request, end, _ in shares if _is_part(request.cells, end)]
        parts: list[tuple[lib.Tokens, int, int, int]] = []
        for request, end, at in shares:
            request.cells.row = None
            ledger = request.cells.ledger
            parts.append((ledger, ledger.seq_id, end, at))
        began = time.perf_counter()
        try:
            if ready:
                lanes = [request.lane for request in ready]
                found = self._native.step(lanes, ready, self._looks, self._rows, parts)
            else:
                rows = self._native.decode_shares(self._rows, parts)
                found = None if rows is None else ([], rows)
        except BaseException:
            self._looks[:] = ready
            for request, _, _ in shares:
                request.cells.failed()
            raise
        if found is None:
            return False
        tokens, rows = found
        self._made += tokens
        if len(self._rows) >= len(shares) + _LEAST_TIMED:
            is_done = any(row is not None for row in rows)
            self._note_time(len(self._rows) + len(ready), time.perf_counter() - began, is_done)
        for cells in prompts:
            cells.checkpoint()
        self._look()
        for share, row in zip(shares, rows, strict=True):
            if row is not None:
                self._advance(share.request, row)
        return True

    def _note_time(self, n: int, seconds: float, is_done: bool) -> None:
        """Learn how long evaluating takes, once logits show that the computation is finished."""
        self._n_timed, self._seconds = self._n_timed + n, self._seconds + seconds
        if is_done:
            self._schedule.pool.note_time(0, self._n_timed, self._seconds)
            self._n_timed, self._seconds = 0, 0.0

    def _check_room(self, n: int) -> None:
        """Check for free cells first: a failed search for room may cost a window its cells."""
        ctx = self._schedule.ctx
        if self._schedule.pool.shares_cells and ctx.n_cells_used + n > ctx.n_ctx:
            free = max(ctx.n_ctx - ctx.n_cells_used, 0)
            raise NoKvCacheSlot(
                f"no room in the cache for {n} more tokens",
                1,
                n_tokens=n,
                n_free=free,
                n_cells=ctx.n_ctx,
            )

    # Out ----------------------------------------------------------------------------------------

    def _advance(self, request: GenerationRequest, row: Row) -> None:
        """Let a request choose its next token; an error ends only this request."""
        request.sequence._evaluated(row)
        while request.siblings:
            sibling = request.siblings[0]
            if (problem := _problem(sibling)) is not None:
                sibling.end("error", problem)
            elif self._branch(request, sibling):
                if sibling.cached is not None:
                    sibling.cached.set_shared()
                self._choose(sibling, row)
            if sibling.finish is None:
                self._schedule.add(sibling)
            else:
                sibling.sequence.close()
            del request.siblings[0]
        self._choose(request, row)

    def _choose(self, request: GenerationRequest, row: Row) -> None:
        self._looks.append(request)
        token = request.lane.take(self._native, row)
        if token is not None:
            self._made.append((request, token))
        self._look()

    def _branch(self, request: GenerationRequest, sibling: GenerationRequest) -> bool:
        """Fork the evaluated prompt to another sample; return False if it cannot be used."""
        mine, other = request.cells, sibling.cells
        n = len(mine.ledger)
        if other.seq_id is not None or other.state is not None:
            other.release()
        if not np.array_equal(mine.ledger.part(0, n), other.ledger.part(0, len(other.ledger))):
            return False  # the prompt was edited
        mine.fork_into(other, n)
        return True

    def drop_aborted(self) -> None:
        """End aborted requests. `abort` marks the request first, then sets `aborted`."""
        if not self.aborted:
            return
        self.aborted = False
        try:
            for request in self._schedule.requests:
                self._end_aborted(request)
        except BaseException:
            self.aborted = True
            raise

    def _end_aborted(self, request: GenerationRequest) -> None:
        for one in [sibling for sibling in request.siblings if sibling.is_aborted]:
            one.end("aborted")
            one.sequence.close()
            request.siblings.remove(one)
        if request.is_aborted:
            self._end(request, "aborted", alone=True)

    def _end(
        self,
        request: GenerationRequest,
        reason: FinishReason,
        error: Exception | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """End a request; `alone`: the other samples of its prompt continue."""
        siblings = request.siblings
        if alone and siblings:
            first, *first.siblings = siblings
            self._schedule.add(first)
        else:
            for one in siblings:
                one.end(reason, error)
                one.sequence.close()
        request.siblings = []
        request.end(reason, error)
        self._ungroup()
        self._schedule.remove(request)

    def _refuse(self, request: GenerationRequest, error: NoKvCacheSlot) -> None:
        """End the only running request, for which there is no room."""
        if request.cells.seq_id is None:
            self._end(request, "error", error)  # the caller uses ids or cells by hand
        else:
            self._end(request, "full")

    def end_all(
        self,
        requests: Iterable[GenerationRequest],
        reason: FinishReason,
        error: Exception | None = None,
    ) -> None:
        """End requests and all samples of their prompts."""
        for request in list(requests):
            self._end(request, reason, error)


def _problem(request: GenerationRequest) -> Exception | None:
    """Return why a request cannot continue: its caller changed the sequence."""
    if request.sequence.is_closed:
        return ClosedError("the sequence was closed")
    if request.lane.is_overtaken:
        return OvertakenError("a newer generation has continued this sequence")
    if not len(request.cells.ledger):
        return ValueError("the sequence has no tokens left")
    return None


def _end_of_part(cells: SequenceCells, end: int, room: int) -> int:
    """Return the end of a part of a prompt, at most ``end``, with room for `room` tokens.

    A single last token would look like a generated one and leave no checkpoint, so it is joined
    with the part or token before it.
    """
    begin, n = cells.ledger.n_evaluated, len(cells.ledger)
    end = min(end, cells.next_stop(n))
    if end == n - 1 and cells.next_stop(n) == n:
        if end - begin > 1:
            return end - 1
        return n if room > 1 else end
    return end


def _is_part(cells: SequenceCells, end: int) -> bool:
    """Return whether a checkpoint is taken after tokens up to ``end``."""
    begin, n = cells.ledger.n_evaluated, len(cells.ledger)
    return cells.needs_points and (end - begin > 1 or (n - begin > 1 and end == cells.next_stop(n)))
