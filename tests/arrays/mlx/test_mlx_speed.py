"""What has to be fast; bounds are far from what is measured, so that a busy machine passes."""

import itertools
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


def test_one_token_costs_little_more_than_a_bare_assignment():
    """Fast: update against the two assignments into preallocated arrays; about 1.5 when idle."""
    many = np.zeros((1, 8, N, 128), np.float32)
    one = np.ones((1, 8, 1, 128), np.float32)
    caches = (KVCache(), RotatingKVCache(N, keep=4), BatchRotatingKVCache(N, [0]))
    keys, values = np.zeros((2, 1, 8, 2 * N, 128), np.float32)
    place = itertools.cycle(range(N, 2 * N))

    def bare():
        i = next(place)
        keys[:, :, i : i + 1] = one
        values[:, :, i : i + 1] = one

    for cache in caches:
        cache.update(many, many)
        cache.update(one, one)
        # By turns, so that what else the machine does slows both down.
        pairs = [
            (best(lambda cache=cache: cache.update(one, one), 50), best(bare, 50)) for _ in range(5)
        ]
        assert min(update / assigned for update, assigned in pairs) < 2.5, type(cache)


def test_causal_mask_takes_at_most_twice_numpys_comparison():
    """Fast: a 512 x 8,192 causal mask against NumPy's own comparison."""
    rows, columns = np.arange(N - 512, N)[:, None], np.arange(N)[None]
    compared = best(lambda: rows >= columns, 5)
    assert best(lambda: create_causal_mask(512, N - 512), 5) < 2 * compared
    assert best(lambda: create_causal_mask(512, N - 512, 1024), 5) < 2 * compared
