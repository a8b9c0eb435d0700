"""PrefixCache: evaluate what is new, and nothing else."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from pykvcache._closing import Closing
from pykvcache._convert import IntArray, TokenInput, as_bool, as_int
from pykvcache.context import LlamaContext
from pykvcache.errors import ArgumentError, ClosedError, DeviceLost, KvCacheError
from pykvcache.prefix.admission import BlockCheckpoints, LiveCells, admit
from pykvcache.prefix.arguments import (
    as_boundaries,
    as_namespace,
    as_queue_bytes,
    as_seconds,
    as_tiers,
    as_tokens,
    as_wait,
)
from pykvcache.prefix.block_cache import CHUNK_BYTES, NODE_BYTES, BlockCache
from pykvcache.prefix.block_hash import TOKEN_SIZE, block_names, root_name
from pykvcache.prefix.events import AllBlocksCleared, EventLog, Lookup
from pykvcache.prefix.lookup import Begin, Live, LiveIndex, Row, plan_begin
from pykvcache.prefix.match import Match, Resume
from pykvcache.prefix.memory import CacheMemory, Cells
from pykvcache.prefix.node import EndState, Kind
from pykvcache.prefix.pins import Pin, Pins
from pykvcache.prefix.policies import DEFAULT, Policy
from pykvcache.prefix.prefetch import Prefetch, Prefetches
from pykvcache.prefix.report import CacheStats, Difference, Reason, ReuseReport
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import Envelope
from pykvcache.prefix.tier_link import TierLink, least_seconds
from pykvcache.prefix.tiers.cost_model import EvaluationTime
from pykvcache.prefix.tiers.loader import Load
from pykvcache.prefix.tiers.stack import TierInput, Tiers
from pykvcache.prefix.tree_view import CacheTree, plot_tree, view_tree
from pykvcache.sequence.cells import PutBack, SequenceCells
from pykvcache.sequence.ledger import Ledger
from pykvcache.sequence.pool import pool_of
from pykvcache.sequence.sequence import LlamaSequence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PrefixCache"]

_caches: weakref.WeakKeyDictionary[LlamaContext, weakref.ref[PrefixCache]] = (
    weakref.WeakKeyDictionary()
)


class PrefixCache(Closing):
    """Sequences of one context that begin with the longest prefix that is known.

    `sequence` takes a prompt. What a sequence in use has of it is forked, token by token; what
    earlier ones evaluated is restored from memory, where every token is stored once however many
    sequences share it. Closing a sequence gives the cache what it evaluated.

    Parameters
    ----------
    context
        Where it is evaluated; a context has one cache at most.
    block_size
        Tokens per block: what is named, evicted and written to tiers as one.
    ram_bytes
        Upper bound on the bytes that are kept outside the context: cells and states, the cache's
        own accounts, events that wait, and buffers for the next blocks. What sequences in use and
        pins hold stays, even above.
    policy
        What leaves first when they are used up: a name of `pykvcache.prefix.policies`, or an
        object.
    namespace
        The default of `sequence`. Namespaces never share anything.
    keep_logits
        Keep the logits after each prompt, too: an exact repeat then needs no decode.
    checkpoint_bytes
        Upper bound on the bytes of the checkpoints of sequences in use.
    tiers
        Where blocks go besides memory, and come from where memory does not have them, the nearest
        first: folders, addresses such as ``"redis://host"``, or stores of
        `pykvcache.prefix.stores`.
    secret
        At least 16 bytes that only trusted writers and readers know: blocks in tiers are then
        encrypted, and only those are taken. Needs ``pykvcache[crypto]``.
    tier_seconds
        For how long a request waits for the tiers at most. Default: a tenth of what evaluating is
        thought to take, and only where loading is thought to take no longer than that.
    queue_bytes
        Upper bound on the bytes that wait to be written, per tier; default: half of ``ram_bytes``,
        and at least 64 MiB. What is over is not written, and counted.

    Raises
    ------
    ValueError
        The context has a cache already, or a value is out of range.
    UnsupportedOperation
        Nothing can be taken out of this memory, or tiers cannot keep what comes out of it.

    Examples
    --------
    >>> from pykvcache import LlamaContext, LlamaModel, PrefixCache, embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
    ...     cache = PrefixCache(ctx, block_size=16)
    ...     with cache.sequence("Once upon a time there was a little village by the sea.") as one:
    ...         text = "".join(one.stream(20))
    ...     two = cache.sequence("Once upon a time there was a little village in the hills.")
    ...     two.reuse.ram > two.reuse.evaluated
    True
    """

    def __init__(
        self,
        context: LlamaContext,
        *,
        block_size: SupportsIndex = 64,
        ram_bytes: SupportsIndex = 1 << 30,
        policy: str | Policy = DEFAULT,
        namespace: str = "",
        keep_logits: bool = False,
        checkpoint_bytes: SupportsIndex = 256 << 20,
        tiers: Sequence[TierInput] = (),
        secret: bytes | str | None = None,
        tier_seconds: float | None = None,
        queue_bytes: SupportsIndex | None = None,
    ) -> None:
        LlamaSequence(context).close()  # raises what a sequence of this context would
        self._ctx = context
        self._pool = pool_of(context)
        self._block_size = as_int(block_size, "block_size", 1, 2**20)
        self._namespace = as_namespace(namespace)
        self._keep_logits = as_bool(keep_logits, "keep_logits")
        most = as_int(ram_bytes, "ram_bytes", 0, 2**62)
        self._memory = CacheMemory(
            context,
            self._block_size,
            most,
            node_bytes=NODE_BYTES,
            chunk_bytes=CHUNK_BYTES,
            overhead=Envelope.overhead,
        )
        self._digests = self._memory.digests()
        self._checkpoints = BlockCheckpoints(
            as_int(checkpoint_bytes, "checkpoint_bytes", 0, 2**62),
            self._memory.spacing,
            self._block_size,
            self._memory.shape.needs_state,
            self._memory.n_window_cells,
        )
        stores = as_tiers(tiers, can_check=self._memory.has_layout)
        wait = as_wait(tier_seconds, "tier_seconds", 3600)
        self._events = EventLog(min(most // 32, 16 << 20), later=self._pool.later)
        self._blocks = BlockCache(
            self._memory.shape, most, policy, self._root_name, self._events, self._memory
        )
        other = _caches.get(context, lambda: None)()
        if other is not None and not other.is_closed:
            raise ArgumentError("the context has a PrefixCache already: close it first", "context")
        evaluation = EvaluationTime(least_seconds(context))
        envelope = Envelope(
            model=self._digests["model"],
            layout=self._digests["layout"],
            secret=secret,
            memory=self._memory.take,
        )
        self._link = TierLink(
            Tiers(
                stores,
                envelope,
                as_queue_bytes(queue_bytes, most),
                self._events.add,
                _progress_of(context),
                # What waits stays in memory, whatever leaves for it.
                most // 4 or None,
            ),
            context,
            self._memory,
            self._blocks,
            self._root_name,
            evaluation,
            wait,
            keep_logits=self._keep_logits,
        )
        self._live, self._pins = LiveIndex(), Pins(self._pool, self._blocks)
        self._prefetches = Prefetches()
        self._sums = ReuseReport()
        self._requests = self._hits = 0
        self._is_closed = False
        if len(self._link):
            self._pool.note_time = evaluation.note
            _open_caches[self] = os.getpid()
            weakref.finalize(self, self._link.tiers.retire).atexit = False
        _caches[context] = weakref.ref(self)

    @property
    def context(self) -> LlamaContext:
        """The context it belongs to."""
        return self._ctx

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def keep_logits(self) -> bool:
        """Whether the logits after each prompt are kept."""
        return self._keep_logits

    @property
    def events(self) -> EventLog:
        """What was stored and removed: iterate over it, or subscribe to it."""
        return self._events

    # Sequences ----------------------------------------------------------------------------------

    def sequence(
        self,
        prompt: str | TokenInput | None = None,
        *,
        namespace: str | None = None,
        boundaries: Iterable[SupportsIndex] = (),
        priority: SupportsIndex = 0,
    ) -> CachedSequence:
        """Return a sequence that begins with the longest known prefix of a prompt.

        Evaluates nothing: what is not known is evaluated when its logits are needed. `reuse`
        of the sequence says where its tokens came from.

        Parameters
        ----------
        prompt
            Text (with the model's special tokens), token ids, or None.
        namespace
            Whose prefixes to share; default: the cache's.
        boundaries
            Numbers of tokens after which messages end: recurrent memories keep states there, since
            other prompts are likely to part there.
        priority
            Of what the sequence gives to the cache: components of lower priority leave first.

        Raises
        ------
        TypeError, ValueError
            An argument is wrong; a boundary is beyond the prompt.
        """
        sequence = self.open(prompt, namespace, boundaries=boundaries, priority=priority)
        search = sequence.search
        if search is not None:
            search.wait()
            with self._pool.hold():
                self._settle(sequence)
        return sequence

    def open(
        self,
        prompt: str | TokenInput | None,
        namespace: str | None = None,
        *,
        boundaries: Iterable[SupportsIndex] = (),
        priority: SupportsIndex = 0,
        is_request: bool = True,
        search: bool = True,
    ) -> CachedSequence:
        """Return a sequence as `sequence` does, without waiting for tiers.

        For a generator, which asks `is_ready` until the sequence need not wait for its tiers.

        Parameters
        ----------
        prompt, namespace, boundaries, priority
            As for `sequence`.
        is_request
            Whether it counts in `stats`.
        search
            Whether the tiers are asked.
        """
        rank = as_int(priority, "priority", -(2**31), 2**31 - 1)
        with self._pool.hold():
            self._check_open()
            space = self._namespace if namespace is None else as_namespace(namespace)
            cells = SequenceCells(self._pool, Ledger(), self._checkpoints)
            sequence = CachedSequence._made(self._ctx, cells)
            sequence._join(self, space)
            if prompt is not None:
                sequence.append(prompt)
            sequence.boundaries = as_boundaries(boundaries, len(sequence))
            sequence.priority = rank
            self._begin(sequence)
            self._live.add(sequence)
            if is_request and prompt is not None:
                sequence.is_counted = True
                self._count(sequence, ReuseReport())
                self._requests += 1
                self._tell_lookup(sequence)
            if search:
                self.seek(sequence)
        return sequence

    def _begin(self, sequence: CachedSequence) -> None:
        """Let a sequence of which nothing was evaluated begin with what is known."""
        ids = sequence.cells.ledger.part(0, len(sequence))
        if not len(ids):
            return
        tokens, space = ids.tobytes(), sequence.namespace
        self._pins.expire()
        live = self._live.look_up(ids, space, sequence)
        row = None if live.parent is None else _row_of(live.parent, live.n, len(ids))
        with self._blocks.change():
            match = self._blocks.match(tokens, space)
            known, after = match.n, match.next_token()
            begin, resume = plan_begin(self._blocks.tree, match, live, len(ids), row)
            self._blocks.tree.use(match, resume, sequence.priority)
            self._blocks.hold(sequence, match, resume)
            cells = self._cells_of(match, resume)
        forked = self._execute(sequence, begin, cells)
        usable = sequence.usable
        if self._memory.shape.needs_state:
            sequence.cells.branches = {*sequence.boundaries, max(known, live.agrees)}
        self._report(sequence, ids, usable, forked, live, known, after)

    def _cells_of(self, match: Match, resume: Resume) -> Cells:
        """Return what is in memory of the tokens before a place."""
        first, window = resume.n, list[Any]()
        if resume.window_first < resume.n:
            first, window = match.chunks(Kind.WINDOW, resume.window_first, resume.n)
        state = None if resume.state is None else resume.state.chunks[0].state
        _, attention = match.chunks(Kind.ATTENTION, 0, resume.n)
        return Cells(resume.n, attention, window, first, state)

    def _execute(self, sequence: CachedSequence, begin: Begin, stored: Cells) -> bool:
        """Do what was planned: the only part that touches the memory. Returns whether it forked."""
        cells = sequence.cells
        if begin.parent is not None:
            begin.parent.cells.fork_into(cells, begin.n)
            cells.row = begin.row
            if sequence.usable >= stored.n:
                return True
            cells.release()  # no id was free, and what is parked cannot be cut so far
        if stored.n:
            cells.state = PutBack(
                partial(self._memory.put, cells=stored), self._memory.least_cut(stored)
            )
            cells.ledger.n_evaluated = stored.n
            if stored.state is not None:
                cells.points.add_state(stored.n, stored.state)
            if begin.parent is None:
                cells.row = begin.row
        return False

    def _report(
        self,
        sequence: CachedSequence,
        ids: IntArray,
        usable: int,
        forked: bool,
        live: Live,
        known: int,
        after: int | None,
    ) -> None:
        """Say where the tokens of a prompt come from, and why there are no more."""
        n = len(ids)
        at, other = None, None
        if live.nearest is not None and live.agrees >= known:
            theirs = live.nearest.cells.ledger
            if live.agrees < min(n, len(theirs)):
                at, other = live.agrees, theirs.token_at(live.agrees)
        elif known < n and after is not None:
            at, other = known, after
        difference = None
        if at is not None and other is not None:
            difference = Difference(self._ctx.model, ids, at, other)
        shape = self._memory.shape
        reason = Reason(
            n,
            max(known, live.agrees),
            usable,
            difference,
            "state" if shape.needs_state else "window" if shape.window_start else "",
            max(known, live.n),
        )
        if live.nearest is not None and live.agrees >= known:
            fresh = live.nearest.cells.n_fresh
            if fresh < live.agrees:
                reason.pending = fresh
                reason.shifted = live.nearest.cells.ledger.shifted_at is not None
        sequence.set_report(
            ReuseReport(
                n,
                live=usable if forked else 0,
                ram=0 if forked else usable,
                evaluated=n - usable,
                first_difference=at,
            ),
            reason,
        )

    def joined(self, sequence: CachedSequence, parent: CachedSequence) -> None:
        """Take note of a fork: it holds what its parent does."""
        if parent in self._live:  # and was not cleared
            self._live.add(sequence)
            with self._blocks.change():
                self._blocks.hold_as(sequence, parent)

    def serves(self, sequence: LlamaSequence) -> bool:
        """Return whether a sequence is one of this cache, and was not cleared."""
        return sequence in self._live

    def renew(self, sequence: CachedSequence) -> None:
        """Begin again with what was evaluated since, where that is more; the lock is held."""
        cells = sequence.cells
        if cells.ledger.shifted_at is not None or sequence not in self._live:
            return
        known, n = sequence.usable, len(cells.ledger)
        if known >= n - 1:
            return
        ids = cells.ledger.part(0, n)
        if self._live.look_up(ids, sequence.namespace, sequence).n <= known:
            match = self._blocks.match(ids.tobytes(), sequence.namespace)
            if self._blocks.tree.resume(match, n - 1).n <= known:
                return
        old = sequence.report
        cells.release()
        self._begin(sequence)
        self._count(sequence, old)

    # What sequences give --------------------------------------------------------------------------

    def give(self, sequence: CachedSequence, keep: int | None) -> None:
        """Keep what a sequence evaluated: called when it is closed, with the pool's lock."""
        self._pins.expire()
        self.cancel_search(sequence)
        is_live = sequence in self._live
        self._live.discard(sequence)
        if self._is_closed or not is_live:
            return
        cells = sequence.cells
        n = cells.n_fresh if keep is None else min(keep, cells.n_fresh)
        tokens = cells.ledger.part(0, n).tobytes()
        is_kept = n > 0 and (self._blocks.max_bytes > 0 or len(self._link) > 0)
        source = self._source(sequence, tokens, n) if is_kept else None
        with self._blocks.change() as actions:
            if source is not None:
                n = min(n, cells.n_fresh)
                tokens = tokens[: n * TOKEN_SIZE]
                match = self._blocks.match(tokens, sequence.namespace)
                offer = source.offer(
                    n,
                    match,
                    ends=[sequence.report.n_tokens, *sequence.boundaries],
                    row=cells.row if self._keep_logits and n == len(sequence) else None,
                    priority=sequence.priority,
                )
                if self._blocks.max_bytes:
                    admit(self._blocks, source, tokens, sequence.namespace, offer, actions)
                self._write(sequence, tokens, n, source, offer.states)
            elif is_kept:
                self._write(sequence, tokens, n, None, {})
            self._blocks.release(sequence)

    def _source(self, sequence: CachedSequence, tokens: bytes, n: int) -> LiveCells | None:
        """Return where cells of a sequence are read from; None where memory has them already."""
        cells = sequence.cells
        if cells.seq_id is None:
            match = self._blocks.match(tokens, sequence.namespace)
            if self._blocks.tree.resume(match, n).n == n:
                return None
        try:
            cells.attach()
        except (KvCacheError, MemoryError):
            return None  # a cache that cannot keep something goes without it
        return LiveCells(self._memory, cells) if cells.n_fresh else None

    def _write(
        self,
        sequence: CachedSequence,
        tokens: bytes,
        n: int,
        source: LiveCells | None,
        states: dict[int, EndState],
    ) -> None:
        if len(self._link):
            ends = [end for end in (sequence.report.n_tokens, *sequence.boundaries, n) if end <= n]
            self._link.write(tokens, sequence.namespace, ends, source, states)

    # Tiers ----------------------------------------------------------------------------------------

    @property
    def has_tiers(self) -> bool:
        """Whether there are stores below its memory."""
        return len(self._link) > 0

    def seek(self, sequence: CachedSequence) -> None:
        """Begin to look for a prompt in the tiers, once; `is_ready` says when to wait no longer."""
        if not sequence.is_searched:
            sequence.is_searched = True
            tokens = sequence.cells.ledger.part(0, len(sequence)).tobytes()
            sequence.search = self._link.search(
                tokens, sequence.namespace, sequence.usable, _deliver_to(self)
            )

    def is_ready(self, sequence: CachedSequence) -> bool:
        """Return whether a request need not wait for the tiers; it begins with what has come."""
        self.seek(sequence)
        if sequence.search is None:
            return True
        if sequence.search.left > 0:
            return False
        self._settle(sequence)
        return True

    def patience(self, sequence: CachedSequence) -> float:
        """Return for how many seconds a request should wait at most; 0 where that is over."""
        return 0.0 if sequence.search is None else sequence.search.left

    def cancel_search(self, sequence: CachedSequence) -> None:
        """Stop the search of a request that has ended."""
        search, sequence.search = sequence.search, None
        if search is not None:
            search.load.cancel()

    def _settle(self, sequence: CachedSequence) -> None:
        """Let a sequence begin with what has come of its search."""
        search, sequence.search = sequence.search, None
        if search is None or not search.load.leave():
            return  # what comes later is delivered
        load = search.load
        if sequence not in self._live or sequence.is_closed or load.found.n <= sequence.usable:
            return
        old = sequence.report
        self._link.keep(load, sequence)
        sequence.cells.release()
        self._begin(sequence)
        new = sequence.report
        # Of what comes from memory now, so much came from the tiers.
        come = {medium: load.found.count(medium, self._block_size) for medium in ("disk", "remote")}
        remote = min(come["remote"], new.ram)
        disk = min(come["disk"], new.ram - remote)
        sequence.set_origin(disk=disk, remote=remote)
        self._count(sequence, old)

    def _deliver(self, load: Load) -> None:
        """Keep what came too late for its request; in the thread that loaded it."""
        with self._pool.hold():
            if not self.is_closed and self._blocks.max_bytes:
                self._link.keep(load)

    def prefetch(self, tokens: str | TokenInput, *, namespace: str | None = None) -> Prefetch:
        """Bring what the tiers have of a prompt to memory, in a thread of its own.

        A hint, for a prompt that is expected: nothing depends on it. What comes is checked as
        ever, counts towards ``ram_bytes``, and stays as long as the policy lets it; no more is
        read than fits there. What goes wrong in a tier is a counter.

        Parameters
        ----------
        tokens
            The prompt: text (with the model's special tokens) or token ids.
        namespace
            Whose; default: the cache's.

        Returns
        -------
        Prefetch
            With ``wait``, ``cancel`` and ``n_tokens``.

        Raises
        ------
        ClosedError
            The cache is closed.
        TypeError, ValueError
            The tokens are none of this model.
        """
        with self._pool.hold():
            self._check_open()
            space = self._namespace if namespace is None else as_namespace(namespace)
            ids = as_tokens(self._ctx, tokens)[: self._ctx.n_ctx_seq]
            one = Prefetch(ids.tobytes(), space)
        if self.has_tiers and self._blocks.max_bytes and len(ids) >= self._block_size:
            self._prefetches.add(one, weakref.ref(self))
        else:
            one.end()
        return one

    def bring(self, one: Prefetch) -> None:
        """Load what the tiers have of a prompt, as far as it fits; in a thread for that."""
        with self._pool.hold():
            if self.is_closed:
                return
            match = self._blocks.match(one.tokens, one.namespace)
            known = self._blocks.tree.resume(match, match.n).n
            cell = max(1, self._memory.shape.attention_bytes + CHUNK_BYTES // self._block_size)
            most = self._blocks.max_bytes // cell
            load = self._link.tiers.load(
                self._link.wanted(one.tokens, one.namespace, known, most), lambda load: None
            )
        one.load = load
        if not one.is_cancelled:
            load.run()
        with self._pool.hold():
            if not self.is_closed and not one.is_cancelled and load.found.n:
                self._link.keep(load)
                match = self._blocks.match(one.tokens, one.namespace)
                one.n_tokens = max(0, self._blocks.tree.resume(match, match.n).n - known)

    # Names ----------------------------------------------------------------------------------------

    def _root_name(self, namespace: str) -> bytes:
        return root_name(**self._digests, block_size=self._block_size, namespace=namespace)

    # Care -----------------------------------------------------------------------------------------

    def pin(
        self, tokens: str | TokenInput, *, ttl: float | None = None, namespace: str | None = None
    ) -> Pin:
        """Keep what is known of a prefix, whatever the policy would evict.

        Parameters
        ----------
        tokens
            The prefix.
        ttl
            Seconds after which it may leave; None keeps it until `Pin.release`.
        namespace
            Whose; default: the cache's.

        Returns
        -------
        Pin
            With ``n_tokens``: how many tokens of it are kept.

        Raises
        ------
        ValueError
            ``ttl`` is negative or not a number.
        """
        with self._pool.hold():
            self._check_open()
            space = self._namespace if namespace is None else as_namespace(namespace)
            ids = as_tokens(self._ctx, tokens)
            until = None if ttl is None else time.monotonic() + as_seconds(ttl, "ttl")
            return self._pins.add(ids.tobytes(), space, until)

    def forget(self, tokens: str | TokenInput, *, namespace: str | None = None) -> None:
        """Drop some tokens, all that goes on from them, and all that only they need.

        In memory and in tiers. What sequences in use and pins hold stays.

        Parameters
        ----------
        tokens
            The tokens, such as those of a conversation that was deleted.
        namespace
            Whose; default: the cache's.
        """
        with self._pool.hold():
            self._check_open()
            space = self._namespace if namespace is None else as_namespace(namespace)
            data = as_tokens(self._ctx, tokens).tobytes()
            with self._blocks.change() as actions:
                self._blocks.forget(data, space)
            self._link.forget(actions.removed, data, space)

    def clear(self, namespace: str | None = None) -> None:
        """Forget everything, or all of one namespace; sequences in use keep what they have.

        What those evaluated is not shared with later ones, either. Tiers lose what waits to be
        written; what they have stays there: ``pykvcache cache clear`` empties them. Events that
        wait lose its tokens.
        """
        with self._pool.hold():
            self._check_open()
            space = None if namespace is None else as_namespace(namespace)
            tiers = self._link.tiers
            with self._blocks.change():
                self._blocks.clear(space)
            tiers.cancel(space)
            tiers.say_again(self._events.withdraw(space))
            for sequence in self._live.remove(space):
                self.cancel_search(sequence)
                with self._blocks.change():
                    self._blocks.release(sequence)
            if space is None:
                tiers.forget_notices()
                self._events.add(AllBlocksCleared())

    def tree(self, namespace: str | None = None) -> CacheTree:
        """Return what is kept in memory, as a tree: ``print(cache.tree())``.

        Parameters
        ----------
        namespace
            Whose; default: all of them.
        """
        wanted = None if namespace is None else as_namespace(namespace)
        with self._pool.hold():
            self._check_open()
            return view_tree(self._blocks.tree, self._ctx.model, wanted)

    def plot(self, namespace: str | None = None) -> Figure:
        """Draw what is kept: tokens from left to right, branches below each other.

        Needs ``pykvcache[plot]``. The darker, the more often used; framed is what sequences in use
        and pins hold; hatched is what comes after the last full block of a prompt.

        Parameters
        ----------
        namespace
            Whose; default: all of them.

        Returns
        -------
        matplotlib.figure.Figure
            Not registered with pyplot: ``figure.savefig("tree.svg")``; notebooks show it.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        blocks = self._blocks
        title = (
            f"{blocks.tree.n_blocks:,} blocks of {self._block_size} tokens, "
            f"{blocks.nbytes / 2**20:,.1f} of {blocks.max_bytes / 2**20:,.1f} MiB"
        )
        return plot_tree(self.tree(namespace), title)

    # Figures --------------------------------------------------------------------------------------

    def _count(self, sequence: CachedSequence, old: ReuseReport) -> None:
        """Count what the report of a request says now, in place of what it said before."""
        if sequence.is_counted:
            new = sequence.report
            self._sums = self._sums.plus(new).plus(old, -1)
            self._hits += (new.evaluated < new.n_tokens) - (old.evaluated < old.n_tokens)

    def _tell_lookup(self, sequence: CachedSequence) -> None:
        """Report a lookup to those who subscribed to them."""
        n = len(sequence)
        if self._events.hears_lookups and n:
            tokens = sequence.cells.ledger.part(0, n).tobytes()
            root, step = self._root_name(sequence.namespace), self._block_size * TOKEN_SIZE
            names = tuple(block_names(root, tokens, step))
            self._events.looked_up(Lookup(names, n, self._block_size))

    def stats(self) -> CacheStats:
        """Return the figures since the cache was made."""
        with self._pool.hold():
            sums, blocks = self._sums, self._blocks
            return CacheStats(
                requests=self._requests,
                n_tokens=sums.n_tokens,
                live=sums.live,
                ram=sums.ram,
                disk=sums.disk,
                remote=sums.remote,
                evaluated=sums.evaluated,
                ram_bytes=blocks.nbytes,
                ram_blocks=blocks.tree.n_blocks,
                ram_checkpoints=blocks.n_states,
                max_ram_bytes=blocks.max_bytes,
                stored=blocks.stored,
                removed=blocks.removed,
                tiers=self._link.tiers.stats(),
                hits=self._hits,
            )

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until what is queued is written to the tiers; False if that takes longer.

        False at once, too, in a subscriber that the writing thread calls.

        Parameters
        ----------
        seconds
            For how long at most; None for as long as it takes.
        """
        self._check_open()  # without the lock: another thread may be evaluating for long
        return self._link.tiers.flush(as_wait(seconds, "seconds"))

    # Life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Forget everything; its sequences go on as plain ones. Twice does nothing.

        Tiers get what the sequences in use have evaluated, and what waits is written, for 30
        seconds at most.
        """
        with self._pool.hold():
            if self._is_closed:
                return
            if not self._ctx.is_closed:
                for sequence in self._live:
                    if len(self._link) and not sequence.is_closed:
                        with contextlib.suppress(DeviceLost):
                            self.give(sequence, None)
            with self._blocks.change():
                self._blocks.clear(None)
            self._is_closed = True
            self._prefetches.cancel()
            self._live.remove(None)
            self._memory.close()
        self._link.tiers.close()

    @property
    def is_closed(self) -> bool:
        """Whether it, or its context, was closed."""
        return self._is_closed or self._ctx.is_closed

    def _check_open(self) -> None:
        if self._ctx.is_closed:
            raise ClosedError("the context of this cache is closed")
        if self._is_closed:
            raise ClosedError("the cache is closed")

    def __repr__(self) -> str:
        if self.is_closed:
            return "<PrefixCache (closed)>"
        blocks = self._blocks
        return (
            f"<PrefixCache: {blocks.tree.n_blocks} blocks of {self._block_size} tokens, "
            f"{blocks.nbytes:,} of {blocks.max_bytes:,} bytes>"
        )


def _row_of(parent: CachedSequence, n: int, n_tokens: int) -> Row | None:
    """Return the logits after a whole prompt, where a sequence in use has them."""
    if n < n_tokens:
        return None
    cells = parent.cells
    if n == len(parent) and cells.row is not None:
        return cells.row
    row = cells.points.row
    return row[1] if row is not None and row[0] == n else None


def _progress_of(ctx: LlamaContext):  # type: ignore[no-untyped-def]
    """Return what tells how many tokens were evaluated; it does not keep the context alive."""
    ref = weakref.ref(ctx)

    def progress() -> int:
        context = ref()
        return 0 if context is None else context.tokens_evaluated

    return progress


def _deliver_to(cache: PrefixCache):  # type: ignore[no-untyped-def]
    """Return what takes a load that comes too late; it does not keep the cache alive."""
    ref = weakref.ref(cache)

    def deliver(load: Load) -> None:
        if (found := ref()) is not None:
            found._deliver(load)

    return deliver


# Caches with tiers, and the process that made each: a forked child has none of its threads.
_open_caches: weakref.WeakKeyDictionary[PrefixCache, int] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    for cache, pid in list(_open_caches.items()):
        if pid == os.getpid():
            with contextlib.suppress(Exception):
                cache.close()
