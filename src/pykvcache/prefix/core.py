"""CacheCore: the flow of a request through a prefix cache, from lookup to storing."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import SupportsIndex

from pykvcache._arguments import TokenInput, as_int
from pykvcache.context import LlamaContext
from pykvcache.errors import ArgumentError, ClosedError, DeviceLost, KvCacheError
from pykvcache.prefix.block_cache import BlockCache, Read
from pykvcache.prefix.block_hash import TOKEN_SIZE, adapters_digest, block_names, space_of
from pykvcache.prefix.events import AllBlocksCleared, EventLog, Lookup
from pykvcache.prefix.lookup import PromptLookup
from pykvcache.prefix.memory import CacheMemory
from pykvcache.prefix.node import NO_STATE, EndState, Match, Offer
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.prefetch import Prefetch, Prefetches
from pykvcache.prefix.report import COUNTED, ReuseReport
from pykvcache.prefix.sequence import CachedSequence, Request
from pykvcache.prefix.stores import TierInput
from pykvcache.prefix.tier_link import CLOSE_SECONDS, TierLink
from pykvcache.prefix.tiers.loader import Load, Loaded
from pykvcache.prefix.tiers.writer import Writer
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.pool import pool_of

__all__ = ["CacheCore", "as_namespace"]

_cores: weakref.WeakKeyDictionary[LlamaContext, weakref.ref[CacheCore]] = (
    weakref.WeakKeyDictionary()
)


class CacheCore:
    """The internals of a `PrefixCache`, which sequences and generators call.

    The caller holds the sequence pool's lock in every method, unless its docstring says otherwise.
    Sequences keep this object alive after the `PrefixCache` is gone.
    """

    def __init__(
        self,
        context: LlamaContext,
        block_size: int,
        ram_bytes: int,
        *,
        policy: str | Policy,
        namespace: str,
        keep_logits: bool,
        checkpoint_bytes: int,
        stores: Sequence[TierInput],
        secret: bytes | str | None,
        tier_seconds: float | None,
        queue_bytes: int,
    ) -> None:
        other = _cores.get(context, lambda: None)()
        if other is not None and not other.is_closed:
            raise ArgumentError("the context has a PrefixCache already: close it first", "context")
        self.context, self.pool = context, pool_of(context)
        self.keep_logits, self.has_tiers = keep_logits, len(stores) > 0
        #: Number of requests, number of hits, and sums over their reports.
        self.n_requests = self.n_hits = 0
        self.sums = dict.fromkeys(COUNTED, 0)
        #: The requests of live sequences, the oldest first.
        self.live: weakref.WeakKeyDictionary[Request, None] = weakref.WeakKeyDictionary()
        self._memory = memory = CacheMemory(context, block_size, ram_bytes)
        self.events = EventLog(min(ram_bytes // 64, 16 << 20), later=self.pool.later)
        self.blocks = BlockCache(memory, ram_bytes, policy, self.events, self.pool)
        self.link = TierLink(
            context,
            self.blocks,
            stores,
            secret=secret,
            tier_seconds=tier_seconds,
            queue_bytes=queue_bytes,
            n_row=context.model.n_vocab if keep_logits else 0,
        )
        self._namespace = namespace
        self._checkpoints = memory.checkpoints(checkpoint_bytes)
        self._n_vocab, self._native = context.model.n_vocab, context.native
        self._adapters = set[bytes]()  # digests of all adapter sets used so far
        self._lookup = PromptLookup(context.model, self.blocks, self.live, self._adapters)
        self._prefetches = Prefetches()
        self._is_closed = False
        if self.has_tiers:
            self.pool.note_time = self.link.evaluation.note
            _writers.update(self.link.writers)
            weakref.finalize(self, self.link.retire).atexit = False
        _cores[context] = weakref.ref(self)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._memory.shape.block_size

    # Sequences ----------------------------------------------------------------------------------

    def open(
        self,
        prompt: str | TokenInput | None,
        namespace: str | None = None,
        *,
        boundaries: Iterable[SupportsIndex] = (),
        priority: int = 0,
        keep: int | None = None,
    ) -> CachedSequence:
        """Return a sequence that resumes from RAM or a live sequence; tiers are not searched.

        Arguments are as for `PrefixCache.sequence`; ``keep`` as for `CachedSequence.close`.
        """
        namespace = self.namespace(namespace)
        cells = SequenceCells(self.pool, self._checkpoints)
        request = Request(cells, namespace, namespace, priority)
        self._enter(request)
        sequence = CachedSequence._made(self.context, cells)
        sequence._core, sequence._request = self, request
        if prompt is not None and not cells.ledger.append_plain(prompt, self._n_vocab):
            sequence.append(prompt)
        if not isinstance(boundaries, tuple) or boundaries:
            request.boundaries = as_boundaries(boundaries, len(request))
        request.keep = keep
        if self.blocks.pins:
            self.blocks.expire_pins()
        self._lookup.begin(request)
        self.live[request] = None
        if prompt is not None:
            self._count_new(request)
        return sequence

    def open_beside(self, first: Request) -> CachedSequence:
        """Return a sequence of the same tokens, for another sample; it is not counted."""
        own = self.open(None, first.namespace, priority=first.priority, keep=first.keep)
        own._request.boundaries = first.boundaries
        own._request.cells.ledger.append(first.cells.ledger.tokens)
        return own

    def join(self, child: Request, parent: Request) -> None:
        """Register a fork: it holds the same components as its parent."""
        child.is_searched = True
        if parent in self.live:  # False after `clear`
            self.live[child] = None
            with self.blocks.change():
                self.blocks.hold_as(child, parent)
        live = child.usable
        child.report = ReuseReport(len(child), live=live, evaluated=len(child) - live)

    def renew(self, request: Request) -> None:
        """Look a waiting request up again; restart it if a longer prefix is cached by now."""
        old = request.report
        self._enter(request)
        if request in self.live and self._lookup.renew(request):
            self._count(request, old)

    def give(self, request: Request) -> None:
        """Store the evaluated tokens of a request, whose sequence is being closed."""
        if self._native.base_names or self._adapters:
            self._enter(request)
        if self.blocks.pins:
            self.blocks.expire_pins()
        if request.search is not None:
            self.cancel_search(request)
        if request in self.live:
            del self.live[request]
            self._store(request)

    def _store(self, request: Request, *, is_last: bool = True) -> None:
        """Store the new tokens of a request; release its hold if its sequence is closing."""
        cells, blocks, report = request.cells, self.blocks, request.report
        n = cells.n_fresh if blocks.max_bytes or self.has_tiers else 0
        if request.keep is not None:
            n = min(n, request.keep)
        read = self._reader(request, n) if n else None
        states: dict[int, EndState] = {}
        with blocks.change():
            n = min(n, cells.n_fresh)  # parked cells may have been lost
            tokens = cells.ledger.part(0, n).tobytes()
            if read is not None and n:
                match = blocks.tree.match(tokens, request.space)
                offer = self._offer(request, n, match)
                if blocks.max_bytes:
                    blocks.admit(read, tokens, match, request.space, offer)
                states = offer.states
            if n and self.has_tiers:
                ends = {at for at in (report.n_tokens, *request.boundaries, n) if at <= n}
                self.link.write(tokens, request.space, ends, read, states, report)
            if is_last and self.has_tiers:
                restored = min(report.ram + report.disk + report.remote, cells.n_fresh)
                if restored > n:  # refresh in the tiers what is not stored again
                    tokens = cells.ledger.part(0, restored).tobytes()
                    self.link.write(tokens, request.space, {restored}, None, {})
            if is_last:
                blocks.release(request)

    def _reader(self, request: Request, n: int) -> Read | None:
        """Return how to read a request's cells; None if RAM has them or they are unreadable."""
        cells, ledger, space = request.cells, request.cells.ledger, request.space
        if cells.seq_id is None and self._known(ledger.part(0, n).tobytes(), space) == n:
            return None
        try:
            cells.attach()
        except (KvCacheError, MemoryError):
            return None  # it is not stored, and no error is raised
        return partial(self._memory.read, cells)

    def _offer(self, request: Request, n: int, match: Match) -> Offer:
        """Return what a request can store for its first n tokens.

        Their cells must equal those of a fresh run. States that the tree has are not copied again.
        """
        cells, memory, n_prompt = request.cells, self._memory, request.report.n_tokens
        offer = Offer(n, ends=sorted({n_prompt, *request.boundaries}), priority=request.priority)
        if not memory.shape.is_plain:
            seq_id, points = cells.ledger.seq_id, cells.points
            windows = [*points.covered(), *memory.windows(seq_id)]
            offer.windows = [(first, min(last, n)) for first, last in windows if first < n]
            offer.states = {at: EndState(one) for at, one in points.states.items() if at <= n}
            is_missing = n not in offer.states and not match.end_at(n).has_state
            if memory.shape.needs_state and is_missing and n == cells.n_held:
                offer.states[n] = EndState(memory.read_state(seq_id))
        for at in {n, n_prompt} if self.keep_logits else ():
            if at <= n and (row := request.row_at(at)) is not None:
                offer.states[at] = EndState(offer.states.get(at, NO_STATE).state, row.copy())
        return offer

    # Tiers ----------------------------------------------------------------------------------------

    def seek(self, request: Request) -> None:
        """Start the search of the tiers, once per request; then poll `is_ready`."""
        if not request.is_searched:
            request.is_searched = True
            if self.has_tiers:
                deliver = weakref.WeakMethod(self.deliver)  # a search does not keep the cache alive
                # With one more token: a state after the shareable ones is of use if tokens follow.
                ledger = request.cells.ledger
                tokens = ledger.part(0, ledger.n_base + 1).tobytes()
                request.search = self.link.search(tokens, request.space, request.usable, deliver)

    def is_ready(self, request: Request) -> bool:
        """Start the search if needed; use its result and return True once it is over or late."""
        self.seek(request)
        if request.search is not None:
            if request.search.left > 0:
                return False
            self.settle(request)
        return True

    def cancel_search(self, request: Request) -> None:
        """Stop the search of a request that has ended."""
        search, request.search = request.search, None
        if search is not None:
            search.cancel()

    def settle(self, request: Request) -> None:
        """End a request's search, and restart the request from its result if that is longer."""
        search, request.search = request.search, None
        if search is None:
            return
        found, old = Loaded(), request.report
        if search.is_cancelled:
            obstacles = ["its tokens were forgotten during the search"]
        elif not search.leave():  # a late result goes to `deliver`
            obstacles = ["tiers had not answered in time"]
        else:
            found, obstacles = search.found, search.obstacles
        if request.reason is not None:
            request.reason.obstacles += obstacles
        if request not in self.live or found.n <= request.usable:
            return
        self._enter(request)
        self.link.keep(search, request)
        request.cells.release()
        self._lookup.begin(request)
        # Part of the tokens now restored from RAM came from the tiers.
        ram = request.report.ram
        remote = min(found.count("remote"), ram)
        disk = min(found.count("disk"), ram - remote)
        request.report = replace(request.report, ram=ram - disk - remote, disk=disk, remote=remote)
        self._count(request, old)

    def deliver(self, load: Load) -> None:
        """Store a result that is too late for its request; takes the lock, in the load's thread."""
        with self.pool:
            if not (self.is_closed or load.is_cancelled) and self.blocks.max_bytes:
                self.link.keep(load)

    def prefetch(self, one: Prefetch) -> None:
        """Queue a prefetch; end it at once without tiers, RAM budget or a full block."""
        n = len(one.tokens) // TOKEN_SIZE
        if self.has_tiers and self.blocks.max_bytes and n >= self.block_size:
            self._prefetches.add(one, weakref.ref(self))
        else:
            one.end()

    def load(self, one: Prefetch) -> None:
        """Run a prefetch, which loads as much as fits; takes the lock, in a thread."""
        with self.pool:
            if self.is_closed:
                return
            known = self._known(one.tokens, one.namespace)
            load = self.link.prefetch(one.tokens, one.namespace, known)
        one.load = load
        if not one.is_cancelled:
            load.run()
        with self.pool:
            if not self.is_closed and not one.is_cancelled and load.found.n:
                self.link.keep(load)
                one.n_tokens = max(0, self._known(one.tokens, one.namespace) - known)

    def _known(self, tokens: bytes, space: str) -> int:
        """Return after how many tokens of a prompt RAM can resume."""
        match = self.blocks.tree.match(tokens, space)
        return self.blocks.tree.resume(match, match.n).n

    # Maintenance ----------------------------------------------------------------------------------

    def forget(self, tokens: bytes, namespace: str) -> None:
        """Remove tokens, every continuation of them, and ancestors that no other prompt uses."""
        for space in self._spaces(namespace):
            with self.blocks.change():
                paths = [tokens, *self.blocks.tree.forget(tokens, space)]
            self._cancel(tokens, space)
            self.link.forget(paths, space)

    def clear(self, namespace: str | None) -> None:
        """Remove all tokens of a namespace, or of all namespaces."""
        for space in [None] if namespace is None else self._spaces(namespace):
            with self.blocks.change():
                self.blocks.clear(space)
            self._cancel(b"", space)
            self.link.clear(space)
        for request in list(self.live):
            if namespace not in (None, request.namespace):
                continue
            del self.live[request]
            self.cancel_search(request)
            with self.blocks.change():
                self.blocks.release(request)
        if namespace is None:
            self.link.forget_notices()
            self.events.add(AllBlocksCleared())

    def _cancel(self, tokens: bytes, space: str | None) -> None:
        self.link.cancel(tokens, space)
        self._prefetches.cancel(tokens, space)

    def _enter(self, request: Request) -> None:
        """Set a request's space to that of the adapters in use."""
        if self._native.base_names or self._adapters or request.namespace[:1] == "\0":
            request.space = self.current_space(request.namespace)

    def current_space(self, namespace: str) -> str:
        """Return the space of a namespace, with the adapters in use."""
        return space_of(namespace, self._note_adapters())

    def _spaces(self, namespace: str) -> list[str]:
        """Return the spaces of a namespace, with every set of adapters used so far."""
        self._note_adapters()
        return [space_of(namespace), *(space_of(namespace, one) for one in self._adapters)]

    def _note_adapters(self) -> bytes:
        digest = adapters_digest(self._native.base_names)
        if digest:
            self._adapters.add(digest)
        return digest

    # Statistics -----------------------------------------------------------------------------------

    def _count_new(self, request: Request) -> None:
        request.is_counted = True
        self.n_requests += 1
        self._count(request, ReuseReport())
        if self.events.listeners and (n := len(request)):
            tokens, root = request.shareable.tobytes(), self._memory.root(request.space)
            names = block_names(root, tokens, self.block_size * TOKEN_SIZE)
            self.events.looked_up(Lookup(tuple(names), n, self.block_size))

    def _count(self, request: Request, old: ReuseReport) -> None:
        """Replace a request's old report by its new one in the statistics."""
        if request.is_counted:
            new = request.report
            for name in COUNTED:
                self.sums[name] += getattr(new, name) - getattr(old, name)
            self.n_hits += (new.evaluated < new.n_tokens) - (old.evaluated < old.n_tokens)

    # Lifetime -------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the cache, and write to the tiers for at most `CLOSE_SECONDS`; takes the lock."""
        if self.end():
            self.link.close(CLOSE_SECONDS)

    def end(self) -> bool:
        """Empty the cache, and queue the tokens of live sequences for the tiers; takes the lock.

        Return False if that was done before.
        """
        if self._native.is_inherited:
            self._is_closed = True  # after os.fork() the child lacks the threads and the context
            return False
        with self.pool:
            if self._is_closed:
                return False
            if self.has_tiers and not self.context.is_closed:
                for request in self.live:
                    self._enter(request)
                    with contextlib.suppress(DeviceLost):
                        self._store(request, is_last=False)
            with self.blocks.change():
                self.blocks.clear(None)
            self._is_closed = True
            self._prefetches.cancel()
            self.live.clear()
            self._memory.close()
        return True

    @property
    def is_closed(self) -> bool:
        """Whether the cache or its context is closed."""
        return self._is_closed or self._native.is_closed

    def namespace(self, namespace: str | None) -> str:
        """Return a namespace, by default the cache's; raise `ClosedError` if it is closed."""
        self.check_open()
        return self._namespace if namespace is None else as_namespace(namespace)

    def check_open(self) -> None:
        """Raise `ClosedError` if the cache or its context is closed."""
        if self._native.is_closed:
            raise ClosedError("the context of this cache is closed")
        if self._is_closed:
            raise ClosedError("the cache is closed")


def as_namespace(namespace: str) -> str:
    """Return a namespace; raise TypeError unless it is a string."""
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be a str, not {type(namespace).__name__}")
    return namespace if type(namespace) is str else str.__str__(namespace)


def as_boundaries(boundaries: Iterable[SupportsIndex], n: int) -> tuple[int, ...]:
    """Return sorted, distinct numbers of tokens in [0, n]."""
    if isinstance(boundaries, str | bytes) or not isinstance(boundaries, Iterable):
        raise TypeError(f"boundaries must be a list of integers, not {type(boundaries).__name__}")
    return tuple(sorted({as_int(at, "a boundary", 0, n) for at in boundaries}))


#: The writers of all tiers: a writer's thread keeps it alive while its queue is not empty.
_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


@atexit.register
def _write_all() -> None:
    until = time.monotonic() + CLOSE_SECONDS
    ended = list[CacheCore]()
    for ref in list(_cores.values()):
        with contextlib.suppress(Exception):
            if (core := ref()) is not None and core.has_tiers and core.end():
                ended.append(core)
    for core in ended:  # their queues are written at the same time
        with contextlib.suppress(Exception):
            core.link.close(max(0.0, until - time.monotonic()))
    for writer in list(_writers):  # of garbage-collected caches
        writer.close(max(0.0, until - time.monotonic()))
