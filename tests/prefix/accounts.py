"""What a cache's accounts must say, computed again from what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prefix.model_free import is_useful
from pykvcache.prefix.block_hash import block_names
from pykvcache.prefix.cache import PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent, _size
from pykvcache.prefix.node import Component, Kind, Node, is_resumable
from pykvcache.prefix.tree import PrefixTree


def check_accounts(cache: PrefixCache, heard: Iterable[CacheEvent] | None = None) -> None:
    """Check everything that a cache counts; `heard`: all its events."""
    stats, blocks, tree = cache.stats(), cache._core.blocks, cache._core.blocks.tree
    shape = tree.shape
    n_bytes = n_blocks = n_states = 0
    held: Counter[Component] = Counter()
    for owned in blocks._holds.values():
        held.update(tree._held_by(owned.hold))
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        assert parent.children[node.tokens[:4]] is node
        assert node.start == parent.end
        assert node.n_tokens > 0
        assert node._key == parent.key_at(parent.end)
        names = node.names(shape.block_size)
        text = node.text_from(0)
        own = block_names(node.root.names(1)[0], text, 4 * shape.block_size)
        assert names == own[node.start // shape.block_size :]
        n_blocks += len(names)
        n_bytes += tree._overhead(node)
        n_states += node.state is not None and node.state.chunks[0].has_state
        check_cells(node, tree)
        for one in node.components():
            assert one.held == held[one], "held by nothing"
            assert one.is_spare == (one in tree._spare)
            n_bytes += one.n_bytes + (shape.node_bytes if one.kind else 0)
    for root in tree.roots():
        assert root.children, "a root that nothing follows"
        n_bytes += tree._root_bytes(str(root.namespace))
    assert tree.n_bytes == n_bytes
    assert tree.n_blocks == stats.ram_blocks == n_blocks
    assert stats.ram_checkpoints == n_states
    assert stats.stored - stats.removed == stats.ram_blocks
    assert stats.n_tokens == stats.live + stats.ram + stats.disk + stats.remote + stats.evaluated
    assert min(stats.live, stats.ram, stats.disk, stats.remote, stats.evaluated) >= 0
    assert 0 <= stats.hits <= stats.requests
    if stats.ram_bytes > stats.max_ram_bytes:
        components = (one for node in tree.nodes() for one in node.components())
        assert not any(one.is_evictable for one in components), "what is not held leaves first"
    events = cache.events
    assert events.nbytes == sum(_size(event) for event, *_ in events._events)
    if heard is not None:
        known = {name for node in tree.nodes() for name in node.names(shape.block_size)}
        assert told(heard) == known, "events tell of other blocks than there are"
    assert not cache._core.pool.depth


def check_cells(node: Node, tree: PrefixTree) -> None:
    """Check that components have the cells that they say, and are of use."""
    assert node.attention is not None
    assert node.attention.n_tokens == node.n_tokens
    for one in node.components():
        if one.kind is not Kind.STATE:
            assert one.n_tokens == sum(one.sizes) <= node.n_tokens
            cell = tree.shape.cell_bytes(one.kind)
            for cells, n in zip(one.chunks, one.sizes, strict=True):
                assert cells.nbytes == n * cell
    if not node.children and not node.attention.held:
        assert is_resumable(tree.shape, node), "a dead end"
    if node.window is not None:
        assert is_useful(tree, node), "a window that is not complete"


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
