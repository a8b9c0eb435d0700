"""Caches of every kind with something in them, and what can be seen of them."""

from __future__ import annotations

import pickle

import numpy as np
from mlx_reference import kv, snapshot

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
)

ONE, THREE = kv([9]), kv([7, 8, 9])
TWO_ROWS = kv([9], [19])
SIX_COLUMNS = kv([7, 8, 9], [17, 18, 19])


def filled(cache, *updates):
    for tokens in updates:
        cache.update(*kv(*tokens))
    return cache


def quantized():
    return filled(QuantizedKVCache(4, 8), [[1, 2, 3]])


def batch():
    return filled(BatchKVCache([1, 2]), [[0, 1, 2, 3], [0, 0, 12, 13]])


def padded():
    cache = batch()
    cache.prepare(right_padding=[0, 1], lengths=[3, 2])
    return filled(cache, [[4, 5, 6], [14, 15, 0]])


def rings(n=2):
    cache = BatchRotatingKVCache(4, [1, 2][:n])
    for i in range(6):
        cache.update(*kv(*[[10 * row + i] for row in range(n)]))
    return cache


def padded_rings():
    cache = rings()
    cache.prepare(right_padding=[0, 1], lengths=[3, 2])
    return filled(cache, [[4, 5, 6], [14, 15, 0]])


def slots():
    cache = ArraysCache(2)
    cache[0], cache[1] = np.ones((2, 3)), np.ones((2, 2))
    cache.prepare(lengths=[3, 2])
    return cache


def several():
    return CacheList(batch(), rings(), slots())


def ring(*tokens):
    return filled(RotatingKVCache(4, 1), *([[t]] for t in tokens))


def layers():
    return [filled(KVCache(), [[1, 2, 3, 4]]), quantized(), several_plain()]


def several_plain():
    return CacheList(filled(KVCache(), [[1, 2, 3]]), filled(ChunkedKVCache(2), [[1, 2, 3]]))


def prompts():
    lru = LRUPromptCache(max_size=3)
    for tokens in ([1, 2, 3], [1, 2], [7, 8]):
        lru.insert_cache("m", tokens, [filled(RotatingKVCache(2), [tokens])])
    return lru


def copies(one):
    """Return what gives copies of it: to load them takes a tenth of the time of `deepcopy`."""
    data = pickle.dumps(one, pickle.HIGHEST_PROTOCOL)
    return lambda: pickle.loads(data)


def seen(one):
    """What can be seen of a cache or of several; what waits for `finalize` is finalized first."""
    if isinstance(one, list):
        return [seen(cache) for cache in one]
    if isinstance(one, CacheList):
        return [seen(cache) for cache in one]
    if isinstance(one, LRUPromptCache):
        twins, found = copies(one), []
        for tokens in ([1, 2, 3], [1, 2], [1, 2, 3, 4], [7, 8], [1, 2, 9], [1, 2, 3, 4, 5]):
            got, rest = twins().fetch_nearest_cache("m", tokens)
            found.append((None if got is None else seen(got), rest))
        twin, sizes = twins(), []
        while len(twin):
            sizes.append((len(twin), twin.nbytes, twin.stats_by_type()))
            twin.trim_to(n_sequences=len(twin) - 1)
        return found, sizes, twin._trie._roots
    if getattr(one, "_right", None) is not None or getattr(one, "_ends", None) is not None:
        ready = one.copy()
        ready.finalize()
        return "waits", snapshot(ready)
    mask = one.make_mask(1)
    counts = (one.left_padding, one.lengths) if isinstance(one, ArraysCache) else ()
    return snapshot(one), None if mask is None else mask.tolist(), repr(counts)
