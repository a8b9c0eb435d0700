"""Tokens as keys and values that can be told apart, and caches of every kind with some in them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    MambaCache,
    QuantizedKVCache,
    RotatingKVCache,
)

HEADS, K_DIM, V_DIM = 2, 8, 4


def kv(*rows: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return keys and values, `(len(rows), HEADS, n, dim)`, of one list of token ids per row."""
    ids = np.asarray([[*row] for row in rows], np.float32)[:, None]
    both = []
    for dim, sign in ((K_DIM, -1), (V_DIM, 1)):
        array = np.empty((*ids.shape[:1], HEADS, ids.shape[2], dim), np.float32)
        array[...] = np.arange(HEADS)[:, None, None]
        array[..., 0], array[..., 2] = ids, sign * ids
        both.append(array)
    return both[0], both[1]


def ids(values: NDArray[Any], row: int = 0) -> list[int]:
    """Return the token ids that values were made of."""
    found: list[int] = values[row, 0, :, 0].astype(int).tolist()
    return found


def stored(cache: Any, row: int = 0) -> list[int]:
    """Return a cache's token ids in memory order."""
    return ids(cache.state[1], row) if len(cache.state) else []


def real(cache: Any, row: int) -> list[int]:
    """Return the tokens of a batch's row from old to new, as `extract` gives them."""
    return stored(cache.extract(row))


def tokens_in(keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.int64]:
    """Return token ids `(batch, n)`, on which K and V must agree in every head.

    0 is padding of the cache's own making, whose content does not matter.
    """
    found = keys[:, 0, :, 0]
    if keys.size:
        row, column = np.nonzero(found)
        for array, expected in zip((keys, values), kv(*found), strict=True):
            np.testing.assert_array_equal(array[row, :, column], expected[row, :, column])
    return found.astype(np.int64)


def feed(
    cache: Any, tokens: Any, window_size: int | None = None, return_array: bool = True
) -> list[list[list[int]]]:
    """Update with ``(batch, n)`` tokens; return the tokens visible to each row and query."""
    batch, n = np.shape(tokens)
    mask = cache.make_mask(n, window_size=window_size, return_array=return_array)
    keys, values = cache.update(*kv(*tokens))
    held = tokens_in(keys, values)
    total = held.shape[1]
    if mask is None:
        assert n == 1
        visible = np.ones((batch, n, total), bool)
    elif isinstance(mask, str):
        assert (mask, return_array) == ("causal", False)
        visible = np.broadcast_to(np.tri(n, total, total - n, dtype=bool), (batch, n, total))
    else:
        assert mask.dtype == bool
        mask = mask[None] if mask.ndim == 1 else mask  # a ring's single query has a plain row
        assert mask.shape[-2:] == (n, total)
        visible = np.broadcast_to(mask if mask.ndim == 2 else mask[:, 0], (batch, n, total))
    return [[held[row][visible[row, i]].tolist() for i in range(n)] for row in range(batch)]


def snapshot(cache: Any) -> tuple[Any, ...]:
    """Return everything that can be seen of a cache, to compare before and after."""

    def frozen(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(frozen(y) for y in x)
        return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x

    rope = np.asarray(cache.rope_offset).tolist()
    counts = (cache.offset, rope, cache.size(), cache.is_empty())
    return *counts, frozen(cache.state), cache.meta_state


def filled(cache: Any, *updates: Any) -> Any:
    """Return the cache after updates of ``(batch, n)`` tokens each."""
    for tokens in updates:
        cache.update(*kv(*tokens))
    return cache


def ring(max_size: int, tokens: Any = (), keep: int = 0) -> Any:
    """Return a ring that was given tokens one by one."""
    return filled(RotatingKVCache(max_size, keep), *([[token]] for token in tokens))


def slots(*rows: float) -> Any:
    """Return an `ArraysCache` of two slots, the first with one row per number."""
    cache = ArraysCache(2)
    if rows:
        cache[0] = np.array(rows, np.float32)[:, None] * np.ones((1, 3), np.float32)
    return cache


#: A cache of every kind, by class. Quantized ones take heads of groups of 4.
EMPTY: dict[str, Any] = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "RotatingKVCache": lambda: RotatingKVCache(4, keep=1),
    "ChunkedKVCache": lambda: ChunkedKVCache(3),
    "QuantizedKVCache": lambda: QuantizedKVCache(4, 8),
    "ArraysCache": lambda: ArraysCache(2),
    "MambaCache": MambaCache,
    "BatchKVCache": lambda: BatchKVCache([1]),
    "BatchRotatingKVCache": lambda: BatchRotatingKVCache(4, [1]),
    "CacheList": lambda: CacheList(KVCache(), RotatingKVCache(2)),
}


def fill(cache: Any) -> Any:
    """Give a cache some content."""
    if isinstance(cache, CacheList):
        for member in cache:
            fill(member)
    elif isinstance(cache, ArraysCache):
        cache[0] = np.ones((1, 2), np.float32)
    else:
        filled(cache, [[1, 2, 3]], [[4]], [[5]])
    return cache


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))
