"""Schedule: decides which requests run, wait, or are parked when cells or ids run out."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from pykvcache.context import LlamaContext
from pykvcache.generate.request import GenerationRequest
from pykvcache.prefix.core import CacheCore
from pykvcache.prefix.sequence import Request
from pykvcache.sequence.ledger import common_prefix
from pykvcache.sequence.pool import SequencePool

__all__ = ["Schedule"]

#: Minimum number of shared tokens for which a request waits until another has evaluated them.
SHARED = 16
#: Free cells per running sequence required to admit another one; reduces parking.
HEADROOM = 16

_rank = attrgetter("rank")


def missing(request: GenerationRequest) -> int:
    """Return the number of cells that a request still needs."""
    cells = request.cells
    return len(cells.ledger) - (0 if cells.seq_id is None else cells.n_held)


class Schedule:
    """The requests of one generator. The pool's lock is held.

    During a step running requests are pinned: the pool parks none of them for another sequence.
    Between steps they are idle like any other sequence.
    """

    def __init__(
        self,
        ctx: LlamaContext,
        pool: SequencePool,
        max_sequences: int,
        cache: CacheCore | None = None,
    ) -> None:
        self.ctx = ctx
        self.cache = cache
        self.pool = pool
        self.max_sequences = max_sequences
        self.waiting: list[GenerationRequest] = []
        self.running: list[GenerationRequest] = []
        self.stage = object()  # what the pool knows as this generator's step
        self._sought: list[Request] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def requests(self) -> list[GenerationRequest]:
        """All requests, but samples that wait for the evaluation of their prompt."""
        return [*self.running, *self.waiting]

    def count(self) -> int:
        """Return the number of unfinished requests and of samples that wait for their prompt."""
        return sum(1 + len(request.siblings) for request in self.requests)

    def add(self, request: GenerationRequest) -> None:
        """Add a request to the waiting ones."""
        insort(self.waiting, request, key=_rank)

    def admit(self) -> None:
        """Start waiting requests, in order, as long as they fit."""
        i = 0
        while i < len(self.waiting):
            head = self.waiting[i]
            cached = head.cached
            is_searching = cached is not None and cached.search is not None
            if (
                (is_searching and not self._is_ready(cached))
                or self._waits_for_prefix(head)
                or not self._is_ready(cached)
            ):
                i += 1
                continue
            if self.running and not self._fits(head):
                last = self.running[-1]
                if last.priority >= head.priority:
                    return
                self.suspend(last)
                continue
            # Marked as running before it gets cells, so that idle sequences are parked for it.
            if cached is not None and self.cache is not None:
                self.cache.renew(cached)
            head.cells.stage = self.stage
            insort(self.running, head, key=_rank)
            del self.waiting[i]
            if head.cells.needs_points:
                for other in self.waiting:
                    self._waits_for_prefix(other)  # adds the branch where the prompts diverge

    # Tiers: waiting for them blocks no other request ----------------------------------------------

    def _seeking(self) -> list[Request]:
        """Return the requests for which tiers are being searched."""
        self._sought = [one for one in self._sought if one.search is not None]
        return self._sought

    def seek(self, request: GenerationRequest) -> None:
        """Search the tiers for a new request, unless it waits for another request's prefix."""
        if not self._waits_for_prefix(request):
            self._is_ready(request.cached)

    def _is_ready(self, cached: Request | None) -> bool:
        """Return whether the tiers are done with a request; start a search if a place is free."""
        cache = self.cache
        if cached is None or cache is None or not cache.has_tiers:
            return True
        if cached.is_searched:
            return cache.is_ready(cached)
        if len(self._seeking()) >= self.max_sequences:
            return False
        cache.renew(cached)  # its prefix may have been evaluated since
        cache.seek(cached)
        self._sought.append(cached)
        return cache.is_ready(cached)

    @property
    def is_taken(self) -> bool:
        """Whether all places are taken by requests of no lower priority than the waiting ones."""
        if len(self.running) < self.max_sequences or self.cache is not None:
            return False
        return not self.waiting or self.waiting[0].priority <= self.running[-1].priority

    @property
    def is_arrival(self) -> bool:
        """Whether a search of tiers has finished."""
        cache = self.cache
        return cache is not None and any(
            one.search is not None and not one.search.left for one in self._seeking()
        )

    def await_tiers(self) -> bool:
        """Wait for tiers for at most 5 ms if no request runs; without the lock.

        Return whether a request may be able to run now.
        """
        cache = self.cache
        # The list is changed only under the lock.
        seeking = [one for one in self._sought if one.search is not None]
        if self.running or cache is None or not seeking:
            return False
        if (search := seeking[0].search) is not None:
            search.done.wait(min(search.left, 0.005))
        return True

    def _waits_for_prefix(self, head: GenerationRequest) -> bool:
        """Return whether another request is evaluating, or searching for, a prefix of this one."""
        mine = head.cached
        if mine is None or self.cache is None:
            return False
        size, own = self.cache.block_size, mine.cells.ledger
        # States, which cannot be truncated, are taken at the ends of blocks.
        least = size if mine.cells.needs_points else min(size, SHARED)
        running = [one for request in self.running if (one := request.cached) is not None]
        for other in (*running, *self._seeking()):
            theirs = other.cells.ledger
            if (
                other is not mine
                and other.namespace == mine.namespace
                and len(theirs) - theirs.n_evaluated > 1
            ):
                same = common_prefix(other.shareable, mine.shareable)
                if theirs.n_evaluated < same and same - own.n_evaluated >= least:
                    # Take a checkpoint where the prompts diverge.
                    other.cells.branches.add(same)
                    return True
        return False

    def _fits(self, head: GenerationRequest) -> bool:
        if len(self.running) >= self.max_sequences:
            return False
        if not self.pool.shares_cells:
            return True
        # Cells that running requests still need are reserved for them.
        needed = sum(map(missing, self.running), missing(head)) + HEADROOM * len(self.running)
        free = self.ctx.n_ctx - self.ctx.n_cells_used
        if needed <= free:
            return True
        idle = sum(other.n_held for other in self.pool.idle_members((head.cells,)))
        return needed <= free + idle

    def suspend(self, request: GenerationRequest) -> None:
        """Park a running request; it continues when there is room again."""
        self.add(request)
        self._stop(request)
        request.cells.park()

    def make_room(self) -> bool:
        """Park one request: an idle one first, then the newest; False if only one is left."""
        if self.pool.make_room(self.running[0].cells):
            return True
        if len(self.running) < 2:
            return False
        self.suspend(self.running[-1])
        return True

    def remove(self, request: GenerationRequest) -> None:
        """Remove a request that has ended, and free what it owned."""
        self._stop(request)
        cached = request.cached
        if cached is not None and self.cache is not None:
            self.cache.cancel_search(cached)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.is_owned:
            request.sequence.close()

    def _stop(self, request: GenerationRequest) -> None:
        if request in self.running:
            self.running.remove(request)
            request.cells.stage = None
