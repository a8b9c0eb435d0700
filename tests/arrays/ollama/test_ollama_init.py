"""Constructors, configuration, sizes and order of calls of the causal caches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from ollama_support import INF, add_shift, assert_same, fill, forward, seen, state

from pykvcache.arrays import (
    Cache,
    CacheConfig,
    CausalCache,
    ChunkedAttentionCache,
    SWACache,
    SWAMemCache,
)
from pykvcache.errors import (
    CacheDTypeError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ClosedError,
    KvCacheFull,
    PositionError,
)


def cells(cache: Any) -> int:
    """Return the number of cells: how many sequences of one token there is room for."""
    count = 0
    try:
        while True:
            cache.start_forward([0], [1000 + count])
            count += 1
    except KvCacheFull as error:
        reported = error.capacity
    assert reported is not None
    return reported


# A.1 NewCausalCache, NewSWACache, NewSWAMemCache, NewChunkedAttentionCache; A.4 the same four.
@pytest.mark.parametrize(
    ("cache", "visible"),
    [
        (CausalCache(), [0, 1, 2, 3, 4, 5, 0.5]),
        (SWACache(2), [4, 5, 0.5]),
        (SWAMemCache(2, 4), [4, 5, 0.5]),
        (ChunkedAttentionCache(4), [4, 5, 0.5]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_constructors_decide_what_a_token_sees(cache: Any, visible: list[float]) -> None:
    cache.init(np.float32, 1, 16, 8)
    fill(cache, 6)
    assert seen(cache, 0, 6) == sorted(visible)


# A.4 the Cache interface: all four follow it, and a plain one-sequence use of every method.
def test_cache_protocol_is_followed_by_every_causal_cache() -> None:
    for cache in (CausalCache(), SWACache(3), SWAMemCache(3, 5), ChunkedAttentionCache(4)):
        assert isinstance(cache, Cache)
        cache.set_config(CacheConfig())
        cache.init("f16", 1, 8, 4)
        assert forward(cache, [1, 2], [0, 0], [0, 1])[0] == [1, 2]
        cache.set_causal([0])
        cache.copy_prefix(0, 1, 1)
        assert cache.can_resume(0, 2)
        cache.remove(0, 1)
        cache.close()


# A.1 shiftFn: nil is allowed, else it gets (layer, key, shift); A.1 DType is a public field.
def test_shift_fn_is_optional_and_must_be_callable() -> None:
    assert CausalCache(None).dtype is None
    with pytest.raises(TypeError, match="shift_fn must be callable, not int"):
        CausalCache(3)  # type: ignore[arg-type]


# A.1 DType is a public field.
@pytest.mark.parametrize(
    ("given", "stored"),
    [(np.float16, "f2"), ("f16", "f2"), ("f32", "f4"), ("float64", "f8"), (np.dtype("f4"), "f4")],
)
def test_dtype_says_how_k_and_v_are_stored(given: Any, stored: str) -> None:
    cache = CausalCache()
    cache.init(given, 1, 4, 4)
    assert cache.dtype == np.dtype(stored)
    cache.start_forward([0], [0])
    cache.put(np.full((1, 1, 1), 1 / 3), np.ones((1, 1, 1), np.int64))
    key, value, _ = cache.get()
    assert key.dtype == value.dtype == np.dtype(stored)
    assert key[0, 0, 0] == np.dtype(stored).type(1 / 3)


# A.1 Init: a config comes from SetConfig, else it is empty; 0 becomes 1, no mask dtype float32.
def test_config_defaults_are_the_plain_layout() -> None:
    assert CacheConfig() == CacheConfig(0, 0, None, False)
    assert CacheConfig(0, 0).cache_padding == CacheConfig(0, 0).mask_batch_padding == 1
    assert CacheConfig().mask_dtype == np.float32
    cache = CausalCache()
    assert cache.config is None
    cache.init(np.float32, 1, 4, 4)
    assert cache.config == CacheConfig()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"cache_padding": -1}, CacheValueError),
        ({"mask_batch_padding": -2}, CacheValueError),
        ({"cache_padding": True}, TypeError),
        ({"mask_batch_padding": 1.0}, TypeError),
        ({"mask_dtype": np.int32}, CacheDTypeError),
        ({"mask_dtype": "nonsense"}, CacheDTypeError),
        ({"permuted_v": 1}, TypeError),
    ],
)
def test_config_refuses_unknown_layouts(arguments: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        CacheConfig(**arguments)


# A.1 SetConfig after a config exists is refused.
def test_set_config_works_once_and_before_init() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(cache_padding=4))
    for again in (CacheConfig(), CacheConfig(cache_padding=4)):
        with pytest.raises(CacheOrderError, match="config cannot be changed"):
            cache.set_config(again)
    cache.init(np.float32, 1, 5, 4)
    assert cells(cache) == 8
    with pytest.raises(CacheOrderError, match="config cannot be changed"):
        cache.set_config(CacheConfig())
    with pytest.raises(TypeError, match="must be a CacheConfig"):
        CausalCache().set_config({})  # type: ignore[arg-type]


# A.1 Init: window 0 is unlimited, memory 0 is the window.
def test_window_zero_is_unlimited_and_memory_zero_is_the_window() -> None:
    cache = SWACache(0)
    cache.init(np.float32, 1, 16, 4)
    fill(cache, 10)
    assert len(seen(cache, 0, 10)) == 11
    assert cells(cache) == 16
    same = SWAMemCache(3, 0)
    same.init(np.float32, 1, 16, 4)
    assert cells(same) == 3 + 4


# A.1 Init: several sequences get at least window + 1 (the stop token), one does not.
def test_memory_has_room_for_the_stop_token_of_parallel_sequences() -> None:
    for window, memory, sequences, expected in ((3, 0, 1, 3), (3, 0, 2, 4), (3, 9, 2, 9)):
        cache = SWAMemCache(window, memory)
        cache.init(np.float32, sequences, 16, 4)
        assert cells(cache) == sequences * expected + 4


# A.1 Init: memory >= capacity means that nothing ever slides.
def test_memory_of_the_capacity_never_slides() -> None:
    cache = SWACache(8)
    cache.init(np.float32, 1, 8, 2)
    fill(cache, 7)
    assert cache.can_resume(0, 1)
    assert cache.can_resume(5, 3)
    assert cells(cache) == 8
    slides = SWACache(7)
    slides.init(np.float32, 1, 8, 2)
    assert cells(slides) == 7 + 2


# A.1 Init: memory < window is refused, unless nothing slides or parallel sequences raise it.
def test_memory_below_the_window_is_refused() -> None:
    cache = SWAMemCache(5, 3)
    with pytest.raises(
        CacheValueError, match=r"memory \(3\) must be at least as large as the window \(5\)"
    ):
        cache.init(np.float32, 1, 16, 4)
    with pytest.raises(CacheOrderError, match="call init first"):
        cache.start_forward([0], [0])
    cache.init(np.float32, 1, 3, 4)
    cache.init(np.float32, 2, 16, 4)
    assert cells(cache) == 2 * 6 + 4
    with pytest.raises(CacheValueError, match=r"the window \(unlimited\)"):
        SWAMemCache(0, 3).init(np.float32, 2, 16, 4)


# A.1 Init: maxSeq * capacity cells, or maxSeq * memory + maxBatch, rounded up to the padding.
@pytest.mark.parametrize(
    ("cache", "padding", "expected"),
    [
        (CausalCache(), 1, 3 * 10),
        (CausalCache(), 16, 32),
        (ChunkedAttentionCache(2), 7, 35),
        (SWACache(4), 1, 3 * 5 + 8),
        (SWAMemCache(4, 6), 4, 28),
        (SWAMemCache(4, 10), 0, 30),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_number_of_cells(cache: Any, padding: int, expected: int) -> None:
    cache.set_config(CacheConfig(cache_padding=padding))
    cache.init(np.float32, 3, 10, 8)
    assert cells(cache) == expected


# A.1 Close frees what the layers hold.
def test_close_frees_the_arrays_and_init_starts_anew() -> None:
    import weakref

    cache = CausalCache()
    cache.close()
    cache.init(np.float32, 1, 8, 4)
    forward(cache, [1, 2], [0, 0], [0, 1])
    base = weakref.ref(cache.get()[0].base)
    assert base() is not None
    cache.close()
    assert base() is None
    cache.close()
    assert cache.dtype is None
    for call in (
        lambda: cache.get(),
        lambda: cache.put(np.ones((1, 1, 1)), np.ones((1, 1, 1))),
        lambda: cache.start_forward([0], [0]),
        lambda: cache.set_layer(0),
        lambda: cache.set_causal(),
        lambda: cache.remove(0, 0),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.can_resume(0, 0),
    ):
        with pytest.raises(ClosedError, match="CausalCache was closed"):
            call()
    cache.init(np.float32, 1, 8, 4)
    assert forward(cache, [5], [0], [2]) == ([5], [[0]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.int32, 1, 8, 4), CacheDTypeError, "int32"),
        (("q8_0", 1, 8, 4), CacheDTypeError, "q8_0"),
        ((None, 1, 8, 4), CacheDTypeError, "None"),
        ((np.float32, 0, 8, 4), CacheValueError, r"max_sequences is 0: it must be in \[1,"),
        ((np.float32, 1, 0, 4), CacheValueError, "capacity is 0"),
        ((np.float32, 1, 8, -1), CacheValueError, "max_batch is -1"),
        ((np.float32, True, 8, 4), TypeError, "not bool"),
        ((np.float32, 1, 8.0, 4), TypeError, "not float"),
    ],
)
def test_init_refuses_bad_sizes_and_keeps_what_there_was(
    arguments: tuple[Any, ...], error: type, message: str
) -> None:
    cache = CausalCache()
    cache.init(np.float32, 1, 8, 4)
    forward(cache, [1, 2], [0, 0], [0, 1])
    before = state(cache)
    with pytest.raises(error, match=message):
        cache.init(*arguments)
    assert_same(before, state(cache))


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: SWACache(-1), CacheValueError),
        (lambda: SWAMemCache(2, -1), CacheValueError),
        (lambda: ChunkedAttentionCache(-4), CacheValueError),
        (lambda: SWACache(2.0), TypeError),
        (lambda: ChunkedAttentionCache(True), TypeError),
    ],
)
def test_constructors_refuse_bad_sizes(build: Any, error: type) -> None:
    with pytest.raises(error):
        build()


def test_order_of_calls_is_checked() -> None:
    cache = CausalCache()
    for call in (cache.get, lambda: cache.set_layer(0), lambda: cache.start_forward([0], [0])):
        with pytest.raises(CacheOrderError, match="CausalCache was not set up; call init first"):
            call()
    cache.init(np.float32, 1, 8, 4)
    one = np.ones((1, 1, 1))
    for call in (cache.get, lambda: cache.put(one, one), cache.set_causal):
        with pytest.raises(CacheOrderError, match="call start_forward first"):
            call()
    cache.start_forward([0], [0])
    with pytest.raises(CacheOrderError, match="nothing was put in this layer"):
        cache.get()
    for layer, error in ((-1, CacheLayerError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error):
            cache.set_layer(layer)


# Decided: negative ids and positions are refused, ids may exceed max_sequences.
@pytest.mark.parametrize(
    ("positions", "sequences", "error", "message"),
    [
        ([], [], CacheValueError, "a batch of 0 tokens; 1 to 4 are possible"),
        (range(5), [0] * 5, CacheValueError, "a batch of 5 tokens; 1 to 4 are possible"),
        ([2, 3], [0], CacheValueError, "2 positions, but 1 sequences"),
        ([2, -3], [0, 0], PositionError, "position -3 is outside"),
        ([2**31 - 1], [0], PositionError, "position 2147483647 is outside"),
        ([2**64], [0], CacheValueError, "outside int64"),
        ([2], [-1], CacheValueError, "sequence id -1 is negative"),
        ([True], [0], TypeError, r"positions\[0\] must be an integer, not bool"),
        ([2], [0.0], TypeError, r"sequences\[0\] must be an integer, not float"),
        (np.array([2.0]), [0], TypeError, "must hold integers, not float64"),
        (np.array([[2]]), [0], CacheValueError, "one dimension is needed"),
    ],
)
def test_start_forward_refuses_bad_batches(
    positions: Any, sequences: Any, error: type, message: str
) -> None:
    cache = CausalCache()
    cache.init(np.float32, 1, 8, 4)
    forward(cache, [1, 2], [0, 0], [0, 1])
    before, other = state(cache), copy.deepcopy(cache)
    with pytest.raises(error, match=message):
        cache.start_forward(positions, sequences)
    assert_same(before, state(cache))
    assert forward(cache, [3], [0], [2]) == forward(other, [3], [0], [2])


def test_sequence_ids_are_any_number_and_may_exceed_max_sequences() -> None:
    cache = CausalCache()
    cache.init(np.float32, 1, 32, 4)
    ids = [0, 2**63 - 1, 5, *range(100, 117)]
    for i, seq in enumerate(np.array(ids)):
        forward(cache, [i], [seq], np.array([0], np.uint8))
    for i, seq in enumerate(ids[:12]):
        assert seen(cache, seq, 1) == sorted([i, 0.5])
    with pytest.raises(CacheValueError, match=f"in .0, {2**63 - 1}"):
        cache.remove(2**63, 0)


def test_deepcopy_is_independent() -> None:
    cache = CausalCache(add_shift)
    cache.set_config(CacheConfig(permuted_v=True))
    cache.init(np.float32, 1, 8, 4)
    one = np.ones((1, 1, 2), np.float32)
    cache.start_forward([0], [0])
    cache.put(one, one)
    other = copy.deepcopy(cache)
    other.start_forward([1], [0])
    other.put(one * 2, one * 2)
    assert other.get()[0].tolist() == [[[1, 1]], [[2, 2]]]
    assert other.get()[1].tolist() == [[[1, 2], [1, 2]]]
    assert cache.get()[0].tolist() == [[[1, 1]]]
    assert cache.get()[2].tolist() == [[0]]
    assert INF not in other.get()[2]
