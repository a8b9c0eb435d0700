"""Every kind of cache alike: states, copies, refusals, read-only views."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
from mlx_support import EMPTY, HEADS, K_DIM, V_DIM, fill, filled, kv, pickled, snapshot

import pykvcache.arrays as arrays
from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    KvCacheKind,
    PromptCacheConfig,
    QuantizedKVCache,
    RotatingKVCache,
    create_causal_mask,
    from_state,
    make_prompt_cache,
)
from pykvcache.arrays.mlx.base import BaseCache
from pykvcache.errors import CacheDTypeError, CacheValueError, KvCacheError, NotSupported

every_kind = pytest.mark.parametrize("kind", EMPTY)
#: Those that take keys and values of one row.
PLAIN = [n for n in EMPTY if n not in ("ArraysCache", "MambaCache", "CacheList")]
ONE, THREE = kv([9]), kv([7, 8, 9])


def leaves(state: Any) -> list[Any]:
    """Return the arrays of a state, however it nests."""
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in leaves(part)]
    return [] if state is None else [state]


@every_kind
def test_an_empty_and_a_filled_cache_answer_the_whole_interface(kind: str) -> None:
    cache = EMPTY[kind]()
    assert (cache.is_empty(), cache.offset, cache.size(), cache.nbytes) == (True, 0, 0, 0)
    assert cache.max_size == (4 if "Rotating" in kind else None)
    assert cache.state == (((), ()) if kind == "CacheList" else ())
    assert repr(cache) == f"{kind}(offset=0, nbytes=0)"
    fill(cache)
    assert not cache.is_empty()
    assert cache.nbytes > 0
    assert len(cache.state) == (4 if kind.startswith("Batch") else 2)
    if kind.startswith("Batch"):  # one rotary offset per row
        assert cache.rope_offset.tolist() == [4]
        cache.rope_offset[:] = 99
        cache.left_padding[:] = 99
        assert cache.rope_offset.tolist() == [4]
    else:
        assert cache.rope_offset == cache.offset


@every_kind
@pytest.mark.parametrize("full", [False, True])
def test_states_and_copies_are_whole_and_share_nothing(kind: str, full: bool) -> None:
    cache = fill(EMPTY[kind]()) if full else EMPTY[kind]()
    again: Any = from_state(kind, cache.state, cache.meta_state)
    assert type(again) is (KVCache if kind == "ConcatenateKVCache" else type(cache))
    by_kind = from_state(KvCacheKind.parse(kind), cache.state, cache.meta_state)
    before = snapshot(cache)
    for how in (cache.copy(), copy.copy(cache), copy.deepcopy(cache), pickled(cache)):
        assert type(how) is type(cache)
        for other in (how, again, by_kind):
            assert snapshot(other) == before
            for array in leaves(cache.state):
                assert not any(np.shares_memory(array, leaf) for leaf in leaves(other.state))
        fill(how)
        assert snapshot(cache) == before


@every_kind
@pytest.mark.parametrize("full", [False, True])
def test_from_serialized_takes_both_states_or_changes_nothing(kind: str, full: bool) -> None:
    good, cache = fill(EMPTY[kind]()), EMPTY[kind]()
    if full:
        fill(cache).trim(1)
    before = snapshot(cache)
    for meta in (("1",) * 7, ("x", "y", "z"), (("A",), ("B",))):
        with pytest.raises(KvCacheError):
            cache.from_serialized(good.state, meta)
        assert snapshot(cache) == before
    for state in ((1,), (np.ones(2), np.ones(2), 3, 4, 5), (np.ones((1, 2)), "x"), ("a", "b", "c")):
        with pytest.raises(KvCacheError):
            cache.from_serialized(state, good.meta_state)
        assert snapshot(cache) == before
        with pytest.raises(KvCacheError):
            cache.state = state
        assert snapshot(cache) == before
    cache.from_serialized(good.state, good.meta_state)
    cache.meta_state = good.meta_state
    assert snapshot(cache) == snapshot(good)


@every_kind
def test_trim_takes_a_count(kind: str) -> None:
    cache = fill(EMPTY[kind]())
    before = snapshot(cache)
    with pytest.raises(CacheValueError):
        cache.trim(-1)
    for wrong in (True, 1.0, "1", None, np.float32(2)):
        with pytest.raises(TypeError):
            cache.trim(wrong)
    assert snapshot(cache) == before
    assert cache.trim(np.int8(1)) == int(cache.is_trimmable())
    assert cache.is_trimmable() or snapshot(cache) == before


@every_kind
def test_only_plain_caches_can_be_quantized(kind: str) -> None:
    cache = fill(EMPTY[kind]())
    if kind in ("KVCache", "ConcatenateKVCache"):
        assert cache.to_quantized(group_size=4, bits=8).offset == 5
    else:
        with pytest.raises(NotSupported):
            cache.to_quantized(group_size=4, bits=8)


# Kinds ---------------------------------------------------------------------------------------

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


def test_kinds_have_17_names() -> None:
    assert set(NAMES) == set(KvCacheKind)
    assert sum(len(names) for names in NAMES.values()) == 17
    for kind, names in NAMES.items():
        assert str(kind) == kind.value == names[0] == type(kind.empty()).__name__
        assert kind.empty().is_empty()
        assert all(KvCacheKind.parse(name) is kind for name in names)
    exported = [getattr(arrays, name) for name in arrays.__all__]
    classes = [c for c in exported if isinstance(c, type) and issubclass(c, BaseCache)]
    assert {str(KvCacheKind.parse(c.__name__)) for c in classes} == {str(k) for k in KvCacheKind}


@pytest.mark.parametrize("name", ["", "kvcache", "KV", "ArraysKVCache", None, []])
def test_an_unknown_kind_is_refused_with_all_names(name: Any) -> None:
    for call in (KvCacheKind.parse, lambda kind: from_state(kind, (), ())):
        with pytest.raises(CacheValueError, match="unknown cache kind") as caught:
            call(name)
        assert repr(name) in str(caught.value)
        assert all(known in str(caught.value) for names in NAMES.values() for known in names)


# States that do not fit ------------------------------------------------------------------------

THREE_COLUMNS = [*kv([1, 2, 3]), np.array([5]), np.array([0])]
TWO_ROWS = [*kv([0, 1], [2, 3]), np.array([1, 2]), np.array([1, 0])]
WORDS = np.zeros((1, 2, 3, 8), np.uint32)
STEPS = np.ones((1, 2, 3, 2), np.float32)
TRIPLE = WORDS, STEPS, STEPS
ROW = np.ones((1, 3), np.float32)


def changed(state: list[Any], index: int, part: Any) -> list[Any]:
    return [*state[:index], np.array(part), *state[index + 1 :]]


#: Kind, error, state, and meta states with it that do not fit; a text is split.
REFUSED: list[tuple[str, type[Exception], Any, tuple[Any, ...]]] = [
    (
        "ChunkedKVCache",
        CacheValueError,
        kv([1]),
        ("", "4", "0 0", "4 -1", ("4", None), "4 1" + "0" * 19, "4 ²", f"4 {2**60 + 1}"),
    ),
    ("RotatingKVCache", CacheValueError, (), ("0 4 1 0", "0 4 0 1")),
    (
        "RotatingKVCache",
        CacheValueError,
        kv([1, 2, 3]),
        ("0 0 3 3", "0 4 3 4", "0 4 2 3", "0 4 9 2", "2 3 9 1", "0 8 5 3", "0 8 -3 3", "0 8 3"),
    ),
    ("QuantizedKVCache", CacheValueError, (), ("1 64 8",)),
    (
        "QuantizedKVCache",
        CacheValueError,
        (TRIPLE, TRIPLE),
        ("2 32 4", "4 32 4", "3 64 4", "3 32 8", "3 32 5", "3 0 4", "3 32", "3 32 x", ""),
    ),
    *[
        ("QuantizedKVCache", CacheValueError, (triple, TRIPLE), ("3 32 4",))
        for triple in (TRIPLE[:2], (WORDS[..., :4], STEPS, STEPS))
    ],
    *[
        ("QuantizedKVCache", CacheDTypeError, (triple, TRIPLE), ("3 32 4",))
        for triple in ((WORDS.view(np.int32), STEPS, STEPS), (WORDS, STEPS, STEPS.astype(float)))
    ],
    ("QuantizedKVCache", CacheValueError, [(WORDS, STEPS, STEPS[..., :1])] * 2, ("3 32 4",)),
    ("BatchKVCache", CacheValueError, TWO_ROWS[:3], ("",)),
    ("BatchKVCache", CacheValueError, TWO_ROWS, ("1",)),
    *[
        ("BatchKVCache", error, changed(TWO_ROWS, index, part), ("",))
        for index, part, error in (
            *[(2, offset, CacheValueError) for offset in ([5, 5], [1, 2, 3], [[1, 2]])],
            *[(3, padding, CacheValueError) for padding in ([1], [-1, 0])],
            (3, [0.5, 0], CacheDTypeError),
            (1, kv([1])[1], CacheValueError),
        )
    ],
    ("BatchRotatingKVCache", CacheValueError, (), ("3 1 0 False", "3 0 1 False", "3 0 0 True")),
    (
        "BatchRotatingKVCache",
        CacheValueError,
        THREE_COLUMNS,
        (
            *("0 3 3 False", "3 5 4 False", "4 5 2 True", "3 2 3 False", "3 5 1 no", "3 5 3"),
            *("3 5 3 False 0", "", "8 5 3 False", "3 5 0 False"),
        ),
    ),
    *[
        ("BatchRotatingKVCache", CacheValueError, changed(THREE_COLUMNS, 2, [n]), ("8 3 3 False",))
        for n in (1000, 4, -1, 2**63 - 2, 2**64 - 5)
    ],
    ("CacheList", CacheValueError, (), ((), (("KVCache",), ()))),
    ("CacheList", CacheValueError, ((), ()), ((("KVCache",), ((),)),)),
    ("CacheList", CacheValueError, ((),), ((("Nothing",), ((),)), (("KVCache",), (("1",),)))),
    (
        "ArraysCache",
        CacheValueError,
        (ROW, None),
        (
            *(("1", "", ""), ("x", "", ""), ("2", "a", ""), ("2", ""), ("99999999", "", "")),
            *((2, "", ""), ("2", "1,2,3", ""), ("2", "", "1,2"), ("2", "1", "1,2")),
        ),
    ),
    ("ArraysCache", CacheValueError, (), (("-1", "", ""), ("65537", "", ""))),
    ("ArraysCache", CacheValueError, (None,) * 2**17, ((),)),
    ("MambaCache", CacheValueError, (ROW, ROW, ROW), ((),)),
]


@pytest.mark.parametrize(("kind", "error", "state", "metas"), REFUSED)
def test_states_that_do_not_fit_are_refused(
    kind: str, error: type[Exception], state: Any, metas: tuple[Any, ...]
) -> None:
    for meta in metas:
        with pytest.raises(error) as caught:
            from_state(kind, state, tuple(meta.split()) if isinstance(meta, str) else meta)
        assert len(str(caught.value)) < 400


def test_the_states_that_they_are_made_of_fit() -> None:
    assert from_state("QuantizedKVCache", (TRIPLE, TRIPLE), ("3", "32", "4")).offset == 3
    assert from_state("BatchKVCache", TWO_ROWS, ()).offset == 2
    ring = from_state("BatchRotatingKVCache", THREE_COLUMNS, ("3", "5", "1", "True"))
    assert np.asarray(ring.rope_offset).tolist() == [5]
    assert from_state("RotatingKVCache", (), ("0", "4", "0", "0")).max_size == 4


# Arrays in and out -----------------------------------------------------------------------------

K1, V1 = kv([5])


WRONG: list[tuple[Any, Any, Any]] = [
    (K1[0], V1, CacheValueError),
    (K1, V1[:, :, :0], CacheValueError),
    (K1[:, :, :0], V1[:, :, :0], CacheValueError),
    (K1[:, :1], V1[:, :1], CacheValueError),
    (K1[..., :4], V1, CacheValueError),
    (K1, kv([5])[0], CacheValueError),
    (np.concatenate([K1, K1]), np.concatenate([V1, V1]), CacheValueError),
    (K1.astype(np.float64), V1, (CacheDTypeError, CacheValueError)),
    (K1, V1.astype(np.float16), (CacheDTypeError, CacheValueError)),
    (K1.tolist(), V1, CacheDTypeError),
    (K1, None, CacheDTypeError),
    (K1.astype(object), V1, CacheDTypeError),
    (K1.view("V4"), V1, CacheDTypeError),
]


@pytest.mark.parametrize("kind", PLAIN)
def test_arrays_that_do_not_continue_the_stored_ones_change_nothing(kind: str) -> None:
    cache = fill(EMPTY[kind]())
    before = snapshot(cache)
    for keys, values, error in WRONG:
        with pytest.raises(error):
            cache.update(keys, values)
        assert snapshot(cache) == before


@pytest.mark.parametrize("kind", PLAIN)
def test_an_empty_cache_takes_numbers_only(kind: str) -> None:
    cache = EMPTY[kind]()
    for dtype in ("V4", [("a", "f4")], "O", "S4", "U4", "M8[s]"):
        strange: Any = np.zeros((1, 1, 1, 4), dtype)
        with pytest.raises(CacheDTypeError):
            cache.update(strange, strange)
    assert cache.is_empty()


@pytest.mark.parametrize("kind", [k for k in PLAIN if k != "QuantizedKVCache"])
def test_an_emptied_cache_takes_another_layout(kind: str) -> None:
    cache = filled(EMPTY[kind](), [[1, 2]])
    cache.trim(2)
    wide = np.ones((1, 1, 2, 5))
    keys, values = cache.update(wide, wide)
    assert keys.shape == values.shape == (1, 1, 2, 5)
    assert keys.dtype == np.float64


def test_keys_and_values_of_the_cache_may_come_back_swapped() -> None:
    x = np.arange(1.0, 4).reshape(1, 1, 3, 1)
    cache = KVCache()
    keys, values = cache.update(x, -x)
    assert cache.trim(1) == 1
    keys, values = cache.update(values[:, :, -1:], keys[:, :, -1:])
    assert (keys.ravel().tolist(), values.ravel().tolist()) == ([1, 2, -3], [-1, -2, 3])
    for full in (RotatingKVCache(1), BatchRotatingKVCache(1, [0])):
        keys, values = full.update(x[:, :, :1], -x[:, :, :1])
        keys, values = full.update(values, keys)
        assert (keys.item(), values.item()) == (-1, 1)


@pytest.mark.parametrize("kind", PLAIN)
def test_views_are_read_only_and_given_arrays_are_copied(kind: str) -> None:
    cache = EMPTY[kind]()
    for new in (ONE, ONE, THREE, ONE):
        given = [array.copy() for array in new]
        found = (cache.update_quantized if kind.startswith("Q") else cache.update)(*given)
        before = snapshot(cache)
        for array in given:
            array[:] = 77
        assert snapshot(cache) == before
        for view in (*leaves(tuple(found)), *leaves(cache.state[:2])):
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 5


@pytest.mark.parametrize("make", [BatchKVCache, lambda padding: BatchRotatingKVCache(4, padding)])
def test_batches_need_one_row_and_one_number_for_each(make: Any) -> None:
    cache = make([0, 1])
    cache.prepare(left_padding=[2, 0])
    assert cache.left_padding.tolist() == [2, 1]
    for rows in ([[1]], [[1], [2], [3]]):
        with pytest.raises(CacheValueError):
            cache.update(*kv(*rows))
    filled(cache, [[0, 0, 1], [0, 2, 3]])
    before = snapshot(cache)
    for name in ("left_padding", "lengths", "right_padding"):
        with pytest.raises(CacheValueError):
            cache.prepare(**{name: [1]})
    with pytest.raises(CacheValueError, match=f"only be added to an empty {type(cache).__name__}"):
        cache.prepare(left_padding=[1, 1])
    cache.advance(1)
    assert snapshot(cache) == before


# Memory ----------------------------------------------------------------------------------------

TOKEN = HEADS * (K_DIM + V_DIM) * 4


@pytest.mark.parametrize("kind", ["KVCache", "RotatingKVCache", "BatchKVCache", "ChunkedKVCache"])
def test_buffers_grow_in_steps_of_256_and_by_half(kind: str) -> None:
    cache = RotatingKVCache(9000, 4) if kind == "RotatingKVCache" else EMPTY[kind]()
    one = np.ones((1, 1, 1, 4), np.float32)
    copied, capacity, first = 0, 0, None
    for n in range(5000):
        keys, _ = cache.update(one, one)
        if cache.nbytes != capacity:
            assert cache.nbytes % (256 * 2 * 16) == 0
            copied, capacity = copied + n, cache.nbytes
            first = keys
        assert np.shares_memory(first, keys)
    assert copied < 3 * 5000
    cache.trim(4990)
    assert cache.copy().nbytes == 256 * 2 * 16


@pytest.mark.parametrize(
    "make",
    [RotatingKVCache, lambda n: RotatingKVCache(n, 1), lambda n: BatchRotatingKVCache(n, [0])],
)
@pytest.mark.parametrize("size", [1, 4, 300])
def test_a_ring_allocates_no_more_than_its_size(make: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    cache = make(size)
    for n in rng.choice([1, 1, 2, 3, 40], size=60).tolist():
        filled(cache, [range(n)])
        assert cache.size() == min(cache.offset, size)
        columns = max(size, cache.state[0].shape[2])
        again: Any = from_state(type(cache).__name__, cache.state, cache.meta_state)
        for other in (cache, cache.copy(), again):
            assert other.nbytes <= columns * TOKEN
        if rng.random() < 0.2:
            cache.trim(2)
    first = filled(make(4), [[1, 2, 3]])
    assert first.nbytes == 3 * TOKEN
    assert filled(first, [[4]]).nbytes == 4 * TOKEN


# Numbers that cannot be ------------------------------------------------------------------------

LARGEST = 2**60


@pytest.mark.parametrize(
    "padding",
    [
        [2**62],
        [LARGEST + 1],
        np.array([2**64 - 1], np.uint64),
        [True, 0],
        [0.5],
        [[0]],
        [[1], [2, 3]],
        "x" * 10**5,
    ],
)
def test_padding_that_cannot_be_is_refused(padding: Any) -> None:
    for call in (
        lambda: BatchKVCache(padding),
        lambda: BatchRotatingKVCache(4, padding),
        lambda: ArraysCache(1, padding),
        lambda: ArraysCache(1).prepare(lengths=padding),
        lambda: BatchKVCache([0]).filter(padding),
        lambda: create_causal_mask(2, left_padding=padding),
        lambda: BatchKVCache([LARGEST]).prepare(left_padding=[1]),
        lambda: ArraysCache(1, [LARGEST]).prepare(left_padding=[1]),
    ):
        with pytest.raises(KvCacheError) as found:
            call()
        assert len(str(found.value)) < 300


def test_sizes_that_no_file_can_hold_are_refused() -> None:
    for call in (
        lambda: RotatingKVCache(10**20),
        lambda: RotatingKVCache(-1),
        lambda: RotatingKVCache(4, 10**20),
        lambda: BatchRotatingKVCache(10**20, [0]),
        lambda: ChunkedKVCache(2**63),
        lambda: ChunkedKVCache(0),
        lambda: QuantizedKVCache(2**61),
        lambda: make_prompt_cache(PromptCacheConfig(10**9)),
    ):
        with pytest.raises(CacheValueError):
            call()
    for cache in (RotatingKVCache(sys.maxsize), ChunkedKVCache(sys.maxsize)):
        filled(cache, [[1]])
        again = from_state(type(cache).__name__, cache.state, cache.meta_state)
        assert snapshot(again) == snapshot(cache)
