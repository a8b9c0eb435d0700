"""Registry of cache classes: names, construction, restoring, layout in files.

A new class needs a member of `KvCacheKind` and a row of `_ROWS`. In a file of mlx-lm 0.32 a layer
consists of parts: ``read`` converts them to a state and a meta state, ``write`` does the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.mlx.arrays_cache import ArraysCache, MambaCache
from pykvcache.arrays.mlx.base import BaseCache
from pykvcache.arrays.mlx.cache_list import CacheList
from pykvcache.arrays.mlx.kv_cache import BatchKVCache, ChunkedKVCache, KVCache
from pykvcache.arrays.mlx.quantized import QuantizedKVCache
from pykvcache.arrays.mlx.rotating import BatchRotatingKVCache, RotatingKVCache
from pykvcache.errors import CacheValueError, shown

__all__ = [
    "KvCacheKind",
    "Serialized",
    "dense",
    "from_state",
    "parts_of_state",
    "small_integers",
    "state_of_parts",
]

#: A state and a meta state, as `from_state` takes them.
Serialized: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]


class KvCacheKind(Enum):
    """The kind of a saved cache; the values are mlx-lm's class names."""

    KV_CACHE = "KVCache"
    ROTATING_KV_CACHE = "RotatingKVCache"
    CHUNKED_KV_CACHE = "ChunkedKVCache"
    QUANTIZED_KV_CACHE = "QuantizedKVCache"
    CACHE_LIST = "CacheList"
    BATCH_KV_CACHE = "BatchKVCache"
    BATCH_ROTATING_KV_CACHE = "BatchRotatingKVCache"
    ARRAYS_CACHE = "ArraysCache"
    MAMBA_CACHE = "MambaCache"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, kind: str) -> KvCacheKind:
        """Return the kind for a name of mlx-lm, its Swift port or its Rust port.

        Raises
        ------
        CacheValueError
            The name is unknown; the message lists the 17 names.
        """
        if not isinstance(kind, str) or kind not in _BY_NAME:
            message = f"unknown cache kind {shown(kind)}; expected one of {', '.join(_BY_NAME)}"
            raise CacheValueError(message, "kind", kind, tuple(_BY_NAME))
        return _BY_NAME[kind]

    def empty(self) -> BaseCache:
        """Return an empty cache with placeholder numbers, which the meta state replaces."""
        return _ROWS[self].empty()


def from_state(
    kind: str | KvCacheKind, state: Sequence[Any], meta: Sequence[Any] = ()
) -> BaseCache:
    """Return a cache of `kind` with copies of the arrays in `state`.

    Parameters
    ----------
    kind : str or KvCacheKind
        A name that `KvCacheKind.parse` knows.
    state, meta : sequence
        The properties ``state`` and ``meta_state`` of a cache.

    Raises
    ------
    CacheValueError, CacheDTypeError
        Inconsistent input: wrong shapes, counts that do not fit the arrays, an empty ring
        with an offset, or an unknown kind.
    """
    kind = kind if isinstance(kind, KvCacheKind) else KvCacheKind.parse(kind)
    if kind is not KvCacheKind.CACHE_LIST:
        cache = kind.empty()
        cache.from_serialized(state, meta)
        return cache
    if len(meta) != 2 or len(meta[0]) != len(meta[1]):
        message = f"the meta state of a CacheList must be (names, metas); got {shown(meta)}"
        raise CacheValueError(message, "meta_state", meta, 2)
    names, metas = meta
    states = state if len(state) else [()] * len(names)
    if len(states) != len(names):
        message = f"a CacheList of {len(names)} caches has {len(states)} states"
        raise CacheValueError(message, "state", len(states), len(names))
    members = zip(names, states, metas, strict=True)
    return CacheList(*(from_state(*member) for member in members))


# Parts in files of mlx-lm 0.32 ---------------------------------------------------------------


def state_of_parts(name: str, node: Any) -> Serialized:
    """Convert numbered parts to a state and meta state; numbered nodes are dicts."""
    kind = KvCacheKind.parse(name)
    try:
        return _ROWS[kind].read(*dense(node, f"parts of a {kind}"))
    except TypeError as error:  # wrong number or type of parts
        message = f"the state of a {kind} is not as expected: {error}"
        raise CacheValueError(message, "state", str(kind)) from error


def parts_of_state(name: str, state: Sequence[Any], meta: Sequence[Any]) -> tuple[str, Any]:
    """Convert a state and meta state to a class name and nested parts."""
    if name == "ConcatenateKVCache" and len(state):
        return name, tuple(state)
    # mlx-lm cannot read an empty ConcatenateKVCache, so write a KVCache.
    kind = KvCacheKind.parse(name)
    return kind.value, _ROWS[kind].write(tuple(state), tuple(meta))


def dense(node: Any, what: str) -> tuple[Any, ...]:
    """Return the branches of a node, numbered from 0; an empty text has none."""
    if isinstance(node, str) and not node:
        return ()
    if not isinstance(node, dict) or sorted(node) != list(range(len(node))):
        found = sorted(node) if isinstance(node, dict) else None
        message = f"{what} are not numbered from 0 on without a gap"
        raise CacheValueError(message, what, found)
    return tuple(node[i] for i in range(len(node)))


def small_integers(numbers: Any) -> NDArray[Any]:
    """Return the dtype for counts: int32 as in mlx-lm, or int64 if that is too small."""
    array = np.array(numbers, np.int64)
    small = array.astype(np.int32)
    return small if np.array_equal(small, array) else array


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CacheValueError(f"{shown(value)} should be a number", "number", value)
    return value


def _texts(*numbers: Any) -> tuple[str, ...]:
    return tuple(str(_number(number)) for number in numbers)


def _counts(counts: Any) -> tuple[str, ...]:
    if not isinstance(counts, np.ndarray) or counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise CacheValueError("counts of rows should be an array of numbers", "counts of rows")
    return tuple(map(str, counts.tolist()))


def _first(buffer: Any, n: int, *, at_most: bool = False) -> Any:
    """Return the first `n` tokens of a buffer; files include spare room."""
    is_buffer = isinstance(buffer, np.ndarray) and buffer.ndim == 4
    if is_buffer and at_most:
        n = min(n, buffer.shape[2])
    if not is_buffer or not 0 <= n <= buffer.shape[2]:
        message = f"a buffer does not hold the {n} tokens that it should"
        raise CacheValueError(message, "tokens of a buffer", np.shape(buffer), n)
    return buffer[:, :, :n]


def _pair(keys: Any, values: Any, n: Any, *, at_most: bool = False) -> tuple[Any, ...]:
    if keys is None:
        return ()
    return tuple(_first(buffer, _number(n), at_most=at_most) for buffer in (keys, values))


def _read_plain(keys: Any, values: Any, offset: Any = None) -> Serialized:
    if offset is None and np.ndim(keys) == 4:  # a ConcatenateKVCache
        offset = keys.shape[2]
    return _pair(keys, values, offset), ()


def _write_plain(state: Any, meta: Any) -> Any:
    return (*state, state[0].shape[2]) if state else (None, None, 0)


def _read_ring(k: Any, v: Any, offset: Any, keep: Any, max_size: Any, index: Any) -> Serialized:
    return _pair(k, v, offset, at_most=True), _texts(keep, max_size, offset, index)


def _write_ring(state: Any, meta: Any) -> Any:
    keep, max_size, offset, index = map(int, meta)
    return (*(state or (None, None)), offset, keep, max_size, index)


def _read_chunked(k: Any, v: Any, offset: Any, chunk_size: Any, start: Any) -> Serialized:
    return _pair(k, v, _number(offset) - _number(start)), _texts(chunk_size, start)


def _write_chunked(state: Any, meta: Any) -> Any:
    chunk_size, start = map(int, meta)
    keys, values, n = _write_plain(state, ())
    return keys, values, start + n, chunk_size, start


def _read_quantized(k: Any, v: Any, offset: Any, group_size: Any, bits: Any) -> Serialized:
    meta, n = _texts(offset, group_size, bits), _number(offset)
    if k is None:
        return (), meta
    triples = (dense(node, "parts of a triple") for node in (k, v))
    return tuple(tuple(_first(part, n) for part in triple) for triple in triples), meta


def _write_quantized(state: Any, meta: Any) -> Any:
    return (*(state or (None, None)), *map(int, meta))


def _read_slots(slots: Any, padding: Any, lengths: Any) -> Serialized:
    arrays = dense(slots, "slots")
    counts = ("" if c is None else ",".join(_counts(c)) for c in (padding, lengths))
    return arrays, (str(len(arrays)), *counts)


def _write_slots(state: Any, meta: Any) -> Any:
    size, padding, lengths = meta or (len(state), "", "")
    counts = [[int(c) for c in text.split(",")] if text else None for text in (padding, lengths)]
    slots = state or (None,) * int(size)
    return (slots, *(None if c is None else small_integers(c) for c in counts))


def _read_batch(k: Any, v: Any, offset: Any, padding: Any, columns: Any) -> Serialized:
    if k is None:
        return (), _counts(padding)
    return (*_pair(k, v, columns), offset, padding), ()


def _write_batch(state: Any, meta: Any) -> Any:
    if not state:
        padding = small_integers([int(text) for text in meta])
        return None, None, -padding, padding, 0
    keys, values, offset, padding = state
    return keys, values, small_integers(offset), small_integers(padding), keys.shape[2]


def _read_batch_ring(
    k: Any, v: Any, offset: Any, padding: Any, max_size: Any, seen: Any, index: Any, rotated: Any
) -> Serialized:
    if not isinstance(rotated, (bool, int)):
        raise CacheValueError(f"{shown(rotated)} should be a flag", "rotated", rotated)
    meta = (*_texts(max_size, seen, index), str(bool(rotated)))
    if k is None:
        return (), (*meta, *_counts(padding))
    return (*_pair(k, v, seen, at_most=True), offset, padding), meta


def _write_batch_ring(state: Any, meta: Any) -> Any:
    max_size, seen, index = map(int, meta[:3])
    *batch, _ = _write_batch(state, meta[4:])
    return (*batch, max_size, seen, index, meta[3] == "True")


def _read_list(*members: Any) -> Serialized:
    names, states, metas = [], [], []
    for member in members:
        parts = dense(member, "parts of a member of a CacheList")
        if len(parts) != 2:
            message = f"a member of a CacheList has {len(parts)} parts, not a state and a name"
            raise CacheValueError(message, "member of a CacheList", len(parts), 2)
        state, meta = state_of_parts(parts[1], parts[0])
        names.append(parts[1])
        states.append(state)
        metas.append(meta)
    return tuple(states), (tuple(names), tuple(metas))


def _write_list(state: Any, meta: Any) -> Any:
    members = (parts_of_state(n, s, m) for n, m, s in zip(*meta, state, strict=True))
    return tuple((parts, name) for name, parts in members)


class _Row(NamedTuple):
    """Registration of a cache class."""

    empty: Callable[[], BaseCache]
    read: Callable[..., Serialized]
    write: Callable[[Any, Any], Any]
    aliases: tuple[str, ...] = ()


_ROWS = {
    KvCacheKind.KV_CACHE: _Row(
        KVCache,
        _read_plain,
        _write_plain,
        ("ConcatenateKVCache", "KVCacheSimple", "StandardKvCache"),
    ),
    KvCacheKind.ROTATING_KV_CACHE: _Row(
        lambda: RotatingKVCache(0), _read_ring, _write_ring, ("RotatingKvCache",)
    ),
    KvCacheKind.CHUNKED_KV_CACHE: _Row(
        lambda: ChunkedKVCache(1), _read_chunked, _write_chunked, ("ChunkedKvCache",)
    ),
    KvCacheKind.QUANTIZED_KV_CACHE: _Row(
        QuantizedKVCache, _read_quantized, _write_quantized, ("StandardQuantizedKvCache",)
    ),
    KvCacheKind.CACHE_LIST: _Row(CacheList, _read_list, _write_list),
    KvCacheKind.BATCH_KV_CACHE: _Row(
        lambda: BatchKVCache([]), _read_batch, _write_batch, ("BatchKvCache",)
    ),
    KvCacheKind.BATCH_ROTATING_KV_CACHE: _Row(
        lambda: BatchRotatingKVCache(0, []),
        _read_batch_ring,
        _write_batch_ring,
        ("BatchRotatingKvCache",),
    ),
    KvCacheKind.ARRAYS_CACHE: _Row(lambda: ArraysCache(0), _read_slots, _write_slots),
    KvCacheKind.MAMBA_CACHE: _Row(MambaCache, _read_slots, _write_slots),
}
_BY_NAME = {name: kind for kind, row in _ROWS.items() for name in (kind.value, *row.aliases)}
