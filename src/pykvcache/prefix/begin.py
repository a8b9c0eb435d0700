"""How a sequence of a cache begins: what it shares, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.prefix.blocks import block_names, token_bytes
from pykvcache.prefix.events import EventLog, Lookup
from pykvcache.prefix.finding import Found
from pykvcache.prefix.gather import Gathered
from pykvcache.prefix.in_use import InUse
from pykvcache.prefix.pins import Pins
from pykvcache.prefix.ram import RamTier
from pykvcache.prefix.reason import Difference, Reason
from pykvcache.prefix.reuse import ReuseReport
from pykvcache.sequence.cells import Row, SequenceCells
from pykvcache.sequence.checkpoints import Checkpoint, Checkpoints
from pykvcache.sequence.ledger import Ledger, common_prefix
from pykvcache.sequence.twins import PutBack, least_cut

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["BeginMethods"]


class BeginMethods:
    """Finding what is known of a prompt; part of `PrefixCache`. The pool's lock is held."""

    _ctx: LlamaContext
    _native: lib.Context
    _ram: RamTier
    _pins: Pins
    _open: InUse
    _needs_rest: bool
    _can_cut: bool
    _block_size: int
    _events: EventLog
    _sums: ReuseReport
    _requests: int
    _hits: int

    _root_name: Callable[[str], bytes]

    def _begin(self, sequence: CachedSequence) -> None:
        """Let a sequence of which nothing was evaluated begin with what is known."""
        cells, space = sequence._cells, sequence._namespace
        ledger = cells.ledger
        n = len(ledger)
        if not n:
            return
        tokens = token_bytes(ledger.part(0, n).view(np.uint32))
        self._pins.expire()
        found = self._ram.find(tokens, space, needs_rest=self._needs_rest)
        parent, live, near, common = self._nearest(ledger, space, sequence)
        row = self._row_of(parent, n) if parent is not None and live == n else None
        is_live = parent is not None and live >= found.n
        if found.row is not None and found.n == n and row is None:
            is_live = False  # a fork would evaluate a token
        if is_live and parent is not None:
            parent._cells.fork_into(cells, live)
            cells.row = row
            if self._usable(cells) < found.n:  # no id was free: a state cannot be cut as cells can
                cells.release()
                is_live = False
        if not is_live and found.n:
            self._put(cells, found)
        self._hold(sequence, found)
        usable = self._usable(cells)
        if self._needs_rest:
            cells.branches = {max(found.n_known, common) // self._block_size * self._block_size}
        where = self._difference(ledger, found, near, common)
        reason = sequence._reason = Reason(n, max(found.n_known, common), usable, where)
        if near is not None and common >= found.n_known and near._cells.n_fresh < common:
            reason.pends(near._cells.n_fresh, found.n_known, near._cells.ledger.shifted_at)
        sequence._reuse = ReuseReport(
            n,
            live=usable if is_live else 0,
            ram=0 if is_live else usable,
            evaluated=n - usable,
            first_difference=None if where is None else where.at,
        )

    def _renew(self, sequence: CachedSequence) -> None:
        """Begin again with what others have evaluated meanwhile, where that is more."""
        cells = sequence._cells
        if cells.ledger.shifted_at is not None or sequence not in self._open:
            return
        # Of a fork, too: it has what its parent had when the request came.
        known, space = self._usable(cells), sequence._namespace
        if known >= len(cells.ledger) - 1:
            return
        if self._nearest(cells.ledger, space, sequence)[1] <= known:
            tokens = token_bytes(cells.ledger.part(0, len(cells.ledger)).view(np.uint32))
            found = self._ram.find(tokens, space, needs_rest=self._needs_rest, is_use=False)
            if found.n <= known:
                return
        cells.release()
        self._begin(sequence)
        self._sum(sequence)

    def _count(self, sequence: CachedSequence) -> None:
        """Count a request, and tell who wants to know of it."""
        self._sum(sequence, is_new=True)
        ledger, size = sequence._cells.ledger, self._block_size
        if self._events.hears_lookups and (n := len(ledger)):
            tokens = token_bytes(ledger.part(0, n).view(np.uint32))
            names = block_names(self._root_name(sequence._namespace), tokens, 4 * size)
            self._events.looked_up(Lookup(tuple(names), n, size))

    def _sum(self, sequence: CachedSequence, *, is_new: bool = False) -> None:
        """Count what the report of a request says now, in place of what it said before."""
        new, old = sequence._reuse, sequence._counted
        if new is old or (old is None and not is_new):
            return  # nothing has changed, or it is a fork, which is no request
        sums, hits = self._sums.plus(new), self._hits + (new.evaluated < new.n_tokens)
        if old is not None:
            sums, hits = sums.plus(old, -1), hits - (old.evaluated < old.n_tokens)
        requests = self._requests + is_new
        # No interrupt can come between these.
        self._sums, self._hits, self._requests, sequence._counted = sums, hits, requests, new

    def _account(self, sequence: CachedSequence, got: Gathered) -> None:
        """Say in the sequence's report, and in the cache's sums, where tokens came from."""
        n = len(sequence._cells.ledger)
        used = {"ram": got.n - got.n_loaded}  # of what is there, perhaps less than all
        used |= {"disk": got.count("disk"), "remote": got.count("remote")}
        # Logits are made by a decode: the last token counts as evaluated, and what cannot be gone
        # back over.
        usable = self._usable(sequence._cells)
        lost = got.n - usable
        for name in ("remote", "disk", "ram"):
            taken = min(lost, used[name])
            used[name], lost = used[name] - taken, lost - taken
        sequence._reason = Reason(n, got.n, usable, None)
        sequence._reuse = ReuseReport(
            n,
            ram=used["ram"],
            disk=used["disk"],
            remote=used["remote"],
            evaluated=n - usable,
        )
        self._sum(sequence)

    def _account_met(self, sequence: CachedSequence, got: Gathered, placed: int) -> None:
        """As `_account`, for what came while the sequence was being evaluated."""
        remote = min(placed, got.count("remote"))
        old = sequence._reuse
        # What was said before it came is no longer true.
        n = old.disk + old.remote + placed
        reason = f"{n} tokens came from tiers while the rest was evaluated"
        sequence._reuse = replace(
            old,
            reason=reason if placed else old.reason,
            disk=old.disk + placed - remote,
            remote=old.remote + remote,
            evaluated=old.evaluated - placed,
        )
        self._sum(sequence)

    def _put(self, cells: SequenceCells, found: Found) -> None:
        """Let a sequence begin parked, on blocks that it shares with the cache."""
        native, blocks, rest = self._native, found.blocks, found.rest
        cells.state = PutBack(
            lambda seq_id: native.set_blocks_and_rest(seq_id, blocks, rest, known_values=True),
            self._least(found),
        )
        cells.ledger.n_evaluated = found.n
        if found.below is not None:
            cells.points.add(Checkpoint(*found.below))
        if rest is not None:
            cells.points.add(Checkpoint(found.n, rest))
        if found.n == len(cells.ledger):
            cells.row = found.row

    def _least(self, found: Found) -> int:
        """Return to how many of its tokens what was found can be cut."""
        if found.rest is not None and not found.rest.has_last_window:
            return found.n
        return least_cut(found.n, self._ctx.model.n_swa)

    def _usable_of(self, found: Found, n: int, before: Checkpoints) -> int:
        """How many of n tokens a sequence need not evaluate that begins with what was found."""
        if found.n < n or found.row is not None:
            return found.n
        if not self._needs_rest or (self._can_cut and self._least(found) < found.n):
            return n - 1
        point = before.at_most(n - 1)
        return 0 if point is None else point.n

    def _hold(self, sequence: CachedSequence, found: Found) -> None:
        run = None if found.run is None or found.run.is_root else found.run
        beside = found.points if found.begun is None else [found.begun]
        if run is None and not beside:
            self._ram.release(sequence)
        else:
            self._ram.hold(sequence, run, *(one for one in beside if not one.is_root))

    def _nearest(
        self, ledger: Ledger, space: str, new: CachedSequence
    ) -> tuple[CachedSequence | None, int, CachedSequence | None, int]:
        """Return the open sequence of which most can be forked, and the one that agrees most.

        How much after each; pending tokens agree, too.
        """
        best, most, near, agrees = None, 0, None, (0, 0)
        wanted = ledger.part(0, len(ledger))
        for other in self._open:
            if other is new or other._namespace != space or other.is_closed:
                continue
            theirs = other._cells
            same = common_prefix(theirs.ledger.part(0, len(theirs.ledger)), wanted)
            fresh = min(same, theirs.n_fresh)
            if (same, fresh) > agrees:
                near, agrees = other, (same, fresh)
            usable = self._forkable(theirs, fresh)
            if usable > most:
                best, most = other, usable
        return best, most, near, agrees[0]

    @staticmethod
    def _row_of(parent: CachedSequence, n: int) -> Row | None:
        """Return the logits after the first n tokens of a sequence in use, where they are known."""
        cells = parent._cells
        if n == len(parent) and cells.row is not None:
            return cells.row
        row = cells.points.row
        return row[1] if row is not None and row[0] == n else None

    def _usable(self, cells: SequenceCells) -> int:
        """How many tokens of a new sequence need not be evaluated to make its logits."""
        n = cells.ledger.n_evaluated
        if cells.row is None and n == len(cells.ledger):
            # Logits are made by a decode: of the last token, and of what cannot be gone back over.
            return self._forkable(cells, n - 1) if n else 0
        return self._forkable(cells, n)

    def _forkable(self, cells: SequenceCells, n: int) -> int:
        """How many of the first n tokens a fork would hold without evaluating."""
        if not self._needs_rest or n == cells.n_held or self._is_in_state(cells, n):
            return n
        if cells.seq_id is not None and self._native.can_resume(cells.seq_id, n):
            return n
        point = cells.points.at_most(n)
        return point.n if point is not None else 0

    def _is_in_state(self, cells: SequenceCells, n: int) -> bool:
        """Whether a window that is parked has what comes after n tokens sees of it."""
        return self._can_cut and cells.state is not None and n >= cells.state.least

    def _difference(
        self, ledger: Ledger, found: Found, near: CachedSequence | None, common: int
    ) -> Difference | None:
        """Return where a prompt differs from the nearest known one; None where it does not."""
        n = len(ledger)
        if near is not None and common >= found.n_known:
            if common < min(n, len(theirs := near._cells.ledger)):
                return Difference(self._ctx.model, ledger, common, theirs.token_at(common))
        elif found.nearest and found.n_known < n:
            other = int.from_bytes(found.nearest[:4], "little")
            return Difference(self._ctx.model, ledger, found.n_known, other)
        return None
