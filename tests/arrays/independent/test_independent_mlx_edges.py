"""What the issue settles about the mlx-style caches, sentence by sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_kit import feed, keys_of, tokens_in, values_of
from safetensors import safe_open

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
    LRUPromptCache,
    MambaCache,
    PromptCacheConfig,
    PromptTrie,
    QuantizedKVCache,
    RotatingKVCache,
    TokenBuffer,
    can_trim_prompt_cache,
    create_attention_mask,
    create_causal_mask,
    from_state,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from pykvcache.errors import KvCacheError, NotSupported

SINGLE: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "ChunkedKVCache": lambda: ChunkedKVCache(4),
    "RotatingKVCache": lambda: RotatingKVCache(6, keep=2),
    "QuantizedKVCache": lambda: QuantizedKVCache(32, 8),
}
NAMES_17 = [
    "KVCache",
    "ConcatenateKVCache",
    "KVCacheSimple",
    "StandardKvCache",
    "RotatingKVCache",
    "RotatingKvCache",
    "ChunkedKVCache",
    "ChunkedKvCache",
    "QuantizedKVCache",
    "StandardQuantizedKvCache",
    "CacheList",
    "BatchKVCache",
    "BatchKvCache",
    "BatchRotatingKVCache",
    "BatchRotatingKvCache",
    "ArraysCache",
    "MambaCache",
]


def wide(tokens: int, seed: int = 0, batch: int = 1, dim: int = 64) -> Any:
    return np.random.default_rng(seed).standard_normal((batch, 2, tokens, dim)).astype(np.float32)


def filled(name: str, tokens: int = 3) -> Any:
    cache = SINGLE[name]()
    if tokens:
        cache.update(wide(tokens), wide(tokens, 1))
    return cache


def rebuilt(kind: str, state: Any, meta: Any) -> Any:
    return from_state(kind, state, meta)


def leaves(state: Any) -> list[Any]:
    """Arrays of a state, however it nests."""
    if isinstance(state, np.ndarray):
        return [state]
    if isinstance(state, (tuple, list)):
        return [leaf for part in state for leaf in leaves(part)]
    return []


def same_state(first: Any, second: Any) -> None:
    one, two = leaves(first.state), leaves(second.state)
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.meta_state == second.meta_state
    assert np.array_equal(first.rope_offset, second.rope_offset)


# Every cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
def test_an_empty_cache(name: str) -> None:
    cache = SINGLE[name]()
    assert cache.is_empty() is True
    assert cache.offset == 0
    assert cache.rope_offset == 0
    assert cache.nbytes == 0
    assert tuple(cache.state) == ()
    assert cache.trim(3) == 0
    cache.copy().update(wide(1), wide(1))
    assert cache.is_empty() is True


@pytest.mark.parametrize("name", SINGLE)
def test_a_filled_cache(name: str) -> None:
    cache = filled(name)
    assert cache.is_empty() is False
    assert cache.offset == cache.rope_offset == 3
    assert cache.nbytes > 0
    assert cache.max_size == (6 if name == "RotatingKVCache" else None)
    assert all(isinstance(part, str) for part in leaves_of_meta(cache.meta_state))


def leaves_of_meta(meta: Any) -> list[Any]:
    if isinstance(meta, (tuple, list)):
        return [leaf for part in meta for leaf in leaves_of_meta(part)]
    return [] if meta == "" else [meta]


@pytest.mark.parametrize("name", SINGLE)
def test_caches_share_no_memory(name: str) -> None:
    keys, values = wide(3), wide(3, 1)
    cache = SINGLE[name]()
    cache.update(keys, values)
    copy = cache.copy()
    before = [leaf.copy() for leaf in leaves(cache.state)]
    keys[:] = values[:] = 9
    copy.update(wide(2, 5), wide(2, 6))
    copy.trim(4)
    for old, new in zip(before, leaves(cache.state), strict=True):
        np.testing.assert_array_equal(old, new)
    # A state is copied when it is set.
    state = [leaf.copy() for leaf in before]
    nested = state if name != "QuantizedKVCache" else (tuple(state[:3]), tuple(state[3:]))
    other = rebuilt("KVCache" if name == "ConcatenateKVCache" else name, nested, cache.meta_state)
    for leaf in state:
        leaf.view(np.uint8)[:] = 0
    for old, new in zip(before, leaves(other.state), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (wide(2)[0], wide(2)[0]),
        (wide(2), wide(3)),
        (wide(2, batch=2), wide(2)),
        (wide(2, batch=2), wide(2, batch=2)),
        (wide(2)[:, :1], wide(2)[:, :1]),
        (wide(2, dim=32), wide(2, dim=32)),
        (wide(0), wide(0)),
        (wide(2).astype(object), wide(2)),
        (wide(2), wide(2).astype("U8")),
    ],
)
def test_updates_that_do_not_fit_are_refused(name: str, keys: Any, values: Any) -> None:
    cache = filled(name)
    before = cache.copy()
    with pytest.raises(KvCacheError):
        cache.update(keys, values)
    same_state(before, cache)
    cache.update(wide(1), wide(1))
    assert cache.offset == 4


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("n", [-1, True, 1.0, "1", None])
def test_wrong_trims_are_refused(name: str, n: Any) -> None:
    cache = filled(name)
    before = cache.copy()
    with pytest.raises((KvCacheError, TypeError)):
        cache.trim(n)
    same_state(before, cache)


def test_a_trim_of_what_cannot_be_trimmed_returns_zero() -> None:
    ring = filled("RotatingKVCache", 8)
    mamba = MambaCache()
    mixed = CacheList(filled("KVCache"), ring)
    for cache in (ring, mamba, mixed):
        before = cache.copy()
        assert cache.is_trimmable() is False
        assert cache.trim(2) == 0
        same_state(before, cache)
        with pytest.raises(KvCacheError):
            cache.trim(-1)


def test_buffers_grow_by_256_and_count_as_allocated() -> None:
    cache = KVCache()
    cache.update(wide(1), wide(1))
    token = 2 * 2 * 64 * 4
    assert cache.nbytes == 256 * token
    cache.update(wide(255), wide(255))
    assert cache.nbytes == 256 * token
    cache.update(wide(1), wide(1))
    assert cache.nbytes % (256 * token) == 0
    assert cache.nbytes > 256 * token
    keys, _ = cache.state
    assert keys.shape == (1, 2, 257, 64)


def test_concatenation_after_a_trim_continues_after_the_trimmed_tokens() -> None:
    cache = ConcatenateKVCache()
    feed(cache, [[1, 2, 3]])
    assert cache.trim(2) == 2
    assert feed(cache, [[4]]) == [[[1, 4]]]


def test_head_sizes_of_keys_and_values_may_differ() -> None:
    for name in ("KVCache", "ChunkedKVCache", "RotatingKVCache", "QuantizedKVCache"):
        cache = SINGLE[name]()
        keys, values = cache.update(wide(2, dim=64), wide(2, dim=32))
        assert keys.shape == (1, 2, 2, 64)
        assert values.shape == (1, 2, 2, 32)


# Serialised state ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("tokens", [0, 3, 9])
def test_states_round_trip(name: str, tokens: int) -> None:
    cache = filled(name, tokens)
    if name == "ChunkedKVCache":
        cache.maybe_trim_front()
    again = rebuilt(name, cache.state, cache.meta_state)
    same_state(cache, again)
    for one in (cache, again):
        one.update(wide(2, 7), wide(2, 8))
    same_state(cache, again)
    assert again.offset == tokens + 2


def test_setting_state_and_meta() -> None:
    source, target = filled("RotatingKVCache", 8), RotatingKVCache(6, keep=2)
    target.state = source.state
    target.meta_state = source.meta_state
    same_state(source, target)
    assert (target.keep, target.max_size, target.offset) == (2, 6, 8)
    cache = filled("KVCache", 3)
    cache.state = ()
    assert cache.is_empty() is True
    assert cache.offset == 0


@pytest.mark.parametrize("name", SINGLE)
def test_from_serialized_rolls_back(name: str) -> None:
    cache = filled(name)
    before = cache.copy()
    good, meta = cache.state, cache.meta_state
    for bad_state, bad_meta in (
        ((wide(2),), meta),
        ((wide(2), wide(3)), meta),
        ((1, 2), meta),
        ("ab", meta),
        (good, ("x", "y", "z", "w", "v")),
        (good, ("-5",) * len(leaves_of_meta(meta)) if meta else ("3",)),
    ):
        with pytest.raises(KvCacheError):
            cache.from_serialized(bad_state, bad_meta)
        same_state(before, cache)
    other = filled(name, 5)
    cache.from_serialized(other.state, other.meta_state)
    same_state(other, cache)


def test_a_cache_without_meta_takes_none() -> None:
    cache = filled("KVCache")
    assert tuple(cache.meta_state) == ()
    cache.meta_state = ()
    with pytest.raises(KvCacheError):
        cache.meta_state = ("1",)


@pytest.mark.parametrize(
    ("kind", "state", "meta"),
    [
        ("RotatingKVCache", (), ("0", "6", "3", "0")),
        ("RotatingKVCache", (), ("0", "6", "0", "3")),
        ("QuantizedKVCache", (), ("3", "64", "8")),
        ("QuantizedKVCache", None, ("99", "32", "8")),
        ("BatchRotatingKVCache", None, ("0", "8", "3", "False")),
    ],
)
def test_states_that_contradict_themselves(kind: str, state: Any, meta: Any) -> None:
    if kind == "QuantizedKVCache" and state is None:
        state = filled(kind).state
    if kind == "BatchRotatingKVCache":
        ring = BatchRotatingKVCache(4, [0, 1])
        feed(ring, [[1, 2, 3], [-1, 4, 5]])
        good = list(ring.meta_state)
        assert good[0] == "4"
        for place, value in ((0, "0"), (1, "2"), (2, "9")):
            with pytest.raises(KvCacheError):
                rebuilt(kind, ring.state, [*good[:place], value, *good[place + 1 :]])
        with pytest.raises(KvCacheError):  # rotated means a buffer of max_size tokens
            rebuilt(kind, ring.state, [*good[:3], "True"])
        assert rebuilt(kind, ring.state, good).rotated is False
        return
    with pytest.raises(KvCacheError):
        rebuilt(kind, state, meta)


def test_rotated_survives_as_what_it_was() -> None:
    ring = BatchRotatingKVCache(3, [0])
    feed(ring, [[1, 2]])
    assert rebuilt("BatchRotatingKVCache", ring.state, ring.meta_state).rotated is False
    for token in (3, 4, 5):
        feed(ring, [[token]])
    again = rebuilt("BatchRotatingKVCache", ring.state, ring.meta_state)
    assert again.rotated is True
    assert sorted(feed(again, [[6]])[0][0]) == [4, 5, 6]


def test_all_names_parse() -> None:
    kinds = [KvCacheKind.parse(name) for name in NAMES_17]
    assert len(set(kinds)) == 9
    assert {kind.value for kind in kinds} == {
        "KVCache",
        "RotatingKVCache",
        "ChunkedKVCache",
        "QuantizedKVCache",
        "CacheList",
        "BatchKVCache",
        "BatchRotatingKVCache",
        "ArraysCache",
        "MambaCache",
    }
    assert {kinds[0], kinds[1], kinds[2], kinds[3]} == {KvCacheKind.parse("KVCache")}
    for name in ("kvcache", "", "KVCache ", "NoSuchCache"):
        with pytest.raises(KvCacheError) as caught:
            KvCacheKind.parse(name)
        assert isinstance(caught.value, ValueError)
        for known in NAMES_17:
            assert known in str(caught.value)
        with pytest.raises(KvCacheError):
            rebuilt(name, (), ())


# Masks --------------------------------------------------------------------------------------


def test_causal_masks() -> None:
    np.testing.assert_array_equal(create_causal_mask(3), np.tri(3, dtype=bool))
    np.testing.assert_array_equal(create_causal_mask(2, offset=3), np.tri(2, 5, 3, dtype=bool))
    for n, offset, window in [(4, 0, 2), (3, 5, 4), (1, 3, 1), (5, 2, 100)]:
        places, rows = np.arange(offset + n), offset + np.arange(n)[:, None]
        expected = (places <= rows) & (places > rows - window)
        np.testing.assert_array_equal(create_causal_mask(n, offset, window), expected)
    left = create_causal_mask(3, 1, left_padding=[0, 2])
    assert left.shape == (2, 1, 3, 4)
    np.testing.assert_array_equal(left[0, 0], np.tri(3, 4, 1, dtype=bool))
    np.testing.assert_array_equal(left[1, 0], np.tri(3, 4, 1, dtype=bool) & (np.arange(4) >= 2))
    right = create_causal_mask(3, 1, right_padding=[0, 2])
    np.testing.assert_array_equal(right[1, 0], np.tri(3, 4, 1, dtype=bool) & (np.arange(4) < 2))


def test_attention_masks() -> None:
    hidden = np.zeros((1, 4, 8))
    assert create_attention_mask(hidden) == "causal"
    assert create_attention_mask(hidden[:, :1]) is None
    full = create_attention_mask(hidden, return_array=True)
    np.testing.assert_array_equal(full, np.tri(4, dtype=bool))
    window = create_attention_mask(hidden, window_size=2)
    np.testing.assert_array_equal(window, create_causal_mask(4, window_size=2))
    cache = filled("KVCache")
    np.testing.assert_array_equal(
        create_attention_mask(hidden, cache, return_array=True), np.tri(4, 7, 3, dtype=bool)
    )


@pytest.mark.parametrize("n", [0, -1, True, 1.5])
def test_masks_need_tokens(n: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        create_causal_mask(n)
    with pytest.raises((KvCacheError, TypeError)):
        KVCache().make_mask(n)


# Rings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(-1,), (True,), (2.0,), (4, -1)])
def test_rings_that_cannot_work_are_refused(arguments: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        RotatingKVCache(*arguments)


def test_a_ring_without_room_for_its_kept_tokens_still_takes_new_ones() -> None:
    # A window below ROTATING_DEFAULT_KEEP makes such rings.
    [cache] = make_prompt_cache(PromptCacheConfig(1, sliding_window=3))
    for token in range(1, 9):
        seen = feed(cache, [[token]])[0][0]
        assert token in seen
        assert len(seen) == min(token, 3)
    [nothing] = make_prompt_cache(PromptCacheConfig(1, sliding_window=-2))
    assert nothing.max_size == 0
    with pytest.raises(KvCacheError):
        feed(nothing, [[1]])


def test_a_ring_cannot_be_quantised() -> None:
    for cache in (RotatingKVCache(4), BatchRotatingKVCache(4, [0])):
        with pytest.raises(NotSupported):
            cache.to_quantized(group_size=32, bits=8)


def test_a_ring_meta_reads_as_mlx_lm_writes_it() -> None:
    cache = filled("RotatingKVCache", 8)
    keep, size, offset, _ = cache.meta_state
    assert (keep, size, offset) == ("2", "6", "8")


def test_the_ring_keeps_its_first_tokens_and_the_latest() -> None:
    cache = RotatingKVCache(5, keep=2)
    for token in range(1, 21):
        seen = feed(cache, [[token]])[0][0]
    assert sorted(seen) == [1, 2, 18, 19, 20]
    rows = feed(cache, [[21, 22, 23]])[0]
    for row in rows:
        assert {1, 2} <= set(row)


# Batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 8])
def test_left_padding_after_tokens_is_refused(limit: int | None) -> None:
    cache: Any = BatchKVCache([0, 1]) if limit is None else BatchRotatingKVCache(limit, [0, 1])
    assert cache.left_padding.tolist() == [0, 1]
    cache.prepare(left_padding=[1, 0])
    assert cache.left_padding.tolist() == [1, 1]
    feed(cache, [[-1, 1], [-1, 2]])
    before = cache.copy()
    with pytest.raises(KvCacheError) as caught:
        cache.prepare(left_padding=[1, 0])
    assert isinstance(caught.value, ValueError)
    same_state(before, cache)


def test_decoding_needs_finalize_in_rings() -> None:
    cache = BatchRotatingKVCache(4, [0, 0])
    cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    feed(cache, [[1, 2, 3], [4, -1, -1]])
    with pytest.raises(KvCacheError) as caught:
        cache.update(keys_of([[5], [6]]), values_of([[5], [6]]))
    assert isinstance(caught.value, RuntimeError)
    cache.finalize()
    assert [sorted(row[0]) for row in feed(cache, [[5], [6]])] == [[1, 2, 3, 5], [4, 6]]


def test_right_padding_evicts_no_token() -> None:
    cache = BatchRotatingKVCache(3, [0, 0])
    cache.prepare(lengths=[6, 2], right_padding=[0, 4])
    feed(cache, [[1, 2, 3, 4, 5, 6], [7, 8, -1, -1, -1, -1]])
    cache.finalize()
    assert [sorted(row[0]) for row in feed(cache, [[9], [10]])] == [[5, 6, 9], [7, 8, 10]]


def test_rings_of_different_sizes_do_not_merge() -> None:
    rings = [RotatingKVCache(4), RotatingKVCache(5)]
    for ring in rings:
        feed(ring, [[1, 2]])
    with pytest.raises(KvCacheError) as caught:
        RotatingKVCache.merge(rings)
    assert isinstance(caught.value, ValueError)


def test_merging_caches_of_different_lengths() -> None:
    caches = [KVCache(), KVCache(), KVCache()]
    feed(caches[0], [[1, 2, 3]])
    feed(caches[1], [[4]])
    merged = KVCache.merge(caches)
    assert merged.left_padding.tolist() == [0, 2, 3]
    assert merged.rope_offset.tolist() == [3, 1, 0]
    rows = feed(merged, [[5], [6], [7]])
    assert [row[0] for row in rows] == [[1, 2, 3, 5], [4, 6], [7]]
    assert feed(caches[0], [[8]]) == [[[1, 2, 3, 8]]]  # the members are untouched


def test_empty_batches_keep_their_padding() -> None:
    for cache in (BatchKVCache([0, 2]), BatchRotatingKVCache(4, [0, 2])):
        again = rebuilt(type(cache).__name__, cache.state, cache.meta_state)
        assert again.left_padding.tolist() == [0, 2]
        assert cache.copy().left_padding.tolist() == [0, 2]
        assert cache.rope_offset.tolist() == [0, -2]


@pytest.mark.parametrize("indices", [[5], [-1], [True], [0.0]])
def test_rows_that_do_not_exist_are_refused(indices: Any) -> None:
    for cache in (BatchKVCache([0, 1]), BatchRotatingKVCache(4, [0, 1])):
        feed(cache, [[1, 2], [-1, 3]])
        before = cache.copy()
        with pytest.raises((KvCacheError, TypeError)):
            cache.filter(indices)
        with pytest.raises((KvCacheError, TypeError)):
            cache.extract(indices[0])
        same_state(before, cache)


# Chunks, arrays, lists -----------------------------------------------------------------------


def test_a_front_trimmed_cache_survives_as_a_state() -> None:
    cache = ChunkedKVCache(3)
    feed(cache, [[1, 2, 3, 4, 5]])
    cache.maybe_trim_front()
    assert (cache.start_position, cache.offset, cache.chunk_size) == (2, 5, 3)
    again = rebuilt("ChunkedKVCache", cache.state, cache.meta_state)
    assert (again.start_position, again.offset, again.chunk_size) == (2, 5, 3)
    assert feed(again, [[6]]) == [[[3, 4, 5, 6]]]
    assert again.trim(9) == 4
    assert again.offset == 2


def test_slots_of_an_arrays_cache() -> None:
    cache = ArraysCache(3)
    assert len(cache) == 3
    assert cache[0] is None
    first = np.arange(6.0).reshape(2, 3)
    cache[0] = first
    cache[2] = first + 1
    np.testing.assert_array_equal(cache[0], first)
    first[:] = 0
    np.testing.assert_array_equal(cache[2], np.arange(6.0).reshape(2, 3) + 1)
    assert cache.is_empty() is False
    cache.filter([1])
    np.testing.assert_array_equal(cache[2], [[4, 5, 6]])
    assert cache[1] is None
    assert len(MambaCache()) == 2
    for index in (3, True, "0"):
        with pytest.raises((KvCacheError, TypeError, IndexError)):
            cache[index]  # type: ignore[index]


def test_batch_rows_of_arrays_caches() -> None:
    one, two = ArraysCache(2), ArraysCache(2)
    one[0], two[0] = np.ones((1, 2)), np.full((2, 2), 2.0)
    two[1] = np.full((2, 3), 3.0)
    one.extend(two)
    np.testing.assert_array_equal(one[0], [[1, 1], [2, 2], [2, 2]])
    np.testing.assert_array_equal(one[1], [[0, 0, 0], [3, 3, 3], [3, 3, 3]])
    row = one.extract(2)
    np.testing.assert_array_equal(row[1], [[3, 3, 3]])
    merged = ArraysCache.merge([row, row])
    np.testing.assert_array_equal(merged[0], [[2, 2], [2, 2]])


def test_masks_of_arrays_caches() -> None:
    assert ArraysCache(1).make_mask(3) is None
    cache = ArraysCache(1, left_padding=[0, 2])
    np.testing.assert_array_equal(cache.make_mask(3), [[True] * 3, [False, False, True]])
    cache.advance(1)
    np.testing.assert_array_equal(cache.make_mask(2), [[True] * 2, [False, True]])
    other = ArraysCache(1)
    other.prepare(lengths=[3, 1])
    np.testing.assert_array_equal(other.make_mask(3), [[True] * 3, [True, False, False]])
    other.advance(2)
    np.testing.assert_array_equal(other.make_mask(1), [[True], [False]])
    other.finalize()
    assert other.make_mask(2) is None


def test_states_of_arrays_caches() -> None:
    cache = MambaCache()
    cache[1] = np.ones((1, 4))
    again = rebuilt("MambaCache", cache.state, cache.meta_state)
    assert isinstance(again, MambaCache)
    assert again[0] is None
    np.testing.assert_array_equal(again[1], np.ones((1, 4)))


def test_lists_of_caches() -> None:
    inner: Any = CacheList(KVCache(), RotatingKVCache(4))
    cache: Any = CacheList(inner, KVCache())
    assert cache.is_empty() is True
    assert cache.is_trimmable() is True
    for member in (inner[0], inner[1], cache[1]):
        feed(member, [[1, 2, 3]])
    assert cache.nbytes == inner[0].nbytes + inner[1].nbytes + cache[1].nbytes
    assert cache.trim(1) == 1
    names, metas = cache.meta_state
    assert list(names) == ["CacheList", "KVCache"]
    assert len(metas) == 2
    again = rebuilt("CacheList", cache.state, cache.meta_state)
    assert isinstance(again[0], CacheList)
    assert isinstance(again[0][1], RotatingKVCache)
    assert feed(again[0][1], [[4]]) == [[[1, 2, 4]]]
    assert feed(again[0][0], [[5]]) == [[[1, 2, 5]]]
    copy = cache.copy()
    feed(copy[1], [[9]])
    assert cache[1].offset == 2


# Quantisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_quantisation_errs_by_half_a_step(bits: int, group_size: int) -> None:
    cache: Any = QuantizedKVCache(group_size, bits)
    stored: list[list[Any]] = [[], []]
    for count, seed in ((5, 1), (1, 2), (300, 3)):
        new = wide(count, seed, dim=128) * 3 + 1, wide(count, seed + 9, dim=256)
        for kept, array in zip(stored, new, strict=True):
            kept.append(array)
        out = cache.update(*new)
    for kept, array in zip(stored, out, strict=True):
        exact = np.concatenate(kept, axis=2)
        groups = exact.reshape(*exact.shape[:3], -1, group_size).astype(np.float64)
        step = (groups.max(-1) - groups.min(-1)) / (2**bits - 1)
        error = np.abs(groups - array.reshape(groups.shape)).max(-1)
        assert (error <= step / 2 * (1 + 1e-4) + 1e-6).all()
    (codes, scales, biases), values = cache.quantized_state
    assert codes.dtype == np.uint32
    assert codes.shape == (1, 2, 306, 128 * bits // 32)
    assert scales.shape == biases.shape == (1, 2, 306, 128 // group_size)
    assert values[0].shape[-1] == 256 * bits // 32


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_codes_are_a_little_endian_bit_stream(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 64)
    codes[0], codes[32] = 0, 0
    codes[1], codes[33] = 2**bits - 1, 2**bits - 1  # so that the codes come out as they are
    cache = QuantizedKVCache(32, bits)
    array = codes.astype(np.float32).reshape(1, 1, 1, 64)
    (packed, scales, biases), _ = cache.update_quantized(array, array)
    stream = np.unpackbits(packed.ravel().astype("<u4").view(np.uint8), bitorder="little")
    got = stream.reshape(64, bits) @ (1 << np.arange(bits))
    # A scale may be negative: the code then counts down from the maximum.
    value = got.reshape(2, 32) * scales.reshape(2, 1) + biases.reshape(2, 1)
    np.testing.assert_allclose(value.ravel(), codes, atol=0.01)
    assert set(np.unique(np.abs(scales))) == {1.0}


@pytest.mark.parametrize(
    ("group_size", "bits"), [(64, 5), (64, 0), (64, 16), (0, 8), (-1, 8), (64, True), (64.0, 8)]
)
def test_wrong_quantisations_are_refused(group_size: Any, bits: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        QuantizedKVCache(group_size, bits)
    with pytest.raises((KvCacheError, TypeError)):
        filled("KVCache").to_quantized(group_size, bits)


def test_head_sizes_that_groups_do_not_divide_are_refused() -> None:
    cache = QuantizedKVCache(64, 8)
    with pytest.raises(KvCacheError):
        cache.update(wide(1, dim=96), wide(1, dim=96))
    assert cache.is_empty() is True
    assert cache.quantized_state is None


def test_quantising_a_cache() -> None:
    cache = filled("KVCache", 5)
    quantised = cache.to_quantized(group_size=32, bits=8)
    assert isinstance(quantised, QuantizedKVCache)
    assert (quantised.group_size, quantised.bits, quantised.offset) == (32, 8, 5)
    assert tuple(quantised.meta_state) == ("5", "32", "8")
    keys, _ = quantised.update(wide(1, 9), wide(1, 9))
    assert keys.shape[2] == 6
    np.testing.assert_allclose(keys[:, :, :5], cache.state[0], atol=0.05)
    assert KVCache().to_quantized(32, 4).is_empty() is True


# Files --------------------------------------------------------------------------------------


def test_files_of_every_kind(tmp_path: Path) -> None:
    batch, ring = BatchKVCache([0, 1]), BatchRotatingKVCache(3, [1, 0])
    for cache in (batch, ring):
        feed(cache, [[1, 2], [3, 4]])
    mamba = MambaCache()
    mamba[0] = np.ones((1, 2), np.float32)
    caches = [
        *(filled(name) for name in SINGLE),
        *(SINGLE[name]() for name in SINGLE),
        batch,
        ring,
        mamba,
        CacheList(filled("KVCache"), CacheList(filled("RotatingKVCache", 9), MambaCache())),
    ]
    file = tmp_path / "all.safetensors"
    save_prompt_cache(str(file), caches, {"model": "tiny", "ünïcode": "ja"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "tiny", "ünïcode": "ja"}
    assert len(load_prompt_cache(file)) == len(caches)
    for before, after in zip(caches, loaded, strict=True):
        same_state(before, after)
        if not isinstance(before, ConcatenateKVCache):
            assert type(before) is type(after)
        else:
            assert type(after) is KVCache


def test_files_are_laid_out_as_mlx_lm_flattens_them(tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    caches = [filled("KVCache"), filled("RotatingKVCache", 8)]
    save_prompt_cache(file, caches, {"model": "tiny"})
    with safe_open(file, "np") as opened:
        names, metadata = set(opened.keys()), opened.metadata()
        np.testing.assert_array_equal(opened.get_tensor("0.1"), caches[0].state[1])
    assert names == {"0.0", "0.1", "1.0", "1.1"}
    keep, size, offset, index = caches[1].meta_state
    assert metadata == {
        "0.0": "",
        "0.1.0": keep,
        "0.1.1": size,
        "0.1.2": offset,
        "0.1.3": index,
        "1.model": "tiny",
        "2.0": "KVCache",
        "2.1": "RotatingKVCache",
    }


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        load_prompt_cache(tmp_path / "nowhere.safetensors")
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(file, [filled("KVCache"), filled("RotatingKVCache", 9)])
    data = file.read_bytes()
    for damaged in (b"", b"not a cache", data[:40], data[: len(data) // 2], b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(KvCacheError):
            load_prompt_cache(file)
    size = int.from_bytes(data[:8], "little")
    for old, new in ((b"RotatingKVCache", b"RotatingKVCachX"), (b'"2"', b'"z"')):
        if old in data[: 8 + size]:
            file.write_bytes(data.replace(old, new))
            with pytest.raises(KvCacheError):
                load_prompt_cache(file)


# Prompt caches ------------------------------------------------------------------------------


def test_prompt_caches_from_a_config() -> None:
    plain = make_prompt_cache(PromptCacheConfig(3))
    assert [type(cache) for cache in plain] == [KVCache] * 3
    rings: Any = make_prompt_cache(PromptCacheConfig(num_hidden_layers=2, sliding_window=16))
    assert [(type(c), c.max_size, c.keep) for c in rings] == [(RotatingKVCache, 16, 4)] * 2
    assert ROTATING_DEFAULT_KEEP == 4
    assert plain[0] is not plain[1]
    assert make_prompt_cache(PromptCacheConfig(0)) == []


def test_trimming_prompt_caches_is_all_or_nothing() -> None:
    caches = [filled("KVCache", 5), filled("KVCache", 5)]
    assert can_trim_prompt_cache(caches) is True
    assert trim_prompt_cache(caches, 2) == 2
    assert [cache.offset for cache in caches] == [3, 3]
    mixed = [filled("KVCache", 5), filled("RotatingKVCache", 9)]
    assert can_trim_prompt_cache(mixed) is False
    assert trim_prompt_cache(mixed, 2) == 0
    assert mixed[0].offset == 5
    with pytest.raises(KvCacheError):
        trim_prompt_cache(caches, -1)
    assert trim_prompt_cache([], 3) == 0


def test_a_token_buffer() -> None:
    buffer = TokenBuffer([1, 2])
    assert buffer.update([3]).tolist() == [1, 2, 3]
    for token in range(4, 600):
        buffer.update([token])
    assert len(buffer) == 599
    assert buffer.tokens.tolist() == list(range(1, 600))
    assert TokenBuffer().update([]).tolist() == []


def test_the_trie() -> None:
    trie: PromptTrie[str] = PromptTrie()
    trie.add("m", [1, 2, 3], "a")
    trie.add("m", [1], "b")
    trie.add("other", [1, 2], "c")
    assert trie.get("m", [1, 2, 3]) == "a"
    found = trie.search("m", [1, 2, 3, 4])
    assert found.exact is None
    assert found.shorter == [1, 2, 3]
    found = trie.search("m", [1, 2])
    assert found.shorter == [1]
    assert found.longer == [1, 2, 3]
    assert found.common_prefix == 2
    assert trie.search("m", [1]).exact == [1]
    assert trie.search("m", [9]).shorter is None
    assert [value for _, value in trie.pop_prefixes("m", [1, 2, 3])] == ["b"]
    assert trie.pop("m", [1, 2, 3]) == "a"
    assert trie.search("m", [1, 2, 3]).exact is None
    assert trie.get("other", [1, 2]) == "c"


def entry(*tokens: int) -> list[Any]:
    cache = KVCache()
    feed(cache, [list(tokens)])
    return [cache]


def contents(caches: list[Any] | None) -> Any:
    assert caches is not None
    return tokens_in(*caches[0].state)[0].tolist()


def test_the_nearest_cache_is_found_and_trimmed() -> None:
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2, 3, 4, 5], entry(1, 2, 3, 4, 5))
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 4, 5])
    assert contents(caches) == [1, 2, 3, 4, 5]
    assert rest == []
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 9, 9])
    assert contents(caches) == [1, 2, 3]
    assert rest == [9, 9]
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3])
    assert contents(caches) == [1, 2]  # one token is left to evaluate
    assert rest == [3]
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 4, 5, 6])
    assert contents(caches) == [1, 2, 3, 4, 5]
    assert rest == [6]
    assert lru.fetch_nearest_cache("m", [7]) == (None, [7])
    assert lru.fetch_nearest_cache("other", [1, 2]) == (None, [1, 2])


def test_a_one_token_prefix_matches() -> None:
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], entry(1))
    caches, rest = lru.fetch_nearest_cache("m", [1, 2])
    assert contents(caches) == [1]
    assert rest == [2]


def test_every_hit_refreshes() -> None:
    lru = LRUPromptCache(max_size=2)
    lru.insert_cache("m", [1, 1], entry(1, 1))
    lru.insert_cache("m", [2, 2], entry(2, 2))
    lru.fetch_nearest_cache("m", [1, 1, 5])  # a hit on the older one, as a prefix
    lru.insert_cache("m", [3, 3], entry(3, 3))
    assert lru.fetch_nearest_cache("m", [2, 2])[0] is None
    assert contents(lru.fetch_nearest_cache("m", [1, 1])[0]) == [1, 1]
    lru.fetch_nearest_cache("m", [3, 9])  # and as a longer one
    lru.insert_cache("m", [4, 4], entry(4, 4))
    assert lru.fetch_nearest_cache("m", [1, 1])[0] is None
    assert len(lru) == 2


def test_entries_are_isolated() -> None:
    lru = LRUPromptCache()
    given = entry(1, 2)
    lru.insert_cache("m", [1, 2], given)
    caches, _ = lru.fetch_nearest_cache("m", [1, 2])
    assert caches is not None
    feed(caches[0], [[9]])
    caches[0].trim(2)
    caches.clear()
    assert contents(lru.fetch_nearest_cache("m", [1, 2])[0]) == [1, 2]


def test_bytes_are_limited() -> None:
    size = entry(1, 2)[0].nbytes
    lru = LRUPromptCache(max_size=10, max_bytes=2 * size)
    for token in (1, 2, 3):
        lru.insert_cache("m", [token, token], entry(token, token))
    assert len(lru) == 2
    assert lru.nbytes <= 2 * size
    assert lru.fetch_nearest_cache("m", [1, 1])[0] is None
    lru.trim_to(n_sequences=1)
    assert len(lru) == 1
    assert contents(lru.fetch_nearest_cache("m", [3, 3])[0]) == [3, 3]
    lru.trim_to(n_bytes=0)
    assert len(lru) == 0


def test_inserting_removes_what_it_can_replace() -> None:
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2], entry(1, 2))
    lru.insert_cache("m", [1, 2, 3], entry(1, 2, 3))
    assert len(lru) == 1
    caches, rest = lru.fetch_nearest_cache("m", [1, 2])
    assert contents(caches) == [1]
    assert rest == [2]


@pytest.mark.parametrize("arguments", [(-1,), (1.5,), (True,), (2, -1)])
def test_wrong_limits_are_refused(arguments: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        LRUPromptCache(*arguments)


def test_cache_types_are_known() -> None:
    lru = LRUPromptCache()
    for kind in ("assistant", "user", "system"):
        lru.insert_cache("m", [hash(kind) % 1000, 1], entry(1, 1), cache_type=kind)
    assert set(lru.stats_by_type()) >= {"assistant", "user", "system"}
    with pytest.raises(KvCacheError):
        lru.insert_cache("m", [5, 5], entry(5, 5), cache_type="nobody")
