"""What has to be fast; bounds are far from what is measured, so that a busy machine passes."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache.arrays import CausalCache, ChunkedAttentionCache, SWACache

N = 8192


def best(call: Callable[[], Any], number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number


# Fast: put of one token at 8,192, against np.concatenate and the bare assignment; about 1.5 times
# the latter when idle.
@pytest.mark.parametrize("cache", [CausalCache(), SWACache(N - 512), ChunkedAttentionCache(4096)])
def test_put_of_one_token_is_50_times_faster_than_concatenate(cache: Any) -> None:
    cache.init(np.float32, 1, N + 8, 512)
    one = np.ones((1, 4, 64), np.float32)
    many = np.zeros((512, 4, 64), np.float32)
    for start in range(0, N, 512):
        cache.start_forward(np.arange(start, start + 512), np.zeros(512, np.int64))
        cache.put(many, many)
    cache.start_forward([N], [0])
    full, bare = np.zeros((N, 4, 64), np.float32), np.zeros((2, N, 4, 64), np.float32)

    def assign() -> None:
        bare[0, N - 1 :] = one
        bare[1, N - 1 :] = one

    # By turns, so that what else the machine does slows both down.
    pairs = [(best(lambda: cache.put(one, one), 200), best(assign, 200)) for _ in range(5)]
    slow = best(lambda: np.concatenate([full, one]), 3) * 2
    assert min(put for put, _ in pairs) * 50 < slow
    assert min(put / assigned for put, assigned in pairs) < 3
