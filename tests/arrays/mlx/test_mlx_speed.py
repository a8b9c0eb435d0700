"""What has to be fast; bounds are far from what is measured, so that a busy machine passes."""

import timeit

import numpy as np

from pykvcache.arrays import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    create_causal_mask,
)

N = 8192


def best(call, number):
    return min(timeit.repeat(call, number=number, repeat=5)) / number


def test_one_token_at_8192_is_50_times_faster_than_concatenate():
    """Fast: steady-state update of one token against np.concatenate per token."""
    many = np.zeros((1, 4, N, 64), np.float32)
    one = np.ones((1, 4, 1, 64), np.float32)
    slow = best(lambda: np.concatenate([many, one], axis=2), 3) * 2
    for cache in (
        KVCache(),
        RotatingKVCache(N, keep=4),
        ChunkedKVCache(N),
        BatchKVCache([0]),
        BatchRotatingKVCache(N, [0]),
    ):
        cache.update(many, many)
        cache.update(one, one)

        def step(cache=cache):
            cache.update(one, one)

        assert best(step, 200) * 50 < slow, type(cache)


def test_causal_mask_takes_at_most_twice_numpys_comparison():
    """Fast: a 512 x 8,192 causal mask against NumPy's own comparison."""
    rows, columns = np.arange(N - 512, N)[:, None], np.arange(N)[None]
    compared = best(lambda: rows >= columns, 5)
    assert best(lambda: create_causal_mask(512, N - 512), 5) < 2 * compared
    assert best(lambda: create_causal_mask(512, N - 512, 1024), 5) < 2 * compared
