"""Buffers grow in few steps, and rings to their size. Times: benchmarks/."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    from_state,
)

MAKERS: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "RotatingKVCache": lambda: RotatingKVCache(3000, keep=4),
    "ChunkedKVCache": lambda: ChunkedKVCache(3000),
    "BatchKVCache": lambda: BatchKVCache([0]),
    "BatchRotatingKVCache": lambda: BatchRotatingKVCache(3000, [0]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_one_token_at_a_time_grows_in_few_steps(name: str) -> None:
    """Fast: O(1) amortised copies."""
    cache = MAKERS[name]()
    one = np.ones((1, 1, 1, 4), np.float32)
    sizes = []
    for _ in range(4000):
        cache.update(one, one)
        sizes.append(cache.nbytes)
    growths = sum(a != b for a, b in itertools.pairwise(sizes))
    assert 0 < growths < 16


@pytest.mark.parametrize("name", ["KVCache", "ChunkedKVCache", "BatchKVCache"])
def test_what_update_returns_is_a_view_of_the_buffer(name: str) -> None:
    """Fast: views, not copies."""
    cache = MAKERS[name]()
    one = np.ones((1, 1, 1, 4), np.float32)
    first, _ = cache.update(one, one)
    second, _ = cache.update(one, one)
    assert np.shares_memory(first, second)


RINGS: dict[str, Callable[[int], Any]] = {
    "RotatingKVCache": RotatingKVCache,
    "keep": lambda size: RotatingKVCache(size, keep=1),
    "BatchRotatingKVCache": lambda size: BatchRotatingKVCache(size, [0]),
}


def tokens(n: int, rows: int = 1) -> np.ndarray[Any, Any]:
    return np.ones((rows, 2, n, 32), np.float32)


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_allocates_what_it_keeps(name: str) -> None:
    """3 tokens in a ring of 4 are 3 columns, not a step of 256."""
    ring = RINGS[name](4)
    ring.update(tokens(3), tokens(3))
    column = 2 * 2 * 32 * 4
    assert ring.nbytes == 3 * column
    ring.update(tokens(1), tokens(1))
    assert ring.nbytes == 4 * column
    again = from_state(type(ring).__name__, ring.state, ring.meta_state)
    for other in (ring.copy(), again):
        assert other.nbytes == 4 * column
    fresh = RINGS[name](4)
    fresh.state = ring.state
    assert fresh.nbytes == 4 * column


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("size", [1, 4, 300])
def test_a_ring_never_counts_or_allocates_more_than_its_size(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    ring = RINGS[name](size)
    for n in rng.choice([1, 1, 2, 3, 40], size=60).tolist():
        ring.update(tokens(n), tokens(n))
        assert ring.size() == min(ring.offset, size)
        columns = ring.nbytes // (2 * 2 * 32 * 4)
        assert columns <= max(size, ring.state[0].shape[2])
        if rng.random() < 0.2:
            ring.trim(2)


def test_sizes_of_the_other_caches_are_what_they_hold() -> None:
    quantized = QuantizedKVCache(group_size=32, bits=4)
    for cache in (KVCache(), ConcatenateKVCache(), ChunkedKVCache(4), BatchKVCache([0]), quantized):
        for held in (3, 8):
            cache.update(tokens(held - cache.size()), tokens(held - cache.size()))
            assert cache.size() == held
        cache.trim(6)
        assert cache.size() == 2
        assert CacheList(cache, KVCache()).size() == 2
    chunked = ChunkedKVCache(4)
    chunked.update(tokens(9), tokens(9))
    chunked.maybe_trim_front()
    assert (chunked.size(), chunked.offset) == (4, 9)
    assert ArraysCache(2).size() == 0
