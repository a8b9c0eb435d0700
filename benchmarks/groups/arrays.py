"""Group 5: array caches against naive NumPy, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.array_caches import DIM, HEADS, N, best, naive_stores, nothing, stores
from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, show
from pykvcache.arrays import KVCache, QuantizedKVCache, create_causal_mask

TITLE = "array caches against naive NumPy"


def timed(call: Callable[[], Any], number: int, reset: Callable[[], Any]) -> Answer:
    """Return the seconds of one call as an answer."""
    return {"seconds": best(call, number, reset)}


def compare(
    name: str,
    ours: Callable[[], Any],
    naive: Callable[[], Any],
    plan: Plan,
    number: int,
    reset: Callable[[], Any] = nothing,
) -> Row:
    """Measure ours and NumPy by turns."""
    sides = {
        "pykvcache": lambda: timed(ours, number, reset),
        "NumPy": lambda: timed(naive, number, nothing),
    }
    row = interleave(name, "s", sides, plan)
    show(row, 1e6, "us", "NumPy")
    return row


def naive_quantise(x: np.ndarray[Any, np.dtype[np.float32]]) -> tuple[Any, Any, Any]:
    """Quantise naively to 8 bits in groups of 64, one byte per value."""
    groups = x.reshape(*x.shape[:-1], -1, 64)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = np.maximum((high - low) / 255, 1e-7)
    return np.round((groups - low) / scale).astype(np.uint8), scale, low


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure append, mask and quantise at 8,192 tokens of 8 heads of 128."""
    one = np.ones((1, HEADS, 1, DIM), np.float32)
    bare, bare_row, concatenate = naive_stores()
    rows = []
    for name, store, reset in stores():
        # A token is one row in a causal cache, and one row per head in the others.
        assignment = bare_row if name.endswith("put") else bare
        rows.append(compare(f"{name} / assignment", store, assignment, plan, 200, reset))
        rows.append(compare(f"{name} / concatenate", store, concatenate, plan, 2))
    row_pos, column = np.arange(N - 512, N)[:, None], np.arange(N)[None]
    rows.append(
        compare(
            f"create_causal_mask 512 x {N} / comparison",
            lambda: create_causal_mask(512, N - 512),
            lambda: row_pos >= column,
            plan,
            5,
        )
    )
    part = np.random.default_rng(0).standard_normal((1, HEADS, 1024, DIM)).astype(np.float32)

    def quantise() -> None:
        cache = KVCache()
        cache.update(part, part)
        cache.to_quantized(64, 8)

    def naive() -> None:
        naive_quantise(part.copy())
        naive_quantise(part.copy())

    rows.append(compare("to_quantized 1,024 tokens, 8 bits / naive", quantise, naive, plan, 1))
    quantized = QuantizedKVCache(64, 8)
    quantized.update_quantized(part, part)

    def append_quantized() -> None:
        quantized.update_quantized(one, one)

    def naive_append() -> None:
        naive_quantise(one)
        naive_quantise(one)

    def back() -> None:
        quantized.trim(quantized.size() - 1024)

    rows.append(
        compare(
            "QuantizedKVCache, one token / naive", append_quantized, naive_append, plan, 50, back
        )
    )
    return rows
