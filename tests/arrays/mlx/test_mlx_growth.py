"""Storing one token copies nothing that is there: buffers grow in few steps. Times: benchmarks/."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache.arrays import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
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
