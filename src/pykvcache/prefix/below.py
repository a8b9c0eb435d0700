"""What a cache takes from its tiers, and gives to them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.errors import KvCacheError
from pykvcache.prefix.begin import BeginMethods
from pykvcache.prefix.blocks import block_names, token_bytes
from pykvcache.prefix.finding import Found
from pykvcache.prefix.gather import Gathered, gather
from pykvcache.prefix.in_use import InUse
from pykvcache.prefix.keep import KeepMethods
from pykvcache.prefix.meeting import Meeting
from pykvcache.prefix.ram import Buffer, RamTier, Tail
from pykvcache.prefix.tiers.ends import End, end_key
from pykvcache.prefix.tiers.fetch import Fetch, Wanted
from pykvcache.prefix.tiers.leases import lease_seconds
from pykvcache.prefix.tiers.notices import place
from pykvcache.prefix.tiers.rule import PATIENCE, is_hopeless, wait_until
from pykvcache.prefix.tiers.speeds import EvaluationTime
from pykvcache.prefix.tiers.stack import Tiers
from pykvcache.sequence.cells import Row, SequenceCells
from pykvcache.sequence.pool import SequencePool

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["TierMethods"]


class TierMethods(BeginMethods, KeepMethods):
    """Between a cache and its tiers; part of `PrefixCache`. The pool's lock is held."""

    _ctx: LlamaContext
    _native: lib.Context
    _layout: lib.BlockLayout
    _ram: RamTier
    _tiers: Tiers
    _open: InUse
    _block_size: int
    _cell_bytes: int
    _end_bytes: int
    _tier_seconds: float | None
    _needs_rest: bool
    _can_cut: bool
    _pool: SequencePool
    _evaluation: EvaluationTime
    _keep_logits: bool

    _root_name: Callable[[str], bytes]

    @property
    def has_tiers(self) -> bool:
        """Whether there are stores below its memory."""
        return len(self._tiers) > 0

    # Up -----------------------------------------------------------------------------------------

    def _search(self, sequence: CachedSequence) -> tuple[Fetch, float] | None:
        """Begin to fetch from the tiers what memory lacks of a prompt; None if that cannot help.

        Returns
        -------
        (Fetch, float)
            And for how many seconds to wait for it.
        """
        ledger, size = sequence._cells.ledger, self._block_size
        n, known = len(ledger), self._usable(sequence._cells)
        if not len(self._tiers) or n - 1 <= known or n < size:
            return None
        # Without the logits after it, a state that cannot be rewound is of no use at the end.
        limit = n - 1 if self._needs_rest and not self._keep_logits else n
        tokens = token_bytes(ledger.part(0, n).view(np.uint32))
        wanted = Wanted(
            tokens,
            block_names(self._root_name(sequence._namespace), tokens, 4 * size),
            size,
            self._cell_bytes,
            self._end_bytes,
            begin=self._ram.n_blocks(tokens, sequence._namespace),
            known=known,
            limit=limit,
            needs_rest=self._needs_rest,
            is_good=self._layout.is_good,
            n_row=self._n_row,
            wants_row=self._keep_logits,
            namespace=sequence._namespace,
        )
        seconds = self._evaluation.seconds(known, n) if self._tier_seconds is None else math.inf
        fetch = self._tiers.search(wanted, seconds)
        if fetch is None:
            return None
        fetch.seconds = lease_seconds(self._evaluation.seconds(known, n))
        fetch.start()
        return fetch, seconds

    def _follow(self, fetch: Fetch, evaluation: float) -> Fetch:
        """Where another process evaluates what is missing, wait for it and search again."""
        self._wait(fetch, fetch.looked, evaluation)
        lease = fetch.lease
        if lease is None or lease.follows is None or self._pool.lock._is_owned():
            return fetch
        if lease.holder == fetch.thread:
            return fetch  # for another sequence, which nobody evaluates meanwhile
        fetch.follow()
        again = fetch.again()
        again.start()
        return again

    def _until(self, fetch: Fetch, evaluation: float) -> float:
        """Return until when to wait for a search; then this is asked again."""
        if self._tier_seconds is not None:
            return fetch.began + self._tier_seconds
        savings, answered = self._tiers.savings, fetch.looked.is_set()
        saved = self._evaluation.seconds(*fetch.come()) if answered else 0.0
        waited = time.monotonic() - fetch.began
        allowance = savings.allowance(evaluation, answered=answered)
        until = wait_until(waited, fetch.left, allowance, saved)
        return fetch.began + max(until, savings.try_until(evaluation))

    def _wait(self, fetch: Fetch, event: threading.Event, evaluation: float) -> bool:
        """Wait for an event of a search as long as that is worth it; whether it has come."""
        while not event.is_set():
            seconds = self._until(fetch, evaluation) - time.monotonic()
            if seconds <= 0:
                return False
            event.wait(seconds)
        return True

    def _evaluated(self, sequence: CachedSequence) -> None:
        """Give the tiers what others wait for, as soon as the prompt is evaluated."""
        self._end_search(sequence)

    def _end_search(self, sequence: CachedSequence) -> None:
        """Give back the lease of a sequence, after what others wait for."""
        self._leave(sequence)
        search, sequence._search = sequence._search, None
        if search is None:
            return
        if not search.looked.is_set():
            search.abandon(self._tiers.release)
        if (lease := search.lease) is None or not lease.held:
            return
        try:
            if sequence in self._open and not sequence.is_closed:
                self._keep(sequence)
        finally:
            self._tiers.release(lease)

    def _await(self, sequence: CachedSequence, fetch: Fetch, evaluation: float) -> None:
        """Wait for a search as long as it is worth it; what is still to come is met later."""
        sequence._search = fetch  # whatever comes now: it knows of its lease
        fetch = sequence._search = self._follow(fetch, evaluation)
        if self._wait(fetch, fetch.looked, evaluation):
            self._wait(fetch, fetch.done, evaluation)
        with self._pool.hold():
            self._settle(sequence, fetch, evaluation, time.monotonic() - fetch.began)

    def _settle(
        self, sequence: CachedSequence, fetch: Fetch, evaluation: float, waited: float
    ) -> None:
        """Let a sequence begin with what has come of a search, and meet the rest."""
        if sequence not in self._open or sequence.is_closed:
            return
        savings, is_too_slow = self._tiers.savings, self._is_hopeless(fetch, evaluation)
        if self._tier_seconds is not None:
            evaluation, waited = self._evaluation.seconds(*self._wanted(fetch)), 0.0
        answered = fetch.looked.is_set()
        may_lose = savings.allowance(evaluation, answered=answered) - waited
        savings.note(evaluation, waited)
        if fetch.done.is_set():
            known = self._usable(sequence._cells)
            self._arrived(sequence, fetch)
            come = self._usable(sequence._cells)
            savings.gain(evaluation, self._evaluation.seconds(known, max(known, come)))
        elif is_too_slow and self._tiers.give_up(fetch):
            fetch.cancel()
        else:
            may_lose += self._evaluation.seconds(*fetch.come())
            sequence._cells.incoming = Meeting(self, sequence, fetch, may_lose)

    @staticmethod
    def _is_hopeless(fetch: Fetch, evaluation: float) -> bool:
        """Return whether what was found takes too long to load."""
        return fetch.looked.is_set() and is_hopeless(fetch.left, evaluation)

    @staticmethod
    def _wanted(fetch: Fetch) -> tuple[int, int]:
        """Return which tokens a search is for."""
        return fetch.wanted.known, len(fetch.wanted.tokens) // 4

    # Requests that wait without standing in anybody's way -----------------------------------------

    def _seek(self, sequence: CachedSequence) -> None:
        """Begin to look for a prompt, once; `_is_ready` says when to wait no longer."""
        if not sequence._is_searched:
            sequence._is_searched = True
            sequence._pending = self._search(sequence)
            if sequence._pending is not None:
                sequence._search = sequence._pending[0]

    def _is_ready(self, sequence: CachedSequence) -> bool:
        """Whether a request need not wait for the tiers any more; it begins with what has come."""
        self._seek(sequence)
        if sequence._pending is None:
            return True
        fetch, evaluation = sequence._pending
        if self._patience(sequence) > 0:
            return False
        lease = fetch.lease if fetch.looked.is_set() and not fetch.was_followed else None
        # Requests of this process wait for each other by themselves.
        if lease is not None and lease.follows is not None and lease.holder is None:
            again = fetch.again()
            again.after = fetch
            sequence._pending = again, evaluation
            sequence._search = again
            again.start()
            return False
        sequence._pending = None
        # While it waited others were served: that is no loss.
        waited = min(time.monotonic() - fetch.began, PATIENCE * evaluation)
        self._settle(sequence, fetch, evaluation, waited)
        return True

    def _leave(self, sequence: CachedSequence) -> None:
        """End the search of a request that has ended; others may take a lease."""
        if sequence._pending is not None:
            sequence._pending[0].abandon(self._tiers.release)
            sequence._pending = sequence._search = None

    def _patience(self, sequence: CachedSequence) -> float:
        """Return for how many seconds a request should wait at most; 0 where that is over."""
        if sequence._pending is None:
            return 0.0
        fetch, evaluation = sequence._pending
        if fetch.after is not None:
            return math.inf  # somebody else evaluates: as long as their lease lasts
        if fetch.done.is_set():
            return 0.0
        return max(0.0, self._until(fetch, evaluation) - time.monotonic())

    def _arrived(self, sequence: CachedSequence, fetch: Fetch) -> None:
        """Let a new sequence begin with what has come, where that is more than it has."""
        cells, space, tokens = sequence._cells, sequence._namespace, fetch.wanted.tokens
        mine, n_mine = self._ram.full_blocks(tokens, space)
        got, usable = gather(self._native, fetch, mine, n_mine), self._usable(cells)
        if got is None or got.n <= usable:
            return
        self._promote(tokens, space, got, n_mine)
        found = Found(got.n, got.blocks, got.rest)
        if got.end is not None and got.n == len(cells.ledger):
            found.row = self._checked_row(got.end)
        # Beyond what is evaluated, a fork of what is parked has its origin's.
        before = cells.points.up_to(min(got.n - 1, cells.ledger.n_evaluated))
        if self._usable_of(found, len(cells.ledger), before) <= usable:
            return
        cells.release()
        self._put(cells, found)
        for point in before:
            cells.points.add(point)
        self._hold(sequence, self._ram.find(tokens, space, needs_rest=self._needs_rest))
        self._account(sequence, got)

    def _checked_row(self, end: End) -> Row | None:
        return end.row if end.has_row(self._ctx.model.n_vocab) else None

    @property
    def _n_row(self) -> int:
        """How many logits an end of a whole prompt must have to be of use."""
        return 0 if self._can_cut or not self._keep_logits else self._ctx.model.n_vocab

    def _promote(
        self, tokens: bytes, space: str, got: Gathered, begin: int, *, saved: int = 0
    ) -> None:
        """Keep in memory what came, as far as the budget allows."""
        if not self._ram.max_bytes:
            return
        size, n_full = self._block_size, begin + len(got.loaded)

        def read(first: int, n_blocks: int, _: int, __: int) -> list[Buffer]:
            at = first // size - begin
            return [block[0] for block, _ in got.loaded[at : at + n_blocks]]

        if got.loaded:
            self._ram.add(tokens[: 4 * size * n_full], space, self._cell_bytes, read)
        if got.end is None:
            return
        if not got.end.n_cells and got.rest is not None:
            self._ram.add_checkpoint(
                tokens[: 4 * got.n], space, got.rest, saved or len(got.loaded) * size
            )
        row = self._checked_row(got.end) if self._keep_logits else None
        if got.end.n_cells or row is not None:
            text = tokens[4 * size * n_full : 4 * got.n]
            self._ram.add_tail(tokens[: 4 * got.n], space, Tail(text, got.end.cells, got.rest, row))

    # Down ---------------------------------------------------------------------------------------

    def _write_down(self, sequence: CachedSequence, n: int) -> None:
        """Give the tiers what stands in memory or in the cells of the first n tokens."""
        if not len(self._tiers):
            return
        cells, space, size = sequence._cells, sequence._namespace, self._block_size
        tokens = token_bytes(cells.ledger.part(0, n).view(np.uint32))
        root = self._root_name(space)
        names = block_names(root, tokens, 4 * size)
        known = self._ram.whole_blocks(tokens, space)

        def block(i: int) -> Buffer | None:
            if i < len(known):
                return known[i]()
            return self._read(cells.live_id, i * size, size) if cells.seq_id is not None else None

        self._tiers.write(names, block, space, lambda i: place(names, tokens, size, i, space))
        if cells.seq_id is None:
            return
        places = self._places(sequence, n)
        keys = [
            end_key(names[at // size - 1], tokens[4 * (at // size * size) : 4 * at])
            for at in places
        ]
        self._tiers.write(keys, lambda i: self._end_at(cells, places[i], n), space)

    def _places(self, sequence: CachedSequence, n: int) -> list[int]:
        """Return where ends are kept: after the prompt, after everything, at checkpoints."""
        cells, size = sequence._cells, self._block_size
        if self._needs_rest:
            places = {point.n for point in cells.points if point.n <= n}
            if n == cells.n_held and n % size:
                places.add(n)
        else:
            ends = sequence._reuse.n_tokens, n
            places = {at for at in ends if at <= n and (at % size or self._has_row(cells, at))}
        return sorted(at for at in places if at >= size)

    def _has_row(self, cells: SequenceCells, n: int) -> bool:
        return self._row_at(cells, n) is not None

    def _end_at(self, cells: SequenceCells, at: int, n: int) -> bytes | None:
        full = at // self._block_size * self._block_size
        rest = None
        if self._needs_rest:
            point = cells.points.at_most(at)
            if point is not None and point.n == at:
                rest = point.state
            elif at == n == cells.n_held:
                rest = self._native.get_partial_state(cells.live_id)
            if rest is None or rest.pos != at - 1:
                return None
        row = self._row_at(cells, at)
        try:
            tail = self._read(cells.live_id, full, at - full)
        except KvCacheError:
            return None
        if rest is None:
            return End(at - full, tail, row=row).encode()
        return End(at - full, tail, rest.content, rest.first, rest.pos, row).encode()
