"""Every class of cache by its names: how one is made, restored, and laid out in a file.

A new class has a member of `KvCacheKind` and a row of `_ROWS`; nothing else lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from pykvcache.arrays.mlx import _files as files
from pykvcache.arrays.mlx._base import BaseCache
from pykvcache.arrays.mlx.arrays_cache import ArraysCache, MambaCache
from pykvcache.arrays.mlx.batch import BatchKVCache
from pykvcache.arrays.mlx.batch_rotating import BatchRotatingKVCache
from pykvcache.arrays.mlx.cache_list import CacheList, check_depth
from pykvcache.arrays.mlx.chunked import ChunkedKVCache
from pykvcache.arrays.mlx.quantized import QuantizedKVCache
from pykvcache.arrays.mlx.rotating import RotatingKVCache
from pykvcache.arrays.mlx.standard import KVCache
from pykvcache.errors import CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["KvCacheKind", "from_state", "newer_state", "serialized"]


def _read_list(*members: Any) -> files.Serialized:
    names, states, metas = [], [], []
    for member in members:
        parts = files.parts_of(member)
        if len(parts) != 2 or not isinstance(parts[1], str):
            raise CacheValueError(
                f"a member of a CacheList has {len(parts)} parts; a state and a class name "
                "are expected",
                "member of a CacheList",
                len(parts),
                2,
            )
        state, name = parts
        plain, meta = _serialized(KvCacheKind.parse(name), state)
        names.append(name)
        states.append(plain)
        metas.append(meta)
    return tuple(states), (tuple(names), tuple(metas))


def _write_list(state: Any, meta: Any) -> Any:
    members = zip(*meta, state, strict=True)
    pairs = (newer_state(name, state, meta) for name, meta, state in members)
    return tuple((state, name) for name, state in pairs)


class KvCacheKind(Enum):
    """What a saved cache is; the values are mlx-lm's class names."""

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
        """Return the kind that mlx-lm, its Swift or its Rust port calls `kind`.

        Raises
        ------
        CacheValueError
            None of them does; the message lists the 17 names.
        """
        if kind not in _BY_NAME:
            raise CacheValueError(
                f"unknown cache kind {shown(kind)}; expected one of {', '.join(_BY_NAME)}",
                "kind",
                kind,
                tuple(_BY_NAME),
            )
        return _BY_NAME[kind]

    def empty(self) -> BaseCache:
        """Return an empty cache whose numbers are placeholders: the meta state replaces them."""
        return _ROWS[self].empty()


class _Row(NamedTuple):
    """Where a class of cache is registered."""

    empty: Callable[[], BaseCache]
    #: Parts of a state in a file of mlx-lm 0.32 to state and meta state, and the reverse.
    read: Callable[..., files.Serialized]
    write: Callable[[Any, Any], Any]
    aliases: tuple[str, ...] = ()


_ROWS = {
    KvCacheKind.KV_CACHE: _Row(
        KVCache,
        files.read_plain,
        files.write_plain,
        ("ConcatenateKVCache", "KVCacheSimple", "StandardKvCache"),
    ),
    KvCacheKind.ROTATING_KV_CACHE: _Row(
        lambda: RotatingKVCache(0), files.read_ring, files.write_ring, ("RotatingKvCache",)
    ),
    KvCacheKind.CHUNKED_KV_CACHE: _Row(
        lambda: ChunkedKVCache(1), files.read_chunked, files.write_chunked, ("ChunkedKvCache",)
    ),
    KvCacheKind.QUANTIZED_KV_CACHE: _Row(
        QuantizedKVCache,
        files.read_quantized,
        files.write_quantized,
        ("StandardQuantizedKvCache",),
    ),
    KvCacheKind.CACHE_LIST: _Row(CacheList, _read_list, _write_list),
    KvCacheKind.BATCH_KV_CACHE: _Row(
        lambda: BatchKVCache([]), files.read_batch, files.write_batch, ("BatchKvCache",)
    ),
    KvCacheKind.BATCH_ROTATING_KV_CACHE: _Row(
        lambda: BatchRotatingKVCache(0, []),
        files.read_batch_ring,
        files.write_batch_ring,
        ("BatchRotatingKvCache",),
    ),
    KvCacheKind.ARRAYS_CACHE: _Row(lambda: ArraysCache(0), files.read_slots, files.write_slots),
    KvCacheKind.MAMBA_CACHE: _Row(MambaCache, files.read_slots, files.write_slots),
}
_BY_NAME = {name: kind for kind, row in _ROWS.items() for name in (kind.value, *row.aliases)}


def from_state(
    kind: str | KvCacheKind, state: Sequence[Any], meta: Sequence[Any] = ()
) -> BaseCache:
    """Return a cache of `kind` with copies of the arrays in `state`.

    Parameters
    ----------
    kind : str or KvCacheKind
        A name that `KvCacheKind.parse` knows.
    state, meta : sequence
        What the properties ``state`` and ``meta_state`` gave.

    Raises
    ------
    CacheValueError, CacheDTypeError
        They do not belong together: wrong shapes, counts that do not fit the arrays, an
        empty ring with an offset, an unknown kind.
    """
    return _from_state(kind, state, meta, 1)


def _from_state(
    kind: str | KvCacheKind, state: Sequence[Any], meta: Sequence[Any], depth: int
) -> BaseCache:
    kind = kind if isinstance(kind, KvCacheKind) else KvCacheKind.parse(kind)
    if kind is KvCacheKind.CACHE_LIST:
        check_depth(depth)
        return _list_from_state(state, meta, depth)
    cache = kind.empty()
    cache.from_serialized(state, meta)
    return cache


def _list_from_state(state: Sequence[Any], meta: Sequence[Any], depth: int) -> CacheList:
    if len(meta) != 2 or len(meta[0]) != len(meta[1]):
        raise CacheValueError(
            f"the meta state of a CacheList is names and metas; got {shown(meta)}",
            "meta_state",
            meta,
            2,
        )
    names, metas = meta
    states = state if len(state) else [()] * len(names)
    if len(states) != len(names):
        raise CacheValueError(
            f"a CacheList of {len(names)} caches has {len(states)} states",
            "state",
            len(states),
            len(names),
        )
    members = zip(names, states, metas, strict=True)
    return CacheList(*(_from_state(*parts, depth + 1) for parts in members))


def newer_state(name: str, state: Sequence[Any], meta: Sequence[Any]) -> tuple[str, Any]:
    """Return the class name and the state, nested, that mlx-lm 0.32 has for a cache."""
    if name == "ConcatenateKVCache" and len(state):
        return name, tuple(state)
    # A kind has one name, so an empty ConcatenateKVCache, which mlx-lm cannot read, is a KVCache.
    kind = KvCacheKind.parse(name)
    return kind.value, _ROWS[kind].write(tuple(state), tuple(meta))


def serialized(name: str, state: Any) -> tuple[KvCacheKind, Sequence[Any], Sequence[Any]]:
    """Return kind, state and meta state out of the state that a file of mlx-lm 0.32 has."""
    kind = KvCacheKind.parse(name)
    return (kind, *_serialized(kind, state))


def _serialized(kind: KvCacheKind, state: Any) -> files.Serialized:
    parts = files.parts_of(state)
    try:
        return _ROWS[kind].read(*parts)
    except TypeError as error:  # another number of parts, or parts of another type
        raise CacheValueError(
            f"the state of a {kind} is not as expected: {error}", "state", str(kind)
        ) from error
