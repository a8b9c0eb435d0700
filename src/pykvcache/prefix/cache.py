"""PrefixCache: evaluate what is new, and nothing else."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from pykvcache._convert import TokenInput, as_bool, as_int
from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.errors import ArgumentError
from pykvcache.prefix.blocks import root_name, token_bytes
from pykvcache.prefix.buffers import BufferPool
from pykvcache.prefix.digests import digests, end_bytes, least_seconds, progress_of
from pykvcache.prefix.events import AllBlocksCleared, EventLog
from pykvcache.prefix.exits import EndMethods, close_at_exit
from pykvcache.prefix.in_use import InUse
from pykvcache.prefix.options import (
    as_ledger,
    as_namespace,
    as_queue_bytes,
    as_seconds,
    as_tiers,
    as_wait,
)
from pykvcache.prefix.outline import OutlineMethods
from pykvcache.prefix.pins import Pin, Pins
from pykvcache.prefix.policies import DEFAULT, Policy
from pykvcache.prefix.prefetch import PrefetchMethods, Queue
from pykvcache.prefix.ram import RamTier
from pykvcache.prefix.reuse import CacheStats, ReuseReport
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import Envelope
from pykvcache.prefix.tiers.speeds import EvaluationTime
from pykvcache.prefix.tiers.stack import TierInput, Tiers
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import BlockCheckpoints
from pykvcache.sequence.ledger import Ledger
from pykvcache.sequence.pool import pool_of
from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["PrefixCache"]

_caches: weakref.WeakKeyDictionary[LlamaContext, weakref.ref[PrefixCache]] = (
    weakref.WeakKeyDictionary()
)


class PrefixCache(PrefetchMethods, OutlineMethods, EndMethods):
    """Sequences of one context that begin with the longest prefix that is known.

    `sequence` takes a prompt. What a sequence in use has of it is forked, token by token; what
    earlier ones evaluated comes from blocks in memory, each stored once however many sequences
    share it. Closing a sequence gives the cache what it evaluated. Windows, recurrent and hybrid
    memories keep checkpoints at the ends of blocks and prompts.

    Parameters
    ----------
    context
        Where it is evaluated; a context has one cache at most.
    block_size
        Tokens per block.
    ram_bytes
        Most bytes that are kept outside the context: the cache's own accounts, waiting events and
        memory for the next blocks included. What sequences in use and pins hold stays, even above.
    policy
        What goes first when they are used up: a name of `pykvcache.prefix.policies`, or an object.
    namespace
        The default of `sequence`. Namespaces never share anything.
    keep_logits
        Keep the logits after each prompt, too: an exact repeat then needs no decode.
    checkpoint_bytes
        Most bytes of the checkpoints of sequences in use.
    tiers
        Where blocks go beside memory, and come from where memory does not have them, the nearest
        first: folders, addresses such as ``"redis://host"``, or stores of
        `pykvcache.prefix.stores`.
    secret
        At least 16 bytes that only trusted writers and readers know: blocks in tiers are then
        encrypted, and others' are not taken. Needs ``pykvcache[crypto]``.
    tier_seconds
        For how long a request waits for the tiers at most. Default: 3.5 % of what evaluating
        is thought to take, and only where loading is thought to take less than half of it; what
        comes later is used where evaluation meets it, and tiers that are too slow are left alone.
    queue_bytes
        Most bytes that may wait to be written, per tier; default: half of ``ram_bytes``, and at
        least 64 MiB. What is over is not written, and counted.

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
        self._block_size = as_int(block_size, "block_size", 1, 2**20)
        self._namespace = as_namespace(namespace)
        self._keep_logits = as_bool(keep_logits, "keep_logits")
        self._ctx = context
        self._native = context.native
        self._cell_bytes = self._native.block_bytes()
        self._layout = self._native.block_layout()
        self._needs_rest = self._native.has_rest
        self._can_cut = context.memory_info.can_remove_partial
        self._points = BlockCheckpoints(
            max_bytes=as_int(checkpoint_bytes, "checkpoint_bytes", 0, 2**62),
            block_size=self._block_size,
        )
        self._digests = digests(context)
        self._end_bytes = end_bytes(context)
        most = as_int(ram_bytes, "ram_bytes", 0, 2**62)
        stores = as_tiers(tiers, can_check=self._native.has_layout)
        self._pool = pool_of(context)
        self._events = EventLog(
            min(most // 32, 16 << 20), has_room=len(stores) > 0, later=self._pool.later
        )
        size = self._block_size * self._cell_bytes + Envelope.overhead
        self._evicted = self._excess = 0
        self._trim_bytes = max(most // 8, 4 << 20)
        buffers = self._buffers = BufferPool(size, min(most // 8, 64 << 20))
        self._ram = RamTier(
            self._block_size,
            most,
            policy,
            self._root_name,
            self._events,
            lambda: self._tiers.forget_notices(),
            lambda: self._events.nbytes,
            release=self._count_evicted,
            room=lambda: self._events.room,
            copy=self._layout.copy_cells,
        )
        self._evaluation = EvaluationTime(least_seconds(context))
        other = _caches.get(context, lambda: None)()
        if other is not None and not other.is_closed:
            raise ArgumentError("the context has a PrefixCache already: close it first", "context")
        self._tier_seconds = as_wait(tier_seconds, "tier_seconds", 3600)
        model, _, layout = self._digests
        self._tiers = Tiers(
            stores,
            Envelope(
                model=model, layout=layout, secret=secret, memory=lambda n: buffers.take(n).data
            ),
            as_queue_bytes(queue_bytes, most),
            self._events.add,
            progress_of(context),
            # What waits stays in memory, whatever leaves for it.
            most // 4 or None,
        )
        if len(self._tiers):
            self._pool.note_time = self._evaluation.note
        self._open = InUse()
        self._pins = Pins(self._ram, needs_rest=self._needs_rest)
        self._prefetches = Queue()
        self._sums = ReuseReport()
        self._requests = self._hits = 0
        self._closed = self._has_ended = False
        if len(self._tiers):
            close_at_exit(self)
            weakref.finalize(self, self._tiers.retire).atexit = False
        _caches[context] = weakref.ref(self)

    def _count_evicted(self, excess: int) -> bool:
        """Return the holes that small evicted blocks leave in the heap to the system at times."""
        self._evicted += max(0, self._excess - max(0, excess))
        self._excess = max(0, excess)
        if self._evicted > self._trim_bytes:
            self._evicted = 0
            lib.trim_memory()
        return False

    @property
    def context(self) -> LlamaContext:
        """The context it belongs to."""
        return self._ctx

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def events(self) -> EventLog:
        """What was stored and dropped: iterate over it, or subscribe to it."""
        return self._events

    # Sequences ------------------------------------------------------------------------------------

    def sequence(
        self, prompt: str | TokenInput | None = None, *, namespace: str | None = None
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
        """
        with self._pool.hold():
            sequence = self._new(prompt, namespace)
            sequence._is_searched = True
            search = self._search(sequence)
        if search is not None:
            self._await(sequence, *search)
        return sequence

    def _new(self, prompt: str | TokenInput | None, namespace: str | None = None) -> CachedSequence:
        """As `sequence`, of which the tiers are not asked; the pool's lock is held."""
        self._check_open()
        self._reap()
        space = self._namespace if namespace is None else as_namespace(namespace)
        cells = SequenceCells(self._pool, Ledger(), self._points)
        sequence = CachedSequence._made(self._ctx, cells)
        sequence._cache, sequence._namespace = self, space
        sequence._reuse = ReuseReport()
        if prompt is not None:
            sequence.append(prompt)
        self._begin(sequence)
        self._open.add(sequence)
        if prompt is not None:  # a sample that stands beside another one is no request
            self._count(sequence)
        return sequence

    def _joined(self, sequence: CachedSequence, parent: CachedSequence) -> None:
        if parent in self._open:  # and was not cleared
            self._open.add(sequence)

    # What sequences give ------------------------------------------------------------------------

    def _give(self, sequence: CachedSequence) -> None:
        """Keep what a sequence evaluated; called when it is closed."""
        self._reap()
        self._pins.expire()
        try:
            if not self._closed and sequence in self._open:
                self._keep(sequence)
        finally:
            self._sum(sequence)
            self._open.discard(sequence)
            self._evaluated(sequence)
            self._ram.release(sequence)

    def _reap(self) -> None:
        """Release what sequences held that are there no more."""
        self._ram.reap()
        self._tiers.reap()

    # Names -------------------------------------------------------------------------------------

    def _root_name(self, namespace: str) -> bytes:
        model, rope, layout = self._digests
        return root_name(
            model=model, rope=rope, layout=layout, block_size=self._block_size, namespace=namespace
        )

    # Care -----------------------------------------------------------------------------------------

    def pin(
        self, tokens: str | TokenInput, *, ttl: float | None = None, namespace: str | None = None
    ) -> Pin:
        """Keep what blocks have of a prefix, whatever the policy would evict.

        Parameters
        ----------
        tokens
            The prefix.
        ttl
            Seconds after which it may go; None keeps it until `Pin.release`.
        namespace
            Whose; default: the cache's.

        Returns
        -------
        Pin
            With ``n_tokens``: how many tokens of it are kept; of the last block perhaps the first
            ones alone, and none of what follows it.

        Raises
        ------
        ValueError
            ``ttl`` is negative or not a number.
        """
        with self._pool.hold():
            self._check_open()
            space = self._namespace if namespace is None else as_namespace(namespace)
            ids = as_ledger(self._ctx, tokens)
            data = token_bytes(ids.part(0, len(ids)).view(np.uint32))
            until = None if ttl is None else time.monotonic() + as_seconds(ttl, "ttl")
            return self._pins.add(self._pool, data, space, until)

    def clear(self, namespace: str | None = None) -> None:
        """Forget everything, or all of one namespace; sequences in use keep what they have.

        What those evaluated is not shared with later ones, either. Tiers lose what waits to be
        written; what they have stays there: ``pykvcache cache clear`` empties them. Events that
        wait lose its tokens; of what a tier is writing just then one may still come.
        """
        with self._pool.hold():
            self._check_open()
            space = None if namespace is None else as_namespace(namespace)
            self._ram.clear(space)
            self._buffers.trim()
            self._tiers.cancel(space)
            self._tiers.say_again(self._events.withdraw(space))
            self._open.part(space, self._end_search, self._ram.release)
            if space is None:
                self._tiers.forget_notices()
                self._events.add(AllBlocksCleared())

    def stats(self) -> CacheStats:
        """Return the figures since the cache was made."""
        if self._ram.is_busy and self._pool.lock._is_owned():
            return self._figures()  # a policy may look at them, too
        with self._pool.hold():
            self._ram.check()
            for sequence in self._open:
                self._sum(sequence)
            return self._figures()

    def _figures(self) -> CacheStats:
        sums, ram = self._sums, self._ram
        return CacheStats(
            requests=self._requests,
            n_tokens=sums.n_tokens,
            live=sums.live,
            ram=sums.ram,
            disk=sums.disk,
            remote=sums.remote,
            evaluated=sums.evaluated,
            ram_bytes=ram.nbytes,
            ram_blocks=ram.tree.n_blocks,
            ram_checkpoints=ram.n_checkpoints,
            max_ram_bytes=ram.max_bytes,
            stored=ram.stored,
            removed=ram.removed,
            tiers=self._tiers.stats(),
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
        self._check_open()  # without a turn: another thread may be evaluating for long
        return self._tiers.flush(as_wait(seconds, "seconds"))

    def __repr__(self) -> str:
        if self.is_closed:
            return "<PrefixCache (closed)>"
        ram = self._ram
        return (
            f"<PrefixCache: {ram.tree.n_blocks} blocks of {self._block_size} tokens, "
            f"{ram.nbytes:,} of {ram.max_bytes:,} bytes>"
        )
