"""What a cache's accounts must say, computed again from what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pykvcache import PrefixCache
from pykvcache.prefix import pieces
from pykvcache.prefix.blocks import block_names
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent, _size
from pykvcache.prefix.pieces import Joined, Piece, arrays_of
from pykvcache.prefix.ram import RUN_BYTES
from pykvcache.prefix.roots import name_bytes


def check_accounts(cache: PrefixCache, heard: Iterable[CacheEvent] | None = None) -> None:
    """Check everything that a cache counts; `heard`: all its events."""
    stats, ram, tree = cache.stats(), cache._ram, cache._ram.tree
    runs = list(tree.runs())
    there = set(runs)
    blocks = [run for run in runs if not run.is_checkpoint]
    names: list[bytes] = []
    held: Counter[object] = Counter()
    for run in runs:
        parent = run.parent
        assert parent is not None
        assert len(run.payloads) == run.n_blocks > 0
        assert all(payload is not None for payload in run.payloads), "a block without bytes"
        assert run.start == parent.end
        if run.is_checkpoint:
            assert parent.checkpoint is run
        else:
            assert parent.children[run.tokens[: run.step]] is run
            assert run.names == block_names(parent.last_name, run.text, run.step)
            names += run.names
    for root in tree.roots():
        assert root.children or root.held, "a root that nobody needs"
    # What is counted.
    run_bytes = RUN_BYTES + 4 * cache.block_size
    assert tree._roots.name_bytes == sum(map(name_bytes, tree._roots))
    assert tree.n_runs == len(runs)
    assert tree.n_blocks == stats.ram_blocks == sum(run.n_blocks for run in blocks)
    assert tree.n_bytes == sum(run.n_bytes + run_bytes for run in runs)
    assert ram.n_checkpoints == stats.ram_checkpoints == len(runs) - len(blocks)
    assert stats.stored - stats.removed == stats.ram_blocks
    # Tails.
    for (run, tokens), tail in ram._tails.items():
        assert run in there or tree._roots.get(run.namespace or "") is run, "a tail after nothing"
        assert ram._tails_at[run][tokens] is tail
    assert sum(map(len, ram._tails_at.values())) == len(ram._tails)
    assert ram._tail_bytes == sum(tail.nbytes for tail in ram._tails.values())
    assert ram._shared_bytes == sum(tail.shared for tail in ram._tails.values())
    points = {id(run.payloads[0]) for run in runs if run.is_checkpoint}
    rests = [tail.rest for tail in ram._tails.values() if tail.rest is not None]
    assert ram._twice_bytes == sum(rest.nbytes for rest in rests if id(rest) in points)
    cells = [payload for run in runs for payload in run.payloads]
    cells += [x for tail in ram._tails.values() for x in (tail.buffer, tail.rest, tail.row)]
    kept = set(map(id, arrays_of(cells)))
    check_pieces(cache, [one for one in cells if isinstance(one, Joined)])
    for key, (watch, _) in ram._in_use.items():
        assert watch() is not None, "what nobody uses counts"
        assert key not in kept, "what is kept counts twice"
    # Who holds what.
    held.update(run for hold in ram._holds.values() for run in hold.runs)
    held.update(run for run, _ in ram._tails if run.namespace is not None)
    for run in [*runs, *tree.roots()]:
        assert run.held == held[run], "held by nobody"
    # Figures.
    assert stats.n_tokens == stats.live + stats.ram + stats.disk + stats.remote + stats.evaluated
    assert min(stats.live, stats.ram, stats.disk, stats.remote, stats.evaluated) >= 0
    assert 0 <= stats.hits <= stats.requests
    if stats.ram_bytes > stats.max_ram_bytes:
        assert not any(run.is_evictable for run in runs), "what is not held leaves first"
        assert not ram._tails, "a tail that nobody holds stays above the budget"
    # Events, and locks.
    events = cache.events
    assert events.nbytes == sum(_size(event) for event, *_ in events._events)
    if heard is not None:
        assert told(heard) == set(names), "events tell of other blocks than there are"
    assert not cache._pool.depth
    assert not cache._pool.lock._is_owned()  # type: ignore[attr-defined]
    assert not events._lock.locked()


def check_pieces(cache: PrefixCache, joined: list[Joined]) -> None:
    """Check what some blocks and tails share: all those of a cache."""
    cell = cache._ctx.native.block_bytes()
    used: dict[Piece, list[int]] = {}
    saved = 0
    for one in joined:
        assert sum(count for _, count in one.parts) * cell == one.nbytes
        saved += one.nbytes - one.overhead
        for piece, count in one.parts:
            used.setdefault(piece, []).append(count)
    for piece, counts in used.items():
        buffer, n = piece.data
        assert piece.used == Counter(counts), "used by others than there are"
        assert n == max(counts), "cells that nobody uses"
        assert buffer.nbytes == n * cell
        saved -= buffer.nbytes + pieces._PIECE_BYTES
    assert cache._ram._pieces.saved == saved


def told(events: Iterable[CacheEvent]) -> set[bytes]:
    """Return the names of the blocks in memory that events tell of."""
    names: set[bytes] = set()
    for event in events:
        if isinstance(event, BlockStored):
            names |= set(event.block_hashes) if event.medium == "CPU" else set()
        elif isinstance(event, BlockRemoved):
            names -= set(event.block_hashes) if event.medium == "CPU" else set()
        else:
            names.clear()
    return names
