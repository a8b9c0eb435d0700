import copy
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_reference import HEADS, K_DIM, V_DIM, kv, stored

from pykvcache.arrays import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LRUPromptCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from pykvcache.errors import CacheValueError

BYTES = 256 * HEADS * (K_DIM + V_DIM) * 4


def caches(tokens, make=KVCache, layers=2):
    made = [make() for _ in range(layers)]
    for cache in made:
        if isinstance(cache, ArraysCache):
            cache[0] = np.array([[float(sum(tokens))]])
        elif tokens:
            cache.update(*kv(list(tokens)))
    return made


def fixed(tokens):
    return caches(tokens, lambda: ArraysCache(1))


def fetched(lru, tokens, model="m"):
    got, rest = lru.fetch_nearest_cache(model, tokens)
    return (None if got is None else [stored(cache) for cache in got]), rest


def test_fetch_exact():
    """LRUPromptCache fetch_nearest_cache: exact -> copy, []."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2, 3], caches([1, 2, 3]))
    assert fetched(lru, [1, 2, 3]) == ([[1, 2, 3]] * 2, [])
    assert fetched(lru, [1, 2, 3], "other") == (None, [1, 2, 3])
    assert fetched(lru, np.array([1, 2, 3])) == ([[1, 2, 3]] * 2, [])


def test_fetch_longer_is_trimmed():
    """fetch_nearest_cache: longer & trimmable -> copy trimmed to min(len - 1, common)."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2, 3, 4, 5], caches([1, 2, 3, 4, 5]))
    assert fetched(lru, [1, 2, 3]) == ([[1, 2]] * 2, [3])
    assert fetched(lru, [1, 2, 3, 9, 9]) == ([[1, 2, 3]] * 2, [9, 9])
    assert fetched(lru, [1]) == ([[], []], [1])
    assert fetched(lru, [7]) == (None, [7])


def test_of_longer_entries_the_nearest_that_can_be_trimmed_serves():
    """fetch: one that cannot be trimmed is not in the way of one that can."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2, 3], fixed([1, 2, 3]))
    lru.insert_cache("m", [1, 2, 4, 5, 6], caches([1, 2, 4, 5, 6]))
    assert fetched(lru, [1, 2]) == ([[1]] * 2, [2])
    assert fetched(lru, [1, 2, 9]) == ([[1, 2]] * 2, [9])
    lru.insert_cache("m", [1, 2, 4, 5], caches([1, 2, 4, 5]))
    lru.trim_to(n_sequences=1)
    assert fetched(lru, [1]) == ([[]] * 2, [1])


def test_fetch_shorter():
    """fetch_nearest_cache: else the longest shorter one; else None."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], fixed([1]))
    lru.insert_cache("m", [1, 2], fixed([1, 2]))
    lru.insert_cache("m", [1, 2, 3, 4], fixed([1, 2, 3, 4]))
    got, rest = lru.fetch_nearest_cache("m", [1, 2, 3])
    assert got[0][0].item() == 3
    assert rest == [3]
    got, rest = lru.fetch_nearest_cache("m", [1, 9])
    assert got[0][0].item() == 1
    assert rest == [9]


def test_one_token_prefix_is_found():
    """Upstream bug: a one-token stored prefix never matches."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], caches([1]))
    assert fetched(lru, [1, 2]) == ([[1]] * 2, [2])


def test_caches_that_cannot_go_back_are_not_handed_out():
    """A cache that does not trim as far as asked is no prefix."""

    def dropped():
        cache = ChunkedKVCache(2)
        return cache

    lru = LRUPromptCache()
    long = caches([1, 2, 3, 4, 5], dropped)
    for cache in long:
        cache.maybe_trim_front()
    lru.insert_cache("m", [1, 2, 3, 4, 5], long)
    assert fetched(lru, [1, 2, 9])[0] is None
    got, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 4, 9])
    assert [stored(cache) for cache in got] == [[4]] * 2
    assert got[0].offset == 4
    assert rest == [9]
    ring = caches([1, 2, 3, 4, 5], lambda: RotatingKVCache(4))
    lru.insert_cache("r", [1, 2, 3, 4, 5], ring)
    assert fetched(lru, [1, 2, 9], "r") == (None, [1, 2, 9])


def test_hits_refresh_recency():
    """Upstream bug: eviction is FIFO; here every hit refreshes recency (really LRU)."""
    for hit, tokens in (("exact", [1, 2]), ("shorter", [1, 2, 3]), ("longer", [1, 9])):
        lru = LRUPromptCache(max_size=2)
        lru.insert_cache("m", [1, 2], caches([1, 2]))
        lru.insert_cache("m", [5, 6], caches([5, 6]))
        assert fetched(lru, tokens)[0] is not None, hit
        lru.insert_cache("m", [7, 8], caches([7, 8]))
        assert fetched(lru, [5, 6])[0] is None, hit
        assert fetched(lru, [1, 2])[0] is not None, hit


def test_entries_are_isolated():
    """LRUPromptCache: entries are isolated from fetched and from inserted caches."""
    lru = LRUPromptCache()
    mine = caches([1, 2, 3])
    lru.insert_cache("m", [1, 2, 3], mine)
    for cache in mine:
        cache._pair.values[:] = 0
        cache.trim(2)
    for tokens in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 9]):
        got, _ = lru.fetch_nearest_cache("m", tokens)
        for cache in got:
            cache._pair.values[:] = 77
            cache.update(*kv([9]))
            cache.trim(1)
    assert fetched(lru, [1, 2, 3]) == ([[1, 2, 3]] * 2, [])


def test_trimmed_fetch_copies_only_what_it_hands_out():
    """Upstream bug: deep copy of the whole cache at every fetch."""
    lru = LRUPromptCache()
    tokens = [*range(1000)]
    lru.insert_cache("m", tokens, caches(tokens))
    got, rest = lru.fetch_nearest_cache("m", [*range(10), 2000])
    assert rest == [2000]
    assert stored(got[0]) == [*range(10)]
    assert sum(cache.nbytes for cache in got) == 2 * BYTES
    lru.insert_cache("q", tokens, [QuantizedKVCache(4, 8).copy()])
    assert lru.fetch_nearest_cache("q", tokens)[0][0].is_empty()


def test_insert_removes_prefixes_of_trimmable_caches():
    """insert_cache removes prefixes if trimmable."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], caches([1]))
    lru.insert_cache("m", [1, 2, 3], caches([1, 2, 3]))
    assert len(lru) == 1
    assert lru.nbytes == 2 * BYTES
    other = LRUPromptCache()
    other.insert_cache("m", [1], fixed([1]))
    other.insert_cache("m", [1, 2, 3], fixed([1, 2, 3]))
    assert len(other) == 2


def test_insert_replaces():
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], caches([1]))
    lru.insert_cache("m", [1], caches([1]), cache_type="system")
    assert len(lru) == 1
    assert lru.nbytes == 2 * BYTES
    assert lru.stats_by_type()["system"] == {"n_sequences": 1, "n_bytes": 2 * BYTES}
    assert lru.stats_by_type()["assistant"] == {"n_sequences": 0, "n_bytes": 0}


def test_count_limit_then_byte_limit():
    """insert_cache: then count limit, then byte limit (--prompt-cache-bytes honoured)."""
    lru = LRUPromptCache(max_size=3, max_bytes=4 * BYTES)
    for token in (1, 2, 3):
        lru.insert_cache("m", [token], caches([token]))
    assert len(lru) == 2
    assert lru.nbytes == 4 * BYTES
    assert fetched(lru, [1])[0] is None
    assert fetched(lru, [2])[0] is not None
    lru = LRUPromptCache(max_size=2)
    for token in (1, 2, 3):
        lru.insert_cache("m", [token], caches([token]))
    assert len(lru) == 2
    assert fetched(lru, [1])[0] is None
    assert (lru.max_size, lru.max_bytes, LRUPromptCache().max_size) == (2, 1 << 63, 10)


def test_what_exceeds_all_room_drives_nobody_out():
    lru = LRUPromptCache(max_bytes=3 * BYTES)
    lru.insert_cache("m", [1], caches([1]))
    lru.insert_cache("m", [2], caches([2], layers=4))
    assert fetched(lru, [1])[0] is not None
    assert fetched(lru, [2])[0] is None
    none = LRUPromptCache(max_size=0)
    none.insert_cache("m", [1], caches([1]))
    assert len(none) == 0
    assert none.nbytes == 0


def test_pop_order_balances_types():
    """LRUPromptCache: pop order balances assistant >= user >= system; insert by cache_type."""
    lru = LRUPromptCache()
    types = ["system", "assistant", "user", "user", "assistant", "user", "system"]
    for i, cache_type in enumerate(types):
        lru.insert_cache("m", [i], caches([i]), cache_type=cache_type)
    gone = []
    while len(lru):
        lru.trim_to(n_sequences=len(lru) - 1)
        here = {i for i in range(7) if fetched_exact(lru, i)}
        gone.append((set(range(7)) - here - set(gone)).pop())
    assert [types[i] for i in gone] == [
        "user", "assistant", "user", "assistant", "system", "user", "system"
    ]  # fmt: skip
    with pytest.raises(CacheValueError):
        lru.insert_cache("m", [1], caches([1]), cache_type="tool")


def fetched_exact(lru, token):
    # Asks the trie, so that recency is not touched.
    return lru._trie.search("m", [token]).exact is not None


def test_trim_to():
    """LRUPromptCache: trim_to(n_sequences, n_bytes)."""
    lru = LRUPromptCache()
    for token in range(6):
        lru.insert_cache("m", [token], caches([token]))
    lru.trim_to()
    assert len(lru) == 6
    lru.trim_to(n_sequences=5)
    assert len(lru) == 5
    assert not fetched_exact(lru, 0)
    lru.trim_to(n_bytes=4 * BYTES + 1)
    assert len(lru) == 2
    assert lru.nbytes == 4 * BYTES
    lru.trim_to(n_sequences=-3)
    assert len(lru) == 0
    assert lru.nbytes == 0


def test_stats_by_type():
    """LRUPromptCache: stats_by_type."""
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], caches([1]), cache_type="user")
    assert lru.stats_by_type() == {
        "assistant": {"n_sequences": 0, "n_bytes": 0},
        "user": {"n_sequences": 1, "n_bytes": 2 * BYTES},
        "system": {"n_sequences": 0, "n_bytes": 0},
    }


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(1, 3), min_size=1, max_size=5)), max_size=12
    ),
    size=st.integers(1, 4),
)
def test_every_fetch_is_a_prefix(steps, size):
    """LRUPromptCache against plain lists: a fetch holds exactly the tokens it says."""
    lru = LRUPromptCache(max_size=size)
    for insert, tokens in steps:
        if insert:
            lru.insert_cache("m", tokens, caches(tokens, layers=1))
        else:
            got, rest = lru.fetch_nearest_cache("m", tokens)
            if got is None:
                assert rest == tokens
            else:
                assert stored(got[0]) + rest == tokens
        assert len(lru) <= size
        assert lru.nbytes == BYTES * len(lru)
        assert sum(s["n_sequences"] for s in lru.stats_by_type().values()) == len(lru)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=4),
            st.sampled_from(["assistant", "user", "system"]),
            st.sampled_from(["insert", "fixed", "fetch", "trim", "copy"]),
            st.integers(1, 3),
        ),
        max_size=20,
    ),
    size=st.integers(0, 5),
    limit=st.integers(0, 8),
)
def test_what_is_evicted_is_as_with_plain_lists(steps, size, limit):
    """LRUPromptCache against lists: sizes by type, and who is there."""
    lru, plain = LRUPromptCache(size, limit * BYTES), []  # [tokens, type, nbytes], oldest first

    def evict(entries, nbytes):
        while len(plain) > entries or (plain and sum(e[2] for e in plain) > nbytes):
            by = [[e for e in plain if e[1] == t] for t in ("assistant", "user", "system")]
            a, u, s = map(len, by)
            plain.remove(by[0 if a and a >= u else 1 if u and u >= s else 2][0])

    for tokens, who, what, n in steps:
        if what in ("insert", "fixed"):
            made = (caches if what == "insert" else lambda t, layers: fixed(t))(tokens, layers=n)
            nbytes = sum(cache.nbytes for cache in made)
            lru.insert_cache("m", tokens, made, cache_type=who)
            if nbytes <= limit * BYTES:
                shorter = [tokens[:i] for i in range(len(tokens))] if what == "insert" else []
                plain[:] = [e for e in plain if e[0] not in [*shorter, tokens]]
                plain.append([tokens, who, nbytes])
                evict(size, limit * BYTES)
        elif what == "fetch":
            if fetched_exact_tokens(lru, tokens):
                lru.fetch_nearest_cache("m", tokens)
                plain.sort(key=lambda e: e[0] == tokens)
        elif what == "trim":
            lru.trim_to(n_sequences=n, n_bytes=2 * n * BYTES)
            evict(n, 2 * n * BYTES)
        else:
            lru = copy.deepcopy(lru)
        for name, stats in lru.stats_by_type().items():
            sizes = [e[2] for e in plain if e[1] == name]
            assert stats == {"n_sequences": len(sizes), "n_bytes": sum(sizes)}
        assert (len(lru), lru.nbytes) == (len(plain), sum(e[2] for e in plain))
        assert all(fetched_exact_tokens(lru, e[0]) for e in plain)


def fetched_exact_tokens(lru, tokens):
    return lru._trie.search("m", tokens).exact is not None


def test_what_an_insert_costs_does_not_grow_with_the_entries():
    """Found: every insert looked at all entries."""
    lines = []
    for size in (10, 400):
        lru, one = LRUPromptCache(size), fixed([1])
        for i in range(size):
            lru.insert_cache("m", [i, 1], one)
        counted = 0

        def trace(frame, event, argument):
            nonlocal counted
            counted += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            lru.insert_cache("m", [size, 1], one)
        finally:
            sys.settrace(before)
        lines.append(counted)
        assert len(lru) == size
    assert lines[0] == lines[1]
