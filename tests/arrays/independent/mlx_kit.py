"""Tokens as arrays and back, and states, for the caches of (batch, heads, tokens, dim)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    from_state,
)

HEADS, K_DIM, V_DIM = 2, 3, 2

SINGLE: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "ChunkedKVCache": lambda: ChunkedKVCache(4),
    "RotatingKVCache": lambda: RotatingKVCache(6, keep=2),
    "QuantizedKVCache": lambda: QuantizedKVCache(32, 8),
}


def keys_of(tokens: Any) -> NDArray[np.float32]:
    """K of ``(batch, n)`` token numbers: number, head, sign."""
    ids = np.asarray(tokens, np.float32)
    key = np.zeros((len(ids), HEADS, ids.shape[1], K_DIM), np.float32)
    key[..., 0] = ids[:, None]
    key[..., 1] = np.arange(HEADS)[:, None]
    key[..., 2] = -ids[:, None]
    return key


def values_of(tokens: Any) -> NDArray[np.float32]:
    ids = np.asarray(tokens, np.float32)
    value = np.zeros((len(ids), HEADS, ids.shape[1], V_DIM), np.float32)
    value[..., 0] = ids[:, None]
    value[..., 1] = 10 + np.arange(HEADS)[:, None]
    return value


def tokens_in(keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.int64]:
    """The token numbers ``(batch, n)``; K and V must agree on them in every head.

    0 is padding that the cache made up, whose content is its own affair.
    """
    found = keys[:, 0, :, 0]
    if keys.size:
        row, column = np.nonzero(found)
        np.testing.assert_array_equal(keys[row, :, column], keys_of(found)[row, :, column])
        np.testing.assert_array_equal(values[row, :, column], values_of(found)[row, :, column])
    return found.astype(np.int64)


def feed(
    cache: Any, tokens: Any, window_size: int | None = None, return_array: bool = True
) -> list[list[list[int]]]:
    """Update with ``(batch, n)`` tokens; for every row and query what it sees, in order."""
    batch, n = np.shape(tokens)
    mask = cache.make_mask(n, window_size=window_size, return_array=return_array)
    keys, values = cache.update(keys_of(tokens), values_of(tokens))
    held = tokens_in(keys, values)
    total = held.shape[1]
    if mask is None:
        assert n == 1 or not return_array
        visible = np.ones((batch, n, total), bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        assert not return_array
        visible = np.broadcast_to(np.tri(n, total, total - n, dtype=bool), (batch, n, total))
    else:
        assert mask.dtype == bool
        if mask.ndim == 1:  # mlx-lm gives a ring's single query a plain row
            mask = mask[None]
        assert mask.shape[-2:] == (n, total)
        assert mask.ndim in (2, 4)
        plain = mask if mask.ndim == 2 else mask[:, 0]
        visible = np.broadcast_to(plain, (batch, n, total))
    return [[held[row][visible[row, i]].tolist() for i in range(n)] for row in range(batch)]


def wide(tokens: int, seed: int = 0, batch: int = 1, dim: int = 64) -> Any:
    return np.random.default_rng(seed).standard_normal((batch, 2, tokens, dim)).astype(np.float32)


def filled(name: str, tokens: int = 3) -> Any:
    cache = SINGLE[name]()
    if tokens:
        cache.update(wide(tokens), wide(tokens, 1))
    return cache


def rebuilt(kind: str, state: Any, meta: Any) -> Any:
    return from_state(kind, state, meta)


def leaves(state: Any) -> list[Any]:
    """Arrays of a state, however it nests."""
    if isinstance(state, np.ndarray):
        return [state]
    if isinstance(state, (tuple, list)):
        return [leaf for part in state for leaf in leaves(part)]
    return []


def same_state(first: Any, second: Any) -> None:
    one, two = leaves(first.state), leaves(second.state)
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.meta_state == second.meta_state
    assert np.array_equal(first.rope_offset, second.rope_offset)


def leaves_of_meta(meta: Any) -> list[Any]:
    if isinstance(meta, (tuple, list)):
        return [leaf for part in meta for leaf in leaves_of_meta(part)]
    return [] if meta == "" else [meta]
