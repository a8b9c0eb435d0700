"""Prompt caches for the next request against a list: hits, copies, eviction."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_support import HEADS, K_DIM, V_DIM, filled, pickled, stored

from pykvcache.arrays import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from pykvcache.errors import CacheValueError
from support.examples import examples

BYTES = 256 * HEADS * (K_DIM + V_DIM) * 4


def caches(tokens: Any, make: Any = KVCache, layers: int = 1) -> list[Any]:
    return [filled(make(), [tokens]) if len(tokens) else make() for _ in range(layers)]


def fixed(tokens: Any, layers: int = 1) -> list[Any]:
    """Return caches that cannot be trimmed and know their tokens."""
    made = [ArraysCache(1) for _ in range(layers)]
    for cache in made:
        cache[0] = np.array([tokens], np.float64)
    return made


def fetched(lru: Any, tokens: Any, model: str = "m") -> Any:
    got, rest = lru.fetch_nearest_cache(model, tokens)
    return (None if got is None else [stored(cache) for cache in got]), rest


@settings(max_examples=examples(200), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=4),
            st.sampled_from(["assistant", "user", "system"]),
            st.sampled_from(["insert", "insert", "fixed", "fetch", "fetch", "trim", "copy"]),
            st.integers(1, 3),
        ),
        max_size=20,
    ),
    size=st.integers(0, 5),
    limit=st.integers(0, 8),
)
def test_prompts_are_a_list_of_entries(steps: list[Any], size: int, limit: int) -> None:
    lru, plain = LRUPromptCache(size, limit * BYTES), []  # [tokens, type, nbytes, fixed], by age

    def evict(entries: int, nbytes: int) -> None:
        while len(plain) > entries or (plain and sum(e[2] for e in plain) > nbytes):
            by = [[e for e in plain if e[1] == t] for t in ("assistant", "user", "system")]
            a, u, s = map(len, by)
            plain.remove(by[0 if a and a >= u else 1 if u and u >= s else 2][0])

    def nearest(tokens: list[int]) -> tuple[list[int] | None, list[int] | None]:
        """Return the tokens that a fetch finds, and those of the entry."""
        entries = {tuple(e[0]): e for e in plain}
        if tuple(tokens) in entries:
            return tokens, tokens
        common = max(
            (n for n in range(5) for k in entries if k[:n] == tuple(tokens[:n])), default=0
        )
        common = min(common, len(tokens))
        short = max((len(k) for k in entries if k == tuple(tokens[: len(k)])), default=0)
        if common > short:
            for longer in lru._trie.continuations("m", tokens[:common]):
                if not entries[tuple(longer)][3]:
                    return tokens[: min(len(tokens) - 1, common)], longer
        return (tokens[:short], tokens[:short]) if short else (None, None)

    for tokens, who, what, n in steps:
        if what in ("insert", "fixed"):
            made = caches(tokens, layers=n) if what == "insert" else fixed(tokens, n)
            nbytes = sum(cache.nbytes for cache in made)
            lru.insert_cache("m", tokens, made, cache_type=who)
            if nbytes <= limit * BYTES:
                shorter = [tokens[:i] for i in range(len(tokens))] if what == "insert" else []
                plain[:] = [e for e in plain if e[0] not in [*shorter, tokens]]
                plain.append([tokens, who, nbytes, what == "fixed"])
                evict(size, limit * BYTES)
        elif what == "fetch":
            prefix, entry = nearest(tokens)
            got, rest = lru.fetch_nearest_cache("m", tokens)
            assert rest == (tokens if prefix is None else tokens[len(prefix) :])
            assert (got is None) is (prefix is None)
            for cache in got or ():
                if isinstance(cache, ArraysCache):
                    assert cache[0][0].tolist() == prefix
                    cache[0][:] = 77
                else:
                    assert stored(cache) == prefix
                    filled(cache, [[77]])
            plain.sort(key=lambda e: e[0] == entry)
        elif what == "trim":
            lru.trim_to(n_sequences=n, n_bytes=2 * n * BYTES)
            evict(n, 2 * n * BYTES)
        else:
            lru = copy.copy(lru) if n == 1 else copy.deepcopy(lru) if n == 2 else pickled(lru)
        for name, stats in lru.stats_by_type().items():
            sizes = [e[2] for e in plain if e[1] == name]
            assert stats == {"n_sequences": len(sizes), "n_bytes": sum(sizes)}
        assert (len(lru), lru.nbytes) == (len(plain), sum(e[2] for e in plain))
    for entry in plain:
        assert lru.fetch_nearest_cache("m", entry[0])[1] == []


def test_models_have_their_own_prompts() -> None:
    lru, mine = LRUPromptCache(), caches([1, 2, 3])
    lru.insert_cache("m", np.array([1, 2, 3]), mine)
    mine[0].trim(2)
    filled(mine[0], [[9]])  # what was inserted is a copy
    assert fetched(lru, [1, 2, 3]) == ([[1, 2, 3]], [])
    assert fetched(lru, [1, 2, 3], "other") == (None, [1, 2, 3])
    assert fetched(lru, [1]) == ([[]], [1])
    assert (lru.max_size, lru.max_bytes) == (10, 1 << 63)


def test_caches_that_cannot_be_trimmed_are_a_miss() -> None:
    lru, long = LRUPromptCache(), caches([1, 2, 3, 4, 5], lambda: ChunkedKVCache(2), layers=2)
    for cache in long:
        cache.maybe_trim_front()
    lru.insert_cache("m", [1, 2, 3, 4, 5], long)
    assert fetched(lru, [1, 2, 9])[0] is None
    assert fetched(lru, [1, 2, 3, 4, 9]) == ([[4]] * 2, [9])
    lru.insert_cache("r", [1, 2, 3, 4, 5], caches([1, 2, 3, 4, 5], lambda: RotatingKVCache(4)))
    assert fetched(lru, [1, 2, 9], "r") == (None, [1, 2, 9])


def test_a_trimmed_fetch_copies_only_the_tokens_that_it_returns() -> None:
    lru, tokens = LRUPromptCache(), [*range(1000)]
    quantized: Any = filled(QuantizedKVCache(4, 8), [tokens])
    lru.insert_cache("m", tokens, [*caches(tokens), quantized])
    got, rest = lru.fetch_nearest_cache("m", [*range(10), 2000])
    assert rest == [2000]
    assert got is not None
    assert [cache.offset for cache in got] == [10, 10]
    assert got[0].nbytes == BYTES
    assert got[1].nbytes < quantized.nbytes / 3


def test_an_entry_above_all_room_evicts_no_other() -> None:
    lru = LRUPromptCache(max_bytes=3 * BYTES)
    lru.insert_cache("m", [1], caches([1], layers=2))
    lru.insert_cache("m", [2], caches([2], layers=4))
    assert fetched(lru, [1])[0] is not None
    assert fetched(lru, [2])[0] is None
    lru.trim_to(n_sequences=-3)
    assert (len(lru), lru.nbytes) == (0, 0)
    with pytest.raises(CacheValueError):
        lru.insert_cache("m", [1], caches([1]), cache_type="tool")
    with pytest.raises(TypeError):
        lru.insert_cache("m", [1], [None])  # type: ignore[list-item]
