"""What the issue settles about every mlx-style cache, its state and its masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_kit import (
    SINGLE,
    feed,
    filled,
    leaves,
    leaves_of_meta,
    rebuilt,
    same_state,
    wide,
)

from pykvcache.arrays import (
    BatchRotatingKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    KvCacheKind,
    MambaCache,
    RotatingKVCache,
    create_attention_mask,
    create_causal_mask,
)
from pykvcache.errors import KvCacheError

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
