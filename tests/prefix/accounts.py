"""What a cache's accounts must say, computed again from what it keeps."""

from __future__ import annotations

from collections.abc import Iterable

from prefix.model_free import check_tree
from pykvcache.prefix.block_hash import block_names
from pykvcache.prefix.cache import PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent, _size
from pykvcache.prefix.node import Kind, MemoryShape, Node


def check_accounts(cache: PrefixCache, heard: Iterable[CacheEvent] | None = None) -> None:
    """Check everything that a cache counts; `heard`: all its events."""
    stats, blocks = cache.stats(), cache._core.blocks
    tree, size = blocks.tree, blocks.shape.block_size
    check_tree(tree, list(blocks._holds.values()), check_cells)
    for node in tree.nodes():
        own = block_names(node.root.names(1)[0], node.text_from(0), 4 * size)
        assert node.names(size) == own[node.start // size :]
    assert stats.ram_blocks == stats.stored - stats.removed == tree.n_blocks
    assert stats.ram_checkpoints == tree.n_states
    assert stats.n_tokens == stats.live + stats.ram + stats.disk + stats.remote + stats.evaluated
    assert min(stats.live, stats.ram, stats.disk, stats.remote, stats.evaluated) >= 0
    assert 0 <= stats.hits <= stats.requests
    if stats.ram_bytes > stats.max_ram_bytes:
        components = (one for node in tree.nodes() for one in node.components())
        assert not any(one.is_evictable for one in components), "what is not held leaves first"
    events = cache.events
    assert events.nbytes == sum(_size(event) for event, *_ in events._events)
    if heard is not None:
        known = {name for node in tree.nodes() for name in node.names(size)}
        assert told(heard) == known, "events tell of other blocks than there are"
    assert not cache._core.pool.depth


def check_cells(node: Node, shape: MemoryShape) -> None:
    """Check that components have the cells that they say."""
    for one in node.components():
        if one.kind is not Kind.STATE:
            assert one.n_tokens == sum(one.sizes) <= node.n_tokens
            cell = shape.cell_bytes(one.kind)
            for cells, n in zip(one.chunks, one.sizes, strict=True):
                assert cells.nbytes == n * cell


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
