"""Conversion between `SequenceKV` and `pykvcache.arrays`, one cache per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_int, check_kind
from pykvcache.arrays import ArraysCache, KVCache, RotatingKVCache
from pykvcache.errors import CacheValueError
from pykvcache.kv.types import LayerKV, LayerState, RecurrentState, SequenceKV

__all__ = ["from_caches", "to_caches"]

Caches = list[KVCache | RotatingKVCache | ArraysCache]


def to_caches(arrays: SequenceKV[Any], window_size: SupportsIndex | None = None) -> Caches:
    """Copy a sequence into one array cache per layer, as mlx-lm's models expect them.

    Parameters
    ----------
    arrays
        From `LlamaContext.kv`, with keys and values as floats.
    window_size
        Length of the window (``ctx.memory_info.n_swa``); needed if there is a window part.

    Returns
    -------
    list
        One cache per layer of the model, in order: `KVCache` for full attention,
        `RotatingKVCache` for a window, `ArraysCache` with r and s for a recurrent layer.

    Raises
    ------
    CacheValueError
        Positions are not 0, 1, 2, ... without a gap: array caches count tokens.
    """
    check_kind(arrays, SequenceKV, "arrays")
    states, n = arrays.recurrent, len(arrays)
    length = max(n, states.position + 1 if states else 0)
    found: list[tuple[int, KVCache | RotatingKVCache | ArraysCache]] = []
    _consecutive(arrays.positions, 0, "positions")
    for layer in arrays.layers:
        cache = KVCache()
        if n:
            cache.update(_to_heads(layer.keys, n), _to_heads(layer.values, n))
        found.append((layer.layer, cache))
    if arrays.window is not None:
        if window_size is None:
            message = "window_size is needed: this sequence has a window part"
            raise CacheValueError(message, "window_size")
        found += _windows(arrays.window, length, as_int(window_size, "window_size", 1))
    if states is not None:
        if states.first:
            message = f"a state that begins at {states.first} must begin at 0"
            raise CacheValueError(message, "recurrent", states.first, 0)
        for state in states.layers:
            slots = ArraysCache(2)
            if states.position >= 0:
                slots[0], slots[1] = np.array(state.r)[None], np.array(state.s)[None]
            found.append((state.layer, slots))
    return [cache for _, cache in sorted(found, key=lambda item: item[0])]


def _windows(window: SequenceKV, length: int, size: int) -> list[tuple[int, RotatingKVCache]]:
    rows = len(window)
    _consecutive(window.positions, length - rows, "positions of the window")
    if rows != min(length, size):
        message = (
            f"the window holds {rows} of {length} tokens, which does not fit window_size {size}"
        )
        raise CacheValueError(message, "window_size", size, (rows, length))
    found = []
    for layer in window.layers:
        ring = RotatingKVCache(size)
        if rows:
            ring.state = (_to_heads(layer.keys, rows), _to_heads(layer.values, rows))
            ring.meta_state = ("0", str(size), str(length), str(rows))
        found.append((layer.layer, ring))
    return found


def from_caches(
    caches: Sequence[KVCache | RotatingKVCache | ArraysCache],
    *,
    n_tokens: SupportsIndex | None = None,
    rope: bool = True,
) -> SequenceKV:
    """Copy one array cache per layer into a sequence that `LlamaContext.write_kv` takes.

    Parameters
    ----------
    caches
        One per layer of the model, in order, with a batch of one; all of the same tokens.
    n_tokens
        Number of tokens in the caches; needed if all layers are recurrent, since recurrent
        caches do not store it.
    rope
        Whether the keys are rotated to their positions, the usual case.

    Raises
    ------
    TypeError
        A cache is of an unsupported kind.
    CacheValueError
        The caches differ in length, hold a larger batch, or include a ring with sink tokens.
    """
    full: list[LayerKV] = []
    window: list[LayerKV] = []
    states: list[LayerState] = []
    lengths = set() if n_tokens is None else {as_int(n_tokens, "n_tokens", 0)}
    rows = 0
    for index, cache in enumerate(caches):
        if isinstance(cache, ArraysCache):
            r, s = (_flat(cache[i]) for i in range(2))
            states.append(LayerState(r, s, index))
            continue
        if not isinstance(cache, KVCache | RotatingKVCache):
            raise TypeError(
                f"caches[{index}] is a {type(cache).__name__}, which has no counterpart"
            )
        lengths.add(cache.offset)
        if isinstance(cache, RotatingKVCache):
            order = _ring_order(cache)
            rows = len(order)
            window.append(_layer(cache, order, index))
        else:
            full.append(_layer(cache, np.arange(cache.offset), index))
    if len(lengths) > 1:
        message = f"the caches hold different numbers of tokens: {sorted(lengths)}"
        raise CacheValueError(message, "caches", sorted(lengths))
    if not lengths:
        raise CacheValueError(
            "recurrent caches do not store their number of tokens: pass n_tokens", "n_tokens"
        )
    length = lengths.pop()
    # Only recurrent layers: no cells, so no positions.
    positions = np.arange(length if full or window else 0, dtype=np.int32)
    held = SequenceKV(positions[length - rows :], window, rope=rope) if window else None
    recurrent = RecurrentState(length - 1, states) if states else None
    return SequenceKV(positions, full, window=held, recurrent=recurrent, rope=rope)


def _ring_order(ring: RotatingKVCache) -> npt.NDArray[np.int64]:
    """Return the row indices of a ring from oldest to newest, at most `max_size`."""
    keep, size, offset, index = (int(text) for text in ring.meta_state)
    if keep and offset > size:
        raise CacheValueError(
            "a ring that keeps its first tokens is not a window of llama.cpp's", "keep", keep, 0
        )
    rows = ring.state[0].shape[2] if ring.state else 0
    return np.roll(np.arange(rows), -index if index < rows else 0)[-size:]


def _layer(cache: KVCache | RotatingKVCache, order: npt.NDArray[np.int64], index: int) -> LayerKV:
    if not cache.state:
        raise CacheValueError(
            f"caches[{index}] is empty: its number of heads is unknown", f"caches[{index}]", 0, 1
        )
    keys, values = cache.state
    if keys.shape[0] != 1:
        message = f"caches[{index}] holds a batch of {keys.shape[0]}, not one sequence"
        raise CacheValueError(message, f"caches[{index}]", keys.shape[0], 1)
    return LayerKV(
        np.ascontiguousarray(keys[0].transpose(1, 0, 2)[order]),
        np.ascontiguousarray(values[0].transpose(1, 0, 2)[order]),
        index,
    )


def _to_heads(rows: Any, n: int) -> npt.NDArray[Any]:
    """Copy (tokens, heads, dim) to (1, heads, tokens, dim)."""
    try:
        array = np.array(rows)
    except ValueError:
        raise CacheValueError(
            "keys and values must be arrays of one shape", "keys and values"
        ) from None
    if array.dtype.kind != "f":
        message = f"keys and values must be floats, not {array.dtype}"
        raise CacheValueError(message, "keys and values", str(array.dtype), "floats")
    if array.ndim != 3 or len(array) != n:
        message = f"keys or values have shape {array.shape}: expected ({n}, heads, dim)"
        raise CacheValueError(message, "keys and values", array.shape, n)
    return np.ascontiguousarray(array.transpose(1, 0, 2)[None])


def _flat(slot: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if slot is None:
        return np.empty(0, np.float32)
    if slot.shape[0] != 1:
        raise CacheValueError(
            f"a slot holds a batch of {slot.shape[0]}, not one sequence", "slot", slot.shape[0], 1
        )
    flat: npt.NDArray[Any] = slot.reshape(-1).copy()
    return flat


def _consecutive(positions: npt.NDArray[np.int32], first: int, what: str) -> None:
    if np.ndim(positions) != 1:
        raise CacheValueError(f"{what} must be a vector", what, np.ndim(positions), 1)
    expected = first + np.arange(len(positions))
    wrong = np.flatnonzero(positions != expected)
    if wrong.size:
        found, limit = int(positions[wrong[0]]), int(expected[wrong[0]])
        message = (
            f"{what} must be {first}, {first + 1}, ... without a gap, but {found} is in place of "
            f"{limit}"
        )
        raise CacheValueError(message, what, found, limit)
