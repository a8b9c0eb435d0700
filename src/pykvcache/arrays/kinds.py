"""Caches by name: the kinds that a saved state can be of, and how one comes back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from pykvcache.arrays._base import BaseCache
from pykvcache.arrays.batch import BatchKVCache
from pykvcache.arrays.batch_rotating import BatchRotatingKVCache
from pykvcache.arrays.cache_list import CacheList
from pykvcache.arrays.chunked import ChunkedKVCache
from pykvcache.arrays.quantized import QuantizedKVCache
from pykvcache.arrays.recurrent import ArraysCache, MambaCache
from pykvcache.arrays.rotating import RotatingKVCache
from pykvcache.arrays.standard import KVCache
from pykvcache.errors import CacheValueError

__all__ = ["KvCacheKind", "from_state"]


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
        if kind not in _NAMES:
            raise CacheValueError(
                f"unknown cache kind {kind!r}; expected one of {', '.join(_NAMES)}"
            )
        return _NAMES[kind]


_NAMES = {
    "KVCache": KvCacheKind.KV_CACHE,
    "ConcatenateKVCache": KvCacheKind.KV_CACHE,
    "KVCacheSimple": KvCacheKind.KV_CACHE,
    "StandardKvCache": KvCacheKind.KV_CACHE,
    "RotatingKVCache": KvCacheKind.ROTATING_KV_CACHE,
    "RotatingKvCache": KvCacheKind.ROTATING_KV_CACHE,
    "ChunkedKVCache": KvCacheKind.CHUNKED_KV_CACHE,
    "ChunkedKvCache": KvCacheKind.CHUNKED_KV_CACHE,
    "QuantizedKVCache": KvCacheKind.QUANTIZED_KV_CACHE,
    "StandardQuantizedKvCache": KvCacheKind.QUANTIZED_KV_CACHE,
    "CacheList": KvCacheKind.CACHE_LIST,
    "BatchKVCache": KvCacheKind.BATCH_KV_CACHE,
    "BatchKvCache": KvCacheKind.BATCH_KV_CACHE,
    "BatchRotatingKVCache": KvCacheKind.BATCH_ROTATING_KV_CACHE,
    "BatchRotatingKvCache": KvCacheKind.BATCH_ROTATING_KV_CACHE,
    "ArraysCache": KvCacheKind.ARRAYS_CACHE,
    "MambaCache": KvCacheKind.MAMBA_CACHE,
}


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
    kind = kind if isinstance(kind, KvCacheKind) else KvCacheKind.parse(kind)
    if kind is KvCacheKind.CACHE_LIST:
        return _list_from_state(state, meta)
    cache = _blank(kind)
    cache.from_serialized(state, meta)
    return cache


def _blank(kind: KvCacheKind) -> BaseCache:
    # Numbers that are placeholders here come out of the meta state.
    if kind is KvCacheKind.ROTATING_KV_CACHE:
        return RotatingKVCache(0)
    if kind is KvCacheKind.CHUNKED_KV_CACHE:
        return ChunkedKVCache(1)
    if kind is KvCacheKind.QUANTIZED_KV_CACHE:
        return QuantizedKVCache()
    if kind is KvCacheKind.BATCH_KV_CACHE:
        return BatchKVCache([])
    if kind is KvCacheKind.BATCH_ROTATING_KV_CACHE:
        return BatchRotatingKVCache(0, [])
    if kind is KvCacheKind.ARRAYS_CACHE:
        return ArraysCache(0)
    return MambaCache() if kind is KvCacheKind.MAMBA_CACHE else KVCache()


def _list_from_state(state: Sequence[Any], meta: Sequence[Any]) -> CacheList:
    if len(meta) != 2 or len(meta[0]) != len(meta[1]):
        raise CacheValueError(f"the meta state of a CacheList is names and metas; got {meta!r}")
    names, metas = meta
    states = state if len(state) else [()] * len(names)
    if len(states) != len(names):
        raise CacheValueError(f"a CacheList of {len(names)} caches has {len(states)} states")
    return CacheList(*(from_state(*parts) for parts in zip(names, states, metas, strict=True)))
