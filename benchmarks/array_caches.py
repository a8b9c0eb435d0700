"""Cost of storing a token and building a mask in the array caches, compared with plain NumPy.

    PYTHONPATH=src python benchmarks/array_caches.py [--rounds 9]

Each figure is a ratio within one run: the two sides take turns, and the median over the rounds
is printed with the lowest and the highest. Needs NumPy only.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pykvcache.arrays import (
    BatchKVCache,
    BatchRotatingKVCache,
    CausalCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    SWACache,
    create_causal_mask,
)

N, HEADS, DIM = 8192, 8, 128


def nothing() -> None:
    """Do nothing."""


def best(call: Callable[[], Any], number: int, reset: Callable[[], Any]) -> float:
    """Return the seconds per call of the best of three slices, each after an untimed ``reset``."""
    return min(timeit.repeat(call, reset, number=number, repeat=3)) / number


def ratio(
    name: str,
    ours: Callable[[], Any],
    other: Callable[[], Any],
    rounds: int,
    n: int,
    reset: Callable[[], Any] = nothing,
) -> None:
    """Print the ratio ours / other."""
    pairs = [(best(ours, n, reset), best(other, n, nothing)) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in pairs)
    micro = statistics.median(a for a, _ in pairs) * 1e6
    middle = statistics.median(ratios)
    print(f"{name:58} {micro:9.2f} us {middle:9.5f} ({ratios[0]:.5f} to {ratios[-1]:.5f})")


def stores() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield each cache, filled with N tokens, the call that stores one more, and a reset.

    The reset goes back to N tokens, so that a slice measures the steady state, without growth or
    page faults.
    """
    many, one = np.zeros((1, HEADS, N, DIM), np.float32), np.ones((1, HEADS, 1, DIM), np.float32)
    for cache in (
        KVCache(),
        RotatingKVCache(N, keep=4),
        ChunkedKVCache(N),
        BatchKVCache([0]),
        BatchRotatingKVCache(N, [0]),
    ):
        cache.update(many, many)
        for _ in range(400):
            cache.update(one, one)

        def store(cache: Any = cache) -> None:
            cache.update(one, one)

        def reset(cache: Any = cache) -> None:
            if cache.max_size is None and cache.size() > N:
                cache.trim(cache.size() - N)

        yield f"{type(cache).__name__}.update", store, reset
    token = np.ones((1, HEADS, DIM), np.float32)
    for causal in (CausalCache(), SWACache(N - 512)):
        causal.init(np.float32, 1, N + 8, 512)
        rows = np.zeros((512, HEADS, DIM), np.float32)
        for start in range(0, N, 512):
            causal.start_forward(np.arange(start, start + 512), np.zeros(512, np.int64))
            causal.put(rows, rows)
        causal.start_forward([N], [0])

        def put(causal: Any = causal) -> None:
            causal.put(token, token)

        yield f"{type(causal).__name__}.put", put, nothing


def naive_stores() -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """Return plain NumPy's versions: assign one token per head, assign a row, concatenate."""
    one = np.ones((1, HEADS, 1, DIM), np.float32)
    full = np.zeros((1, HEADS, N, DIM), np.float32)
    keys, values = np.zeros((2, 1, HEADS, 2 * N, DIM), np.float32)
    tokens, token = np.zeros((2, 2 * N, HEADS, DIM), np.float32), np.ones((1, HEADS, DIM), "f4")
    place = itertools.cycle(range(N, 2 * N))

    def bare() -> None:
        i = next(place)
        keys[:, :, i : i + 1] = one
        values[:, :, i : i + 1] = one

    def bare_row() -> None:
        # Repeated puts within a forward pass write to the same place; so does this.
        tokens[0, N : N + 1] = token
        tokens[1, N : N + 1] = token

    def concatenate() -> None:
        np.concatenate([full, one], axis=2)
        np.concatenate([full, one], axis=2)

    return bare, bare_row, concatenate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    bare, bare_row, concatenate = naive_stores()
    print(f"one token at {N} tokens, {HEADS} heads of {DIM}, float32; time, ratio to the other")
    for name, store, reset in stores():
        # A token is one row in a causal cache, and one row per head in the others.
        assignment = bare_row if name.endswith("put") else bare
        ratio(f"{name} / bare assignment", store, assignment, rounds, 200, reset)
        ratio(f"{name} / np.concatenate", store, concatenate, 3, 2)
    rows, columns = np.arange(N - 512, N)[:, None], np.arange(N)[None]
    ratio(
        f"create_causal_mask 512 x {N} / NumPy's comparison",
        lambda: create_causal_mask(512, N - 512),
        lambda: rows >= columns,
        rounds,
        5,
    )


if __name__ == "__main__":
    main()
