"""Connects a cache to its tiers: searches, stores loaded cells, and queues writes."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from pykvcache._native import lib
from pykvcache._ranges import union
from pykvcache.context import LlamaContext
from pykvcache.errors import KvCacheError, UnsupportedOperation
from pykvcache.prefix.block_cache import BlockCache, Read
from pykvcache.prefix.block_hash import TOKEN_SIZE, NamedPrompt, is_on_path, window_key
from pykvcache.prefix.memory import Buffer, CacheMemory
from pykvcache.prefix.node import NO_STATE, EndState, Kind, Match, Offer
from pykvcache.prefix.report import ReuseReport
from pykvcache.prefix.stores import BlockStore, Envelope, TierInput, open_store
from pykvcache.prefix.tiers.loader import Deliver, Load, Loaded, TailRecord, Wanted
from pykvcache.prefix.tiers.tier import EvaluationTime, Tier, TierStats
from pykvcache.prefix.tiers.writer import Chain, Writer

__all__ = ["CLOSE_SECONDS", "TierLink"]

#: The key of a record, and a function that returns its content, or None if it is unavailable.
_Record: TypeAlias = tuple[bytes, Callable[[], Buffer | None]]

#: Seconds that `close` waits until the queues are written.
CLOSE_SECONDS = 30.0

# A request waits at most this fraction of its estimated evaluation time.
_WAIT = 0.1
# Minimum wait in seconds before any evaluation was timed, as after a restart, which needs tiers.
_FIRST_WAIT = 0.1
# One in this many requests that skip the tiers loads in the background, to update the estimate.
_TRY_EVERY = 16

_NOTHING = ReuseReport()

# Upper bounds on the operations per second of a CPU thread, and of a GPU.
_PER_THREAD, _PER_DEVICE = 1e11, 5e14


def _least_seconds(ctx: LlamaContext) -> float:
    """Return a lower bound on the seconds per token, from the model's size."""
    rate = _PER_DEVICE if lib.devices() != ["CPU"] else _PER_THREAD * max(1, ctx.n_threads_batch)
    return 2 * ctx.model.n_params / rate


class TierLink:
    """The tiers of a cache, fastest first: searched in order, written behind.

    The caller holds the sequence pool's lock. ``tier_seconds`` is the longest wait of a request,
    None if it is to be estimated; ``n_row`` the number of logits after a prompt, 0 if they are not
    kept.
    """

    def __init__(
        self,
        context: LlamaContext,
        blocks: BlockCache,
        stores: Sequence[TierInput],
        *,
        secret: bytes | str | None,
        tier_seconds: float | None,
        queue_bytes: int,
        n_row: int,
    ) -> None:
        memory = blocks.memory
        self._blocks, self._memory = blocks, memory
        self._tier_seconds, self._n_skipped, self._n_row = tier_seconds, 0, n_row
        self.evaluation = EvaluationTime(_least_seconds(context))
        self._loads = weakref.WeakSet[Load]()  # in progress, or waited for
        envelope = Envelope(
            model=memory.digests["model"],
            layout=memory.digests["layout"],
            secret=secret,
            memory=memory.take,
        )
        self.tiers: list[Tier] = []
        try:
            for store in stores:
                owned = not isinstance(store, BlockStore)
                tier = Tier(open_store(store), envelope, owned=owned, sink=blocks.events.add)
                self.tiers.append(tier)
        except BaseException:
            for tier in self.tiers:
                tier.close()
            raise
        ref = weakref.ref(context)  # the writers' threads must not keep the context alive

        def progress() -> int:
            return 0 if (ctx := ref()) is None else ctx.tokens_evaluated

        # Queued blocks occupy RAM even after their eviction.
        urgent = blocks.max_bytes // 4 or None
        self.writers = [Writer(tier, queue_bytes, progress, urgent) for tier in self.tiers]
        self._tail_bytes = memory.tail_bytes() if self.tiers else 0
        self._state_bytes = 4 * n_row + memory.state_bytes() if self.tiers else 0

    # Loading ------------------------------------------------------------------------------------

    def search(self, tokens: bytes, space: str, known: int, deliver: Deliver) -> Load | None:
        """Start to load what RAM lacks of a prompt; None if the request need not wait.

        RAM or live sequences provide the first ``known`` tokens. If loading is estimated to take
        longer than the request may wait, it is done every 16th time, in the background. A late
        load's thread calls ``deliver()(load)`` (``deliver`` is a weak reference).
        """
        n, shape = len(tokens) // TOKEN_SIZE, self._memory.shape
        if n - 1 <= known or n < shape.block_size:
            return None
        wanted = self._wanted(tokens, space, known)
        n_bytes = wanted.n_bytes + self._state_bytes
        loading = min(tier.speed.seconds(n_bytes) for tier in self.tiers)
        wait, is_awaited = self._tier_seconds, True
        if wait is None:
            wait = _WAIT * self.evaluation.seconds(known, n)
            if not self.evaluation.is_learned:
                wait = max(wait, _FIRST_WAIT)
            is_awaited = loading <= wait
            if not all(tier.speed.is_measured for tier in self.tiers):
                wait /= 2  # the store may be far slower than thought
        if not is_awaited:
            self._n_skipped += 1
            if self._n_skipped % _TRY_EVERY:
                for tier in self.tiers:
                    tier.too_slow += 1
                return None
        load = Load(self.tiers, wanted, deliver, wait)
        if not is_awaited:
            load.leave()
        self._loads.add(load)
        load.start()
        return load if is_awaited else None

    def cancel(self, tokens: bytes, space: str | None) -> None:
        """Cancel the loads, in one space or in all, of prompts on the path of these tokens."""
        for load in list(self._loads):
            prompt = load.wanted.prompt
            if space in (None, prompt.space) and is_on_path(prompt.tokens, tokens):
                load.cancel()

    def prefetch(self, tokens: bytes, space: str, known: int) -> Load:
        """Return a load of what RAM lacks of a prompt and has room for; the caller runs it."""
        shape = self._memory.shape
        cell = max(1, shape.attention_bytes + shape.chunk_bytes // shape.block_size)
        most = self._blocks.max_bytes // cell
        wanted = self._wanted(tokens, space, known, most)
        return Load(self.tiers, wanted)

    def _wanted(self, tokens: bytes, space: str, known: int, most: int | None = None) -> Wanted:
        """Return what to load of the first ``most`` tokens of a prompt: what RAM lacks."""
        shape, n = self._memory.shape, len(tokens) // TOKEN_SIZE
        size = shape.block_size
        match = self._blocks.tree.match(tokens, space)
        prompt = self._named(tokens, space)
        first, last = (union(match.windows()) or [(0, 0)])[-1]
        # A state after the whole prompt is useless without logits, because it cannot be truncated.
        limit = n if self._n_row or not shape.needs_state else n - 1
        return Wanted(
            prompt,
            shape,
            n_blocks=len(prompt.names) if most is None else most // size,
            begin=match.n // size,
            windows=range(-(-first // size), last // size),
            known=known,
            limit=limit if most is None else min(limit, most),
            tail_bytes=self._tail_bytes,
            is_good=lambda kind, cells, count: self._memory.layouts[kind].is_good(cells, count),
            n_row=self._n_row,
        )

    def _named(self, tokens: bytes, space: str) -> NamedPrompt:
        size = self._memory.shape.block_size
        return NamedPrompt(self._memory.root(space), tokens, size, space)

    def keep(self, load: Load, owner: object | None = None) -> None:
        """Store the result of a load in RAM: all of it, held by an owner, or as much as fits."""
        found, prompt = load.found, load.wanted.prompt
        try:
            end = self._end_state(found)
        except (KvCacheError, ValueError):
            if found.end is not None:
                tier, key = found.end[1], prompt.tail_key(found.n)
                tier.refuse([key])
                self.writers[self.tiers.index(tier)].offer(Chain(removes=[key]))
            return
        size, window = self._memory.shape.block_size, found.cells[Kind.WINDOW]
        windows = [(at * size, (at + 1) * size) for at in sorted(window)]
        offer = Offer(found.n, windows, {found.n: end}, [found.n])
        read = partial(self._read, found)
        with self._blocks.change():
            match = self._blocks.tree.match(prompt.tokens, prompt.space)
            self._blocks.admit(read, prompt.tokens, match, prompt.space, offer, owner)

    def _read(self, found: Loaded, kind: Kind, begin: int, sizes: Sequence[int]) -> list[Buffer]:
        """Return loaded cells of consecutive chunks, each of which lies within one block."""
        parts, size = list[Buffer](), self._memory.shape.block_size
        for n in sizes:
            at, first = divmod(begin, size)
            if at not in found.cells[kind]:
                raise UnsupportedOperation("PrefixCache", "cells did not come out of a tier")
            cells, n_cells, _ = found.cells[kind][at]
            is_whole = first == 0 and n == n_cells
            parts.append(cells if is_whole else self._memory.part(kind, cells, first, n))
            begin += n
        return parts

    def _end_state(self, found: Loaded) -> EndState:
        """Return the state and the logits of a tail record; raise if the memory rejects them."""
        if found.end is None:
            return NO_STATE
        end, state = found.end[0], None
        if self._memory.shape.needs_state and end.state is not None:
            state = self._memory.make_state(end.state, found.n)
        row = end.row if self._n_row and end.has_row(self._n_row) else None
        return EndState(state, row)

    # Writing ------------------------------------------------------------------------------------

    def write(
        self,
        tokens: bytes,
        space: str,
        ends: Collection[int],
        read: Read | None,
        states: dict[int, EndState],
        report: ReuseReport = _NOTHING,
    ) -> None:
        """Queue the records of a closing sequence for the tiers, from RAM or by ``read``.

        Windows and tail records are written for ``ends``, where prompts are likely to resume.
        """
        size = self._memory.shape.block_size
        prompt = self._named(tokens, space)
        names = prompt.names
        if not names:
            return
        out = _Out(self._memory, self._blocks.tree.match(tokens, space), read, states)
        records: list[_Record] = [
            (name, partial(out.cells, Kind.ATTENTION, i * size, size))
            for i, name in enumerate(names)
        ]
        match = out.match
        divergences = [node.end for node in match.nodes() if node.diverges and node.end <= match.n]
        places = sorted({end for end in (*ends, *states, *divergences) if end >= size})
        windows = set[int]()
        for end in places:
            windows.update(self._window_blocks(end))
        if report.n_tokens in ends:
            windows.update(self._window_blocks(report.n_tokens, self._n_more(report)))
        records += [
            (window_key(names[i]), partial(out.cells, Kind.WINDOW, i * size, size))
            for i in sorted(windows, reverse=True)
        ]
        records += [
            (prompt.tail_key(end), partial(out.end, end)) for end in places if out.has_end(end)
        ]
        self._queue(prompt, records)

    def _queue(self, prompt: NamedPrompt, records: Sequence[_Record]) -> None:
        """Queue the records that a tier is not known to have, in the order of their importance.

        All of them count as used, in the order of `BlockStore.touch`.
        """
        keys = [key for key, _ in records]
        chains = [
            (writer, Chain(space=prompt.space, uses=keys, prompt=prompt), writer.tier.unknown(keys))
            for writer in self.writers
        ]
        for i, (key, content) in enumerate(records):
            takers = list[Chain]()
            for writer, chain, lacks in chains:
                if not lacks[i]:
                    continue
                if writer.n_bytes + chain.n_bytes > writer.max_bytes:
                    writer.dropped += 1  # do not copy cells out of memory only to drop them
                else:
                    takers.append(chain)
            data = content() if takers else None
            for chain in takers if data is not None else ():
                chain.add(key, cast("Any", data))
        for writer, chain, _ in chains:
            writer.offer(chain)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; False if that takes longer than the timeout."""
        until = time.monotonic() + seconds
        return all([writer.flush(until - time.monotonic()) for writer in self.writers])

    # Removing -----------------------------------------------------------------------------------

    def forget(self, paths: Iterable[bytes], space: str) -> None:
        """Remove the records of these paths from the tiers, except those that RAM still holds."""
        if not self.tiers:
            return
        keys, size = dict[bytes, None](), self._memory.shape.block_size
        for path in paths:
            prompt = self._named(path, space)
            known = self._blocks.tree.match(path, space).n
            for name in prompt.names[known // size :]:
                keys[name] = keys[window_key(name)] = None
            for end in range(max(known + 1, size), len(prompt) + 1):
                keys[prompt.tail_key(end)] = None
        for writer in self.writers:
            writer.offer(Chain(removes=list(keys)))

    def clear(self, space: str | None) -> None:
        """Drop the queued records, and the unread events, of a space or of all."""
        for writer in self.writers:
            writer.cancel(space)
        withdrawn = self._blocks.events.withdraw(space)  # those of the last writes, too
        for tier in self.tiers:
            notices = tier.notices
            notices.announce_again(key for medium, key in withdrawn if medium == notices.medium)

    def forget_notices(self) -> None:
        """Forget which blocks were announced, so that they are announced again when used."""
        for tier in self.tiers:
            tier.notices.forget()

    def close(self, seconds: float) -> None:
        """Write the queues, for at most this time, and close the cache's own stores."""
        until = time.monotonic() + seconds
        for writer in self.writers:
            writer.close(until - time.monotonic())
            writer.tier.close()

    def retire(self) -> None:
        """Accept no more records; the threads write the queues and then close."""
        for writer in self.writers:
            writer.retire()

    def stats(self) -> tuple[TierStats, ...]:
        """Return the counters of every tier."""
        return tuple(
            writer.tier.stats(writer.n_items, writer.n_bytes, writer.dropped)
            for writer in self.writers
        )

    # What is written ----------------------------------------------------------------------------

    def _window_blocks(self, end: int, more: int = 0) -> range:
        """Return the full blocks with the window before ``end``, and ``more`` tokens before it."""
        shape = self._memory.shape
        first = shape.window_begin(end, shape.slack + more)
        return range(first // shape.block_size, end // shape.block_size)

    def _n_more(self, report: ReuseReport) -> int:
        """Return how many more tokens, before the last window, have their window cells written.

        The next prompt may diverge earlier. The limit is a fifth of the other bytes written.
        """
        shape, n = self._memory.shape, report.evaluated
        if shape.window_start is None or shape.needs_state or not shape.window_bytes:
            return 0
        width = report.n_tokens - shape.window_start(report.n_tokens) + shape.slack
        n_bytes = n * shape.attention_bytes + min(n, width) * shape.window_bytes
        return n_bytes // (5 * shape.window_bytes)


@dataclass(frozen=True)
class _Out:
    """Contents of records, read from RAM or a sequence on demand."""

    memory: CacheMemory
    match: Match
    read: Read | None
    states: dict[int, EndState]

    def cells(self, kind: Kind, begin: int, n: int) -> Buffer | None:
        """Return n cells as one buffer; None if they cannot be read."""
        first, chunks = self.match.chunks(kind, begin, begin + n)
        if first == begin and sum(used for _, _, used in chunks) == n:
            return self.memory.join(kind, chunks)
        with contextlib.suppress(KvCacheError):
            return None if self.read is None else self.read(kind, begin, [n])[0]
        return None

    def _state(self, end: int) -> EndState:
        return self.states.get(end, NO_STATE).with_all_of(self.match.end_at(end))

    def has_end(self, end: int) -> bool:
        """Return whether a prompt end needs a tail record in addition to its full blocks."""
        at = self._state(end)
        if self.memory.shape.needs_state:
            return at.has_state
        return end % self.memory.shape.block_size > 0 or at.row is not None

    def end(self, end: int) -> Buffer | None:
        """Return the content of a tail record; None if its cells cannot be read."""
        shape = self.memory.shape
        n = end % shape.block_size
        parts = list[Buffer]()
        for kind in (Kind.ATTENTION, Kind.WINDOW):
            is_there = n and shape.cell_bytes(kind)
            cells = self.cells(kind, end - n, n) if is_there else np.empty(0, np.uint8)
            if cells is None:
                return None
            parts.append(cells)
        at = self._state(end)
        state = None if at.state is None else at.state.content
        content = TailRecord(n, parts[0], parts[1], state, at.row).encode()
        return np.frombuffer(content, np.uint8)
