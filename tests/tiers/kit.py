"""What the tests of tiers share."""

from __future__ import annotations

from pykvcache import PrefixCache


def clear_memory(cache: PrefixCache) -> None:
    """Drop all that a cache keeps in memory; what waits for tiers stays."""
    with cache._core.pool.hold(), cache._core.blocks.change():
        cache._core.blocks.clear(None)
