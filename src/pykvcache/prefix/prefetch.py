"""Bringing what the tiers have of a prompt to memory, before somebody asks for it."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from pykvcache._convert import TokenInput
from pykvcache.prefix.below import TierMethods
from pykvcache.prefix.blocks import block_names, token_bytes
from pykvcache.prefix.gather import gather, is_good
from pykvcache.prefix.options import as_ledger, as_namespace, as_seconds
from pykvcache.prefix.pieces import Buffer, cut
from pykvcache.prefix.tiers.fetch import Fetch, Span, Wanted
from pykvcache.prefix.tiers.tier import GROUP_BYTES

__all__ = ["Prefetch", "PrefetchMethods"]

#: How many may wait for their turn; more are given up at once.
MAX_WAITING = 1024


class Prefetch:
    """One request to bring a prompt to memory; `PrefixCache.prefetch` returns it.

    Attributes
    ----------
    n_tokens : int
        How many tokens of the prompt came so far.
    """

    def __init__(self, tokens: bytes, namespace: str) -> None:
        self.n_tokens = 0
        self._tokens, self._namespace = tokens, namespace
        self._is_cancelled = False
        self._done = threading.Event()
        self._worker: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing more will come; False where that takes longer.

        Parameters
        ----------
        seconds
            For how long at most; None for as long as it takes.
        """
        seconds = None if seconds is None else as_seconds(seconds, "seconds")
        if os.getpid() != self._pid:
            return self.is_done  # a forked child has no such thread
        until = math.inf if seconds is None else time.monotonic() + seconds
        while not self._done.wait(max(0.0, min(until - time.monotonic(), 0.5))):
            if time.monotonic() >= until:
                return False
            if self._worker is not None and not self._worker.is_alive():
                self._done.set()  # memory ended in the middle of it: no more will come
        return True

    def cancel(self) -> None:
        """Let it end after what is being read; what came stays."""
        self._is_cancelled = True

    def __repr__(self) -> str:
        state = "done" if self.is_done else "cancelled" if self._is_cancelled else "under way"
        return f"<Prefetch: {state}, {self.n_tokens} tokens came>"


class Queue:
    """What waits to be brought, and the thread that does so, which lives while something waits."""

    def __init__(self) -> None:
        self._waiting: deque[Prefetch] = deque()
        self._lock = threading.Lock()
        self._is_working = False
        self._worker: threading.Thread | None = None

    def add(self, cache: PrefetchMethods, one: Prefetch) -> None:
        """Let a prompt be brought after those that wait; given up where those are many."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                one._done.set()
                return
            self._waiting.append(one)
            if self._is_working and self._worker is not None and self._worker.is_alive():
                one._worker = self._worker
                return
            one._worker = worker = threading.Thread(
                target=self._work,
                name="pykvcache-prefetch",
                args=(weakref.ref(cache),),
                daemon=True,
            )
            self._is_working, self._worker = True, worker
            worker.start()

    def cancel(self) -> None:
        """Cancel all."""
        with self._lock:
            for one in self._waiting:
                one.cancel()

    def _work(self, ref: weakref.ref[PrefetchMethods]) -> None:
        while True:
            with self._lock:
                if self._worker is not threading.current_thread():
                    return  # an interrupt came while it was started, and it was given up
                if not self._waiting:
                    self._is_working = False
                    return
                one = self._waiting[0]
            try:
                if (cache := ref()) is not None and not one._is_cancelled:
                    cache._bring(one)
                del cache
            except Exception:  # nothing depends on it
                one.cancel()
            finally:
                with self._lock:
                    self._waiting.popleft()
                one._done.set()


class PrefetchMethods(TierMethods):
    """Reading ahead; part of `PrefixCache`."""

    _namespace: str
    _closed: bool
    _prefetches: Queue

    _check_open: Callable[[], None]

    def prefetch(self, tokens: str | TokenInput, *, namespace: str | None = None) -> Prefetch:
        """Bring what the tiers have of a prompt to memory, in a thread that nobody waits for.

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
            ledger = as_ledger(self._ctx, tokens)
            ids = ledger.part(0, min(len(ledger), self._ctx.n_ctx_seq))
            one = Prefetch(token_bytes(ids.view(np.uint32)), space)
        if not self.has_tiers or not self._ram.max_bytes or len(ids) < self._block_size:
            one._done.set()
        else:
            self._prefetches.add(self, one)
        return one

    def _bring(self, one: Prefetch) -> None:
        """Read a prompt's blocks from the front, in groups, and keep them; in the thread."""
        size, space, tokens = self._block_size, one._namespace, one._tokens
        with self._pool.hold():
            if self._closed:
                return
            begin = self._ram.n_blocks(tokens, space)
            most = self._ram.max_bytes // self._ram.block_cost(self._cell_bytes)
        n = len(tokens) // 4
        names = block_names(self._root_name(space), tokens, 4 * size)[:most]
        limit = n - 1 if self._needs_rest and not self._keep_logits else n
        fetch = Fetch(
            self._tiers.tiers,
            Wanted(
                tokens,
                names,
                size,
                self._cell_bytes,
                self._end_bytes,
                begin=begin,
                known=0 if self._needs_rest else begin * size,
                limit=limit,
                needs_rest=self._needs_rest,
                is_good=self._layout.is_good,
                n_row=self._n_row,
                wants_row=self._keep_logits,
                namespace=space,
            ),
        )
        spans = fetch.look()
        depth = fetch.n_blocks or 0
        if self._needs_rest:
            depth = 0 if fetch.end is None else fetch.end[0] // size
        step = max(1, GROUP_BYTES // max(1, fetch.wanted.block_bytes))
        for span in spans:
            for first in range(span.begin, min(span.end, depth), step):
                group = Span(span.tier, first, min(span.end, depth, first + step))
                if one._is_cancelled:
                    return
                fetch.read(group)
                # A window's blocks can be checked with its state only, all together.
                if not self._needs_rest and not self._bring_group(one, fetch, group):
                    return
        self._bring_rest(one, fetch, depth)

    def _bring_group(self, one: Prefetch, fetch: Fetch, group: Span) -> bool:
        """Keep the blocks of a group; False where there is no going on."""
        size, tokens, space = self._block_size, one._tokens, one._namespace
        first, last = group.begin, group.end
        bad: list[bytes] = []
        with fetch.lock:
            come = [fetch.blocks.pop(i, None) for i in range(first, last)]
        with self._pool.hold():
            if self._closed or self._ctx.is_closed or one._is_cancelled:
                return False
            good: list[Buffer] = []
            for i, block in enumerate(come):
                if block is None:
                    break
                buffer = np.frombuffer(block[0], np.uint8)
                if not is_good(self._native, (buffer, size, size), None):
                    bad.append(fetch.wanted.names[first + i])
                    break
                good.append(buffer)
            text = tokens[: 4 * size * (first + len(good))]
            known = self._ram.n_blocks(text, space)
            if known < first:
                return False  # what was before it had to go
            if known < first + len(good):
                self._ram.add(
                    text,
                    space,
                    self._cell_bytes,
                    lambda at, n, _, __: good[at // size - first :][:n],
                )
            kept = self._ram.n_blocks(text, space)
            one.n_tokens += size * max(0, kept - known)
        if bad:
            group.tier.discard(bad, refused=True)
        return kept == last

    def _bring_rest(self, one: Prefetch, fetch: Fetch, depth: int) -> None:
        """Keep what stands beside the blocks, and blocks that could not be kept before."""
        size, tokens, space = self._block_size, one._tokens, one._namespace
        with self._pool.hold():
            if self._closed or self._ctx.is_closed or one._is_cancelled or fetch.end is None:
                return
            blocks, n_mine = self._ram.full_blocks(tokens, space)
            mine, n_mine = cut(blocks, depth * size), min(n_mine, depth)
            fetch.n_blocks = depth
            got = gather(self._native, fetch, mine, n_mine)
            if got is None or got.n < depth * size:
                return
            self._promote(tokens, space, got, n_mine, saved=depth * size)
            found = self._ram.find(tokens, space, needs_rest=self._needs_rest, is_use=False)
            one.n_tokens = max(one.n_tokens, found.n - fetch.wanted.begin * size)
