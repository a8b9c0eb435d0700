"""Storing a token writes one place of a buffer that is there already. Times: benchmarks/."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pykvcache.arrays import CausalCache, ChunkedAttentionCache, SWACache


@pytest.mark.parametrize("cache", [CausalCache(), SWACache(64), ChunkedAttentionCache(64)])
def test_put_writes_into_the_buffer_that_get_shows(cache: Any) -> None:
    """Fast: no copies; get returns views."""
    cache.init(np.float32, 1, 256, 8)
    one = np.ones((1, 2, 4), np.float32)
    shown = []
    for position in range(40):
        cache.start_forward([position], [0])
        cache.put(one, one)
        shown.append(cache.get()[0])
    assert all(np.shares_memory(shown[0], later) for later in shown[1:])
