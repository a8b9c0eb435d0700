"""The causal caches by example: sizes, order of calls, refusals, put and get, removing, sharing."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from ollama_support import (
    INF,
    add_shift,
    assert_same,
    assert_twins,
    fill,
    forward,
    made,
    one,
    seen,
    state,
    twin,
)

from pykvcache.arrays import CacheConfig, CausalCache, ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.errors import (
    CacheDTypeError,
    CacheOrderError,
    CacheValueError,
    NotSupported,
    SharedCellsError,
)


def causal(capacity: int = 16, max_batch: int = 8, **config: Any) -> CausalCache:
    cache = CausalCache()
    cache.set_config(CacheConfig(**config))
    cache.init(np.float32, 1, capacity, max_batch)
    return cache


# Constructors, configuration and sizes -----------------------------------------------------


def test_configuration_defaults_to_the_plain_layout() -> None:
    assert CacheConfig() == CacheConfig(0, 0, None, False)
    assert CacheConfig(0, 0).cache_padding == CacheConfig(0, 0).mask_batch_padding == 1
    assert CacheConfig().mask_dtype == np.float32
    assert made(CausalCache()).config == CacheConfig()


def test_keys_and_values_are_converted_to_the_dtype_of_init() -> None:
    cache = CausalCache()
    assert cache.dtype is None
    given: Any
    for given, stored in (("f16", "f2"), (np.float32, "f4"), ("float64", "f8")):
        cache.init(given, 1, 4, 4)
        cache.start_forward([0], [0])
        for key, value in ((one(1 / 3, np.float64), one(1, np.int64)), ([[[1 / 3]]], [[[1]]])):
            cache.put(one(0), one(0))
            cache.put(key, value)
            found, ones, _ = cache.get()
            assert cache.dtype == found.dtype == ones.dtype == np.dtype(stored)
            assert (found.item(), ones.item()) == (np.dtype(stored).type(1 / 3), 1)
        cache.put(one(1e300, np.float64), one(0))
        assert cache.get()[0].item() == (1e300 if stored == "f8" else np.inf)


def test_a_memory_below_the_window_is_refused() -> None:
    cache = SWAMemCache(5, 3)
    with pytest.raises(
        CacheValueError, match=r"memory \(3\) must be at least as large as the window \(5\)"
    ):
        made(cache)
    with pytest.raises(CacheOrderError, match="call init first"):
        cache.start_forward([0], [0])
    made(cache, 1, 3)  # nothing slides
    # Room for the stop token of parallel sequences.
    assert len(forward(made(cache, 2, 16, 4), [1], [0], [0], reserve=True)[0]) == 2 * 6 + 4
    with pytest.raises(CacheValueError, match=r"the window \(unlimited\)"):
        made(SWAMemCache(0, 3), 2)


def test_close_frees_the_arrays_and_init_starts_anew() -> None:
    cache = CausalCache()
    cache.close()
    forward(made(cache), [1, 2], [0, 0], [0, 1])
    base = weakref.ref(cache.get()[0].base)
    assert base() is not None
    cache.close()
    assert base() is None
    assert cache.dtype is None
    assert forward(made(cache), [5], [0], [2]) == ([5], [[0]])
    cache.set_layer(3)
    made(cache).start_forward([0], [0])
    with pytest.raises(CacheOrderError, match="nothing was put in this layer"):
        cache.get()
    with pytest.raises(CacheValueError, match="layer: 0, batch size: 1, layer batch size: 2"):
        cache.put(full(2, 1, 1), full(2, 1, 1))


# A forward pass ----------------------------------------------------------------------------


def test_positions_reach_2_31_and_ids_any_number() -> None:
    cache = made(CausalCache(), capacity=32)
    ids = [0, 2**63 - 1, 5, 100]  # more than max_sequences
    for i, seq in enumerate(np.array(ids)):
        forward(cache, [i], [seq], np.array([2**31 - 3], np.uint32))
    for i, seq in enumerate(ids):
        assert seen(cache, seq, 2**31 - 2) == sorted([i, 0.5])
    with pytest.raises(CacheValueError, match=f"in .0, {2**63 - 1}"):
        cache.remove(2**63, 0)


def test_a_reserve_pass_may_be_wider_than_the_cache_and_stores_nothing() -> None:
    wide = causal(capacity=2, max_batch=4)
    forward(wide, [7, 7, 7, 7], [0] * 4, range(4), reserve=True)
    assert wide.get()[0].ravel().tolist() == [0, 0]
    assert forward(wide, [1, 2], [0, 0], [0, 1])[0] == [1, 2]


def test_set_causal_rebuilds_the_mask_only_if_rows_change() -> None:
    cache = causal(mask_batch_padding=4)
    forward(cache, [1, 2], [0, 0], [0, 1])
    plain = cache.get()[2]
    cache.set_causal(())
    assert cache.get()[2] is plain
    cache.set_causal(row for row in (0, 1, 1))
    ahead = cache.get()[2]
    assert ahead[:2].tolist() == [[0, 0], [0, 0]]
    cache.set_causal(np.array([1, 0]))
    assert cache.get()[2] is ahead
    assert plain[:2].tolist() == [[0, -INF], [0, 0]]
    forward(cache, [3, 4], [0, 0], [2, 3])
    assert cache.get()[2][0].tolist() == [0, 0, 0, -INF]  # for one pass only


# Put and get -------------------------------------------------------------------------------


def test_put_checks_the_number_of_tokens_of_every_pass() -> None:
    """The fast path of put must not outlive its pass."""
    cache = causal()
    three, single = np.ones((3, 1, 1), np.float32), one(1)
    cache.start_forward(range(3), [0] * 3)
    cache.put(three, three)
    cache.start_forward([3], [0])
    with pytest.raises(CacheValueError, match="inconsistent batch sizes"):
        cache.put(three, three)
    cache.put(single, single)
    cache.start_forward([4], [0], reserve=True)
    cache.put(single * 9, single * 9)
    assert 9 not in cache.get()[0]


# Sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (CausalCache(), NotSupported, "without a shift_fn"),
        (CausalCache(add_shift), SharedCellsError, "shared by multiple sequences"),
        (SWAMemCache(3, 5, add_shift), NotSupported, "back to 2, but the tokens below 3 were drop"),
    ],
)
def test_a_refused_removal_changes_nothing(cache: Any, error: type, message: str) -> None:
    fill(made(cache, sequences=2, max_batch=4), 10, step=2)
    if error is SharedCellsError:
        cache.copy_prefix(0, 1, 10)
    other = twin(cache)
    with pytest.raises(error, match=message):
        cache.remove(0, 4, 9)
    assert_twins(cache, other)
    cache.remove(0, 0)
    assert seen(cache, 0, 0) == [0.5]


def test_removed_sequences_leave_nothing_behind() -> None:
    cache = made(SWAMemCache(2, 4), capacity=32)
    sizes = set()
    for seq in range(100, 164):
        fill(cache, 8, sequence=seq)
        cache.copy_prefix(seq, seq + 1000, 7)
        cache.remove(seq, 0)
        assert not cache.can_resume(seq, 0)
        cache.remove(seq + 1000, 0, 8)
        sizes.add(len(pickle.dumps(cache)))
    assert max(sizes) - min(sizes) < 64


# Functions of the caller -------------------------------------------------------------------


def test_a_raising_shift_fn_changes_nothing() -> None:
    calls = []

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        calls.append(layer)
        key += shift[:, None, None]
        if len(calls) == 4:
            raise ZeroDivisionError
        return key

    cache = made(CausalCache(shift_fn), sequences=2, max_batch=4)
    for first in range(0, 12, 4):
        cache.start_forward(range(first, first + 4), [0, 1, 0, 1])
        for layer in (0, 1):
            cache.set_layer(layer)
            numbers = np.arange(first, first + 4, dtype=np.float32).reshape(4, 1, 1)
            cache.put(numbers, numbers)
    other = twin(cache)
    with pytest.raises(ZeroDivisionError):
        cache.remove(0, 2, 4)
    assert_twins(cache, other)


def test_shift_fn_must_return_keys() -> None:
    wrong: Any
    for wrong, error in (
        (lambda layer, key, shift: key[:1], CacheValueError),
        (lambda layer, key, shift: key[..., None], CacheValueError),
        (lambda layer, key, shift: None, CacheDTypeError),
    ):
        cache = made(CausalCache(wrong), sequences=2, max_batch=4)
        fill(cache, 6, step=3)
        other = twin(cache)
        with pytest.raises(error, match="shift_fn"):
            cache.remove(0, 1, 2)
        assert_twins(cache, other)


# Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: SWACache(-1), CacheValueError),
        (lambda: SWAMemCache(2, -1), CacheValueError),
        (lambda: ChunkedAttentionCache(-4), CacheValueError),
        (lambda: SWACache(2.0), TypeError),
        (lambda: CausalCache(3), TypeError),
        (lambda: CacheConfig(cache_padding=-1), CacheValueError),
        (lambda: CacheConfig(cache_padding=2**31), CacheValueError),
        (lambda: CacheConfig(mask_batch_padding=1.0), TypeError),
        (lambda: CacheConfig(mask_dtype=np.int32), CacheDTypeError),
        (lambda: CacheConfig(mask_dtype="nonsense"), CacheDTypeError),
        (lambda: CacheConfig(permuted_v=1), TypeError),
    ],
)
def test_constructors_refuse_bad_arguments(build: Any, error: type) -> None:
    with pytest.raises(error):
        build()


def full(*shape: int) -> Any:
    return np.full(shape, 5, np.float32)


PUT: list[tuple[Any, Any, type, str]] = [
    (*(full(3, 2, 4),) * 2, CacheValueError, "inconsistent batch sizes .layer: 0"),
    (full(4, 2, 4), full(1, 2, 4), CacheValueError, "inconsistent batch sizes"),
    (full(4, 2, 5), full(4, 2, 4), CacheValueError, "key has shape .* layer 0 holds"),
    (full(4, 2, 4), full(4, 2, 5), CacheValueError, "value has shape .* layer 0 holds"),
    (full(4, 2, 4), full(4, 1, 4), CacheValueError, "key has 2 heads, but value 1"),
    *[(full(*s), full(*s), CacheValueError, "is needed") for s in ((4, 8), (1, 4, 2, 4), ())],
    *[
        (*pair, CacheDTypeError, "has dtype")
        for bad in (np.ones((4, 2, 4), complex), np.ones((4, 2, 4), bool), "ab", None)
        for pair in ((bad, full(4, 2, 4)), (full(4, 2, 4), bad))
    ],
]


def test_refused_keys_and_values_change_nothing() -> None:
    cache = made(CausalCache(), max_batch=4)
    cache.start_forward(range(4), [0] * 4)
    cache.put(np.ones((4, 2, 4), np.float32), np.ones((4, 2, 4), np.float32))
    before = state(cache)
    for key, value, error, message in PUT:
        with pytest.raises(error, match=message):
            cache.put(key, value)
        assert_same(before, state(cache))
    with pytest.raises(CacheValueError, match="at most 2147483647"):
        cache.init(np.float32, 2**16, 2**15, 1)
    assert_same(before, state(cache))
