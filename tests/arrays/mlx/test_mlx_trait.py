"""What holds for every kind of cache alike."""

import numpy as np
import pytest
from mlx_reference import kv, snapshot

import pykvcache.arrays as arrays
from pykvcache.arrays import (
    ROTATING_DEFAULT_KEEP,
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    KvCacheKind,
    MambaCache,
    PromptCacheConfig,
    QuantizedKVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    from_state,
    make_prompt_cache,
    trim_prompt_cache,
)
from pykvcache.arrays.mlx.base import BaseCache
from pykvcache.errors import CacheValueError, KvCacheError, NotSupported


def wide(n):
    x = np.random.default_rng(n).standard_normal((1, 1, n, 32)).astype(np.float32)
    return x, x


def fill(cache):
    """Give a fresh cache a content of its own."""
    if isinstance(cache, CacheList):
        for member in cache:
            fill(member)
    elif isinstance(cache, ArraysCache):
        cache[0] = np.ones((1, 2), np.float32)
    else:
        for n in (3, 1, 1):
            cache.update(*(wide(n) if isinstance(cache, QuantizedKVCache) else kv([*range(n)])))
    return cache


FRESH = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "RotatingKVCache": lambda: RotatingKVCache(4, keep=1),
    "ChunkedKVCache": lambda: ChunkedKVCache(3),
    "QuantizedKVCache": lambda: QuantizedKVCache(32, 4),
    "ArraysCache": lambda: ArraysCache(2),
    "MambaCache": MambaCache,
    "BatchKVCache": lambda: BatchKVCache([1]),
    "BatchRotatingKVCache": lambda: BatchRotatingKVCache(4, [1]),
    "CacheList": lambda: CacheList(KVCache(), RotatingKVCache(2)),
}
every_kind = pytest.mark.parametrize("kind", FRESH)


def test_rotating_default_keep_is_4():
    """ROTATING_DEFAULT_KEEP = 4."""
    assert ROTATING_DEFAULT_KEEP == 4


@every_kind
def test_rope_offset_is_scalar_or_one_per_row(kind):
    """RopeOffset {Scalar, Batch}: batch exactly for the batch caches."""
    cache = fill(FRESH[kind]())
    if kind.startswith("Batch"):
        assert cache.rope_offset.tolist() == [4]
        cache.rope_offset[:] = 99
        assert cache.rope_offset.tolist() == [4]
    else:
        assert cache.rope_offset == cache.offset


@every_kind
def test_every_cache_answers_the_whole_trait(kind):
    """offset, max_size (None but for rings), state, nbytes, is_empty, state_count, class name."""
    cache = FRESH[kind]()
    assert cache.is_empty()
    assert cache.offset == 0
    assert cache.size() == 0
    assert cache.max_size == (4 if "Rotating" in kind else None)
    assert cache.nbytes == 0
    assert type(cache).__name__ == kind
    assert cache.state == (((), ()) if kind == "CacheList" else ())
    assert repr(cache) == f"{kind}(offset=0, nbytes=0)"
    fill(cache)
    assert not cache.is_empty()
    assert cache.nbytes > 0
    assert len(cache.state) == (4 if kind.startswith("Batch") else 2)


@every_kind
@pytest.mark.parametrize("full", [False, True])
def test_state_and_meta_state_restore_every_kind(kind, full):
    """state / set_state, meta_state / set_meta_state, from_state for every kind."""
    cache = FRESH[kind]()
    if full:
        fill(cache)
    again = from_state(kind, cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)
    assert type(again) is (KVCache if kind == "ConcatenateKVCache" else type(cache))
    assert snapshot(from_state(KvCacheKind.parse(kind), cache.state, cache.meta_state)) == snapshot(
        cache
    )


@every_kind
def test_restored_caches_share_nothing(kind):
    """States are copied when set."""

    def leaves(state):
        for part in state:
            if isinstance(part, tuple):
                yield from leaves(part)
            elif part is not None:
                yield part

    cache = fill(FRESH[kind]())
    again = from_state(kind, cache.state, cache.meta_state)
    for other in (again, cache.copy()):
        for a in leaves(cache.state):
            assert not any(np.shares_memory(a, b) for b in leaves(other.state))


@every_kind
@pytest.mark.parametrize("full", [False, True])
def test_from_serialized_is_all_or_nothing(kind, full):
    """from_serialized is transactional: any failure leaves the cache, and raises the cause."""
    good, cache = fill(FRESH[kind]()), FRESH[kind]()
    if full:
        fill(cache)
        cache.trim(1)
    before = snapshot(cache)
    bad_metas = [("1",) * 7, ("x", "y", "z"), (("A",), ("B",))]
    bad_states = [(1,), (np.ones(2), np.ones(2), 3, 4, 5), (np.ones((1, 2)), "x"), ("a", "b", "c")]
    for meta in bad_metas:
        with pytest.raises(KvCacheError):
            cache.from_serialized(good.state, meta)
        assert snapshot(cache) == before
    for state in bad_states:
        with pytest.raises(KvCacheError):
            cache.from_serialized(state, good.meta_state)
        assert snapshot(cache) == before
        with pytest.raises(KvCacheError):
            cache.state = state
        assert snapshot(cache) == before
    cache.from_serialized(good.state, good.meta_state)
    assert snapshot(cache) == snapshot(good)


def test_from_serialized_needs_no_second_failure_path():
    """from_serialized, roll-back failing too: cannot happen, the new state is built beside."""

    class Stubborn(KVCache):
        @property
        def meta_state(self):
            return ()

        @meta_state.setter
        def meta_state(self, meta):
            raise RuntimeError("refused")

    cache = Stubborn()
    cache.update(*kv([1, 2]))
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match="refused"):
        cache.from_serialized(kv([3]), ())
    assert snapshot(cache) == before


@pytest.mark.parametrize("kind", ["KVCache", "ConcatenateKVCache", "BatchKVCache"])
def test_a_cache_without_meta_rejects_some(kind):
    """set_meta_state: a cache without meta rejects non-empty, expected 0."""
    cache = fill(FRESH[kind]())
    for meta in (("1",), "text"):
        with pytest.raises(CacheValueError):
            cache.meta_state = meta
    cache.meta_state = ""
    cache.meta_state = ()


@every_kind
def test_what_cannot_be_trimmed_trims_nothing(kind):
    """is_trimmable false, trim(n) -> 0."""
    cache = fill(FRESH[kind]())
    before = snapshot(cache)
    with pytest.raises(CacheValueError):
        cache.trim(-1)
    if not cache.is_trimmable():
        assert cache.trim(1) == 0
        assert snapshot(cache) == before
    else:
        assert cache.trim(1) == 1


@every_kind
def test_copy_is_deep(kind):
    """copy (deep)."""
    cache = fill(FRESH[kind]())
    before = snapshot(cache)
    twin = cache.copy()
    assert type(twin) is type(cache)
    assert snapshot(twin) == before
    fill(twin)
    assert snapshot(cache) == before


@pytest.mark.parametrize("kind", [k for k in FRESH if k not in ("KVCache", "ConcatenateKVCache")])
def test_most_kinds_cannot_be_quantized(kind):
    """to_quantized: only plain caches."""
    with pytest.raises(NotSupported):
        fill(FRESH[kind]()).to_quantized(group_size=32, bits=4)


NAMES = {
    KvCacheKind.KV_CACHE: ["KVCache", "ConcatenateKVCache", "KVCacheSimple", "StandardKvCache"],
    KvCacheKind.ROTATING_KV_CACHE: ["RotatingKVCache", "RotatingKvCache"],
    KvCacheKind.CHUNKED_KV_CACHE: ["ChunkedKVCache", "ChunkedKvCache"],
    KvCacheKind.QUANTIZED_KV_CACHE: ["QuantizedKVCache", "StandardQuantizedKvCache"],
    KvCacheKind.CACHE_LIST: ["CacheList"],
    KvCacheKind.BATCH_KV_CACHE: ["BatchKVCache", "BatchKvCache"],
    KvCacheKind.BATCH_ROTATING_KV_CACHE: ["BatchRotatingKVCache", "BatchRotatingKvCache"],
    KvCacheKind.ARRAYS_CACHE: ["ArraysCache"],
    KvCacheKind.MAMBA_CACHE: ["MambaCache"],
}


def test_kind_parses_all_17_names():
    """KvCacheKind: 9 kinds with names; parse accepts 17 names."""
    assert len(KvCacheKind) == 9
    assert sum(len(names) for names in NAMES.values()) == 17
    for kind, names in NAMES.items():
        assert str(kind) == kind.value == names[0]
        assert all(KvCacheKind.parse(name) is kind for name in names)


@pytest.mark.parametrize("name", ["", "kvcache", "KV", "ArraysKVCache"])
def test_unknown_kind_names_all_17(name):
    """KvCacheKind.parse: other -> an error with the value and the 17 names."""
    for call in (KvCacheKind.parse, lambda kind: from_state(kind, (), ())):
        with pytest.raises(ValueError, match="unknown cache kind") as caught:
            call(name)
        assert isinstance(caught.value, KvCacheError)
        assert repr(name) in str(caught.value)
        assert all(known in str(caught.value) for names in NAMES.values() for known in names)


def test_concatenate_cache_loads_as_kv_cache():
    """ConcatenateKVCache loads as KVCache."""
    assert type(from_state("ConcatenateKVCache", kv([1]), ())) is KVCache


def test_make_prompt_cache():
    """CacheConfig {num_hidden_layers, sliding_window}; make_prompt_cache."""
    plain = make_prompt_cache(PromptCacheConfig(num_hidden_layers=3))
    assert [type(cache) for cache in plain] == [KVCache] * 3
    for window, size in ((512, 512), (0, 0), (-7, 0)):
        rings = make_prompt_cache(PromptCacheConfig(2, sliding_window=window))
        assert [(type(c), c.max_size, c.keep) for c in rings] == [(RotatingKVCache, size, 4)] * 2
    assert make_prompt_cache(PromptCacheConfig(0)) == []
    for bad, error in (
        (PromptCacheConfig(-1), CacheValueError),
        (PromptCacheConfig(1.0), TypeError),
    ):
        with pytest.raises(error):
            make_prompt_cache(bad)


def test_prompt_cache_trims_all_layers_or_none():
    """can_trim_prompt_cache; trim_prompt_cache (0 if any layer cannot)."""
    layers = [fill(KVCache()), fill(KVCache())]
    assert can_trim_prompt_cache(layers)
    assert trim_prompt_cache(layers, 2) == 2
    assert [layer.offset for layer in layers] == [3, 3]
    layers.append(fill(FRESH["ArraysCache"]()))
    assert not can_trim_prompt_cache(layers)
    assert trim_prompt_cache(layers, 2) == 0
    assert [layer.offset for layer in layers] == [3, 3, 0]
    assert can_trim_prompt_cache([])
    assert trim_prompt_cache([], 2) == 0
    with pytest.raises(CacheValueError):
        trim_prompt_cache(layers, -1)


def test_all_names_of_the_family_are_exported():
    """Re-exported modules: everything under pykvcache.arrays."""
    for name in (*FRESH, "create_attention_mask", "create_causal_mask", "save_prompt_cache",
                 "load_prompt_cache", "PromptTrie", "LRUPromptCache", "TokenBuffer"):  # fmt: skip
        assert name in arrays.__all__
        assert hasattr(arrays, name)
    assert len(set(arrays.__all__)) == len(arrays.__all__)


def test_every_kind_is_registered_by_the_name_of_its_class():
    """A kind without a row could not be made; a class without a kind could not be saved."""
    for kind in KvCacheKind:
        assert type(kind.empty()).__name__ == kind.value
        assert kind.empty().is_empty()
    exported = [getattr(arrays, name) for name in arrays.__all__]
    classes = [c for c in exported if isinstance(c, type) and issubclass(c, BaseCache)]
    assert len(classes) == 10
    assert {str(KvCacheKind.parse(c.__name__)) for c in classes} == {str(k) for k in KvCacheKind}
