"""Numbers, rows and tokens that cannot be: each refused by name, with nothing changed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from mlx_makers import filled, padded, rings, seen, slots
from mlx_reference import ids, kv, snapshot

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    LRUPromptCache,
    PromptCacheConfig,
    PromptTrie,
    QuantizedKVCache,
    RotatingKVCache,
    create_attention_mask,
    create_causal_mask,
    from_state,
    make_prompt_cache,
)
from pykvcache.errors import CacheValueError, KvCacheError

HUGE = 10**5000
RAGGED = [[1], [2, 3]]
LARGEST = 2**60
RECORD = [(f"field{i}", int) for i in range(999)]


class Bad:
    """An argument that cannot even be shown."""

    def __repr__(self):
        raise ZeroDivisionError


def test_padding_never_wraps_around():
    """Sums of padding fit int64, or are refused."""
    for cache in (BatchKVCache([LARGEST]), BatchRotatingKVCache(4, [LARGEST])):
        before = snapshot(cache)
        with pytest.raises(CacheValueError, match=str(LARGEST)):
            cache.prepare(left_padding=[1])
        assert snapshot(cache) == before
    slots = ArraysCache(1, [LARGEST])
    with pytest.raises(CacheValueError):
        slots.prepare(left_padding=[1])
    assert slots.left_padding == [LARGEST]
    slots = ArraysCache(1, [-0])
    slots.prepare(lengths=[1])
    for _ in range(3):
        slots.advance(2**31 - 1)
    assert slots.lengths.tolist() == [1 - 3 * (2**31 - 1)]


@pytest.mark.parametrize(
    "padding",
    [[2**62], [LARGEST + 1], np.array([2**64 - 1], np.uint64), [True, 0], [2**70], RAGGED],
)
def test_padding_that_cannot_be_is_refused(padding):
    for call in (
        lambda: BatchKVCache(padding),
        lambda: BatchRotatingKVCache(4, padding),
        lambda: ArraysCache(1, padding),
        lambda: ArraysCache(1).prepare(lengths=padding),
        lambda: BatchKVCache([0]).filter(padding),
        lambda: create_causal_mask(2, left_padding=padding),
        lambda: create_causal_mask(2, right_padding=padding),
    ):
        with pytest.raises(KvCacheError) as found:
            call()
        assert len(str(found.value)) < 300


def test_a_state_whose_rows_contradict_its_columns_is_refused():
    x = np.ones((1, 1, 3, 2), np.float32)
    meta = ("8", "3", "3", "False")
    for offset in (1000, 4, -1, 2**63 - 2):
        with pytest.raises(CacheValueError, match="rope_offset"):
            from_state("BatchRotatingKVCache", (x, x, np.array([offset]), np.array([0])), meta)
    state = (x, x, np.array([2**64 - 5], np.uint64), np.array([0]))
    with pytest.raises(CacheValueError):
        from_state("BatchRotatingKVCache", state, meta)
    good = from_state("BatchRotatingKVCache", (x, x, np.array([2]), np.array([1])), meta)
    assert good.rope_offset == [2]
    for lengths, padding in (("1,2,3", ""), ("", "1"), ("1,2", "1")):
        with pytest.raises(CacheValueError, match="rows"):
            from_state("ArraysCache", [np.ones((2, 3))], ("1", padding, lengths))
    cache = slots()
    before = seen(cache)
    with pytest.raises(CacheValueError):
        cache.meta_state = ("2", "1,2,3", "")
    assert seen(cache) == before


def test_what_a_batch_ring_says_of_itself_is_taken():
    """Rings that rotated, were trimmed, extended, merged or padded fit their own state."""
    made = [rings(), rings(1)]
    made[0].extend(rings())
    made.append(filled(BatchRotatingKVCache(8, [3, 0]), [[0, 0, 0, 4], [1, 2, 3, 4]]))
    made[-1].trim(2)
    short, long = RotatingKVCache(4), RotatingKVCache(4)
    short.update(*kv([1, 2]))
    for i in range(9):
        long.update(*kv([i]))
    made.append(RotatingKVCache.merge([short, long]))
    for n in (1, 3, 1, 1, 1, 5):
        for cache in made:
            again = from_state("BatchRotatingKVCache", cache.state, cache.meta_state)
            assert snapshot(again) == snapshot(cache)
            cache.update(*kv(*[range(n)] * cache.batch_size))
    made[1].prepare(right_padding=[2], lengths=[1])
    made[1].update(*kv([7, 0, 0]))
    made[1].finalize()
    assert snapshot(from_state("BatchRotatingKVCache", made[1].state, made[1].meta_state))


def test_sizes_that_no_file_can_hold_are_refused():
    for call in (
        lambda: RotatingKVCache(10**20),
        lambda: RotatingKVCache(4, 10**20),
        lambda: BatchRotatingKVCache(10**20, [0]),
        lambda: ChunkedKVCache(2**63),
        lambda: QuantizedKVCache(2**61),
        lambda: make_prompt_cache(PromptCacheConfig(10**9)),
    ):
        with pytest.raises(CacheValueError):
            call()
    for cache in (RotatingKVCache(sys.maxsize), ChunkedKVCache(sys.maxsize)):
        cache.update(*kv([1]))
        cache.from_serialized(cache.state, cache.meta_state)
        assert snapshot(from_state(type(cache).__name__, cache.state, cache.meta_state)) == (
            snapshot(cache)
        )
    deep = KVCache()
    for _ in range(64):
        deep = CacheList(deep)
    with pytest.raises(CacheValueError, match="levels"):
        CacheList(deep)
    name, state, meta = "KVCache", (), ()
    for _ in range(5000):
        name, state, meta = "CacheList", (state,), ((name,), (meta,))
    with pytest.raises(CacheValueError, match="levels"):
        from_state(name, state, meta)


def test_errors_of_huge_and_unshowable_arguments_are_short():
    for call in (
        lambda: QuantizedKVCache(64, HUGE),
        lambda: QuantizedKVCache(HUGE, 8),
        lambda: create_causal_mask(HUGE),
        lambda: create_causal_mask(2, HUGE),
        lambda: RotatingKVCache(HUGE),
        lambda: create_attention_mask(RAGGED),
        lambda: LRUPromptCache().insert_cache("m", [1], [], cache_type="x" * 10**6),
        lambda: LRUPromptCache().insert_cache("m", [1], [], cache_type=Bad()),
        lambda: BatchKVCache(np.full(10**5, -1)),
        lambda: BatchKVCache(np.full(10**5, 2**62)),
        lambda: BatchKVCache([0]).filter(np.full(10**5, 7)),
        lambda: PromptTrie().get("m" * 10**6, [1]),
        lambda: PromptTrie().get(Bad(), [1]),
        lambda: CacheList(KVCache()).from_serialized(((),), (("x" * 10**6,), ((),))),
        lambda: KVCache().update(*[np.zeros((1, 1, 1, 1), RECORD)] * 2),
    ):
        with pytest.raises(KvCacheError) as found:
            call()
        assert len(str(found.value)) < 400


@pytest.mark.parametrize("kind", [KVCache, RotatingKVCache, ArraysCache, CacheList])
def test_merge_takes_any_iterable(kind):
    def one(n):
        cache = kind(4) if kind is RotatingKVCache else KVCache()
        if kind is ArraysCache:
            cache = ArraysCache(1)
            cache[0] = np.full((1, 1), n)
        else:
            cache.update(*kv([*range(n)]))
        return CacheList(cache) if kind is CacheList else cache

    from_list = kind.merge([one(2), one(3)])
    found = kind.merge(one(n) for n in (2, 3))
    assert seen(found) == seen(from_list)
    if kind in (KVCache, RotatingKVCache):
        batch = type(found).merge(iter([one(2), one(3)]))
        assert batch.batch_size == 2
        assert ids(batch.state[1], 1) == [0, 1, 2]


def test_rows_that_are_all_filtered_away_can_be_finalized():
    cache = padded()
    cache.filter([])
    cache.finalize()
    assert (cache.batch_size, cache.offset) == (0, 7)
    ring = rings()
    ring.prepare(right_padding=[0, 1], lengths=[2, 1])
    ring.update(*kv([1, 2], [3, 0]))
    ring.filter([])
    ring.finalize()
    assert ring.batch_size == 0


@pytest.mark.parametrize("tokens", [[1.0, 2], [True, 1], "text", [1, 2, [3]], [None], 5, [b"x"]])
def test_tokens_are_integers(tokens):
    lru, trie = LRUPromptCache(), PromptTrie()
    for call in (
        lambda: lru.insert_cache("m", tokens, [KVCache()]),
        lambda: lru.fetch_nearest_cache("m", tokens),
        lambda: trie.add("m", tokens, "value"),
        lambda: trie.get("m", tokens),
        lambda: trie.pop("m", tokens),
        lambda: trie.pop_prefixes("m", tokens),
        lambda: trie.search("m", tokens),
        lambda: [*trie.continuations("m", tokens)],
    ):
        with pytest.raises(TypeError):
            call()
    assert len(lru) == 0
    assert trie.search("m", [1, 2]).common_prefix == 0
    assert trie._roots == {}


def test_tokens_of_numpy_are_those_of_python():
    lru = LRUPromptCache()
    lru.insert_cache("m", [np.int32(1), np.uint8(2)], [KVCache()])
    assert lru.fetch_nearest_cache("m", [1, 2])[1] == []
    with pytest.raises(KvCacheError):
        lru.fetch_nearest_cache("m", np.array([1.0]))


def test_a_failing_add_leaves_no_branches():
    trie = PromptTrie()
    trie.add("m", [1], "one")
    with pytest.raises(TypeError):
        trie.add("m", [1, 2, "3"], "value")
    with pytest.raises(TypeError):
        trie.add([], [1], "value")
    assert trie.search("m", [1, 2]).common_prefix == 1
    assert trie.pop("m", [1]) == "one"
    assert trie._roots == {}


def test_prompts_that_cannot_be_copied_are_no_hit(monkeypatch):
    lru = LRUPromptCache(max_size=2)
    lru.insert_cache("m", [1], [KVCache()])
    lru.insert_cache("m", [2], [KVCache()])

    def fails(self):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "copy", fails)
        with pytest.raises(MemoryError):
            lru.fetch_nearest_cache("m", [1])
    lru.insert_cache("m", [3], [KVCache()])
    assert lru.fetch_nearest_cache("m", [1])[0] is None  # it was still the oldest


def test_shapes_that_no_array_can_have_are_refused():
    keys = np.empty((2**31, 2**28, 1, 0), np.float32)
    with pytest.raises(CacheValueError, match=f"an array has at most {sys.maxsize} bytes"):
        KVCache().update(keys, keys)


@pytest.mark.parametrize(
    "make",
    [
        KVCache,
        ConcatenateKVCache,
        lambda: RotatingKVCache(2),
        lambda: ChunkedKVCache(2),
        lambda: BatchKVCache([0]),
        lambda: BatchRotatingKVCache(2, [0]),
    ],
)
def test_a_history_that_no_array_can_hold_is_refused(make):
    """Found: NumPy's ValueError, which is no KvCacheError."""
    cache = make()
    cache.update(*[np.ones((1, 1, 3, 1), np.uint8)] * 2)
    before = snapshot(cache)
    giant = np.broadcast_to(np.uint8(1), (1, 1, sys.maxsize, 1))
    with pytest.raises(CacheValueError, match="shape"):
        cache.update(giant, giant)
    assert snapshot(cache) == before
