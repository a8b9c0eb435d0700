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
    begun,
    fill,
    forward,
    made,
    one,
    pair,
    seen,
    state,
    twin,
)

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
    NotSupported,
    PositionError,
    SharedCellsError,
)


def causal(capacity: int = 16, max_batch: int = 8, **config: Any) -> CausalCache:
    cache = CausalCache()
    cache.set_config(CacheConfig(**config))
    cache.init(np.float32, 1, capacity, max_batch)
    return cache


def cells(cache: Any) -> int:
    """Return the number of cells: how many sequences of one token there is room for."""
    for count in range(1000):
        try:
            cache.start_forward([0], [1000 + count])
        except KvCacheFull as error:
            return error.capacity or 0
    raise AssertionError


# Constructors, configuration and sizes -----------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "visible"),
    [
        (CausalCache(), [0, 1, 2, 3, 4, 5, 0.5]),
        (SWACache(2), [4, 5, 0.5]),
        (SWAMemCache(2, 4), [4, 5, 0.5]),
        (ChunkedAttentionCache(4), [4, 5, 0.5]),
        (ChunkedAttentionCache(0), [0, 1, 2, 3, 4, 5, 0.5]),
    ],
)
def test_constructors_decide_which_tokens_are_visible(cache: Any, visible: list[float]) -> None:
    assert isinstance(cache, Cache)
    fill(made(cache), 6)
    assert seen(cache, 0, 6) == sorted(visible)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: SWACache(-1), CacheValueError),
        (lambda: SWAMemCache(2, -1), CacheValueError),
        (lambda: ChunkedAttentionCache(-4), CacheValueError),
        (lambda: SWACache(2.0), TypeError),
        (lambda: ChunkedAttentionCache(True), TypeError),
        (lambda: CausalCache(3), TypeError),
        (lambda: CacheConfig(cache_padding=-1), CacheValueError),
        (lambda: CacheConfig(cache_padding=2**31), CacheValueError),
        (lambda: CacheConfig(mask_batch_padding=10**5000), CacheValueError),
        (lambda: CacheConfig(cache_padding=True), TypeError),
        (lambda: CacheConfig(mask_batch_padding=1.0), TypeError),
        (lambda: CacheConfig(mask_dtype=np.int32), CacheDTypeError),
        (lambda: CacheConfig(mask_dtype="nonsense"), CacheDTypeError),
        (lambda: CacheConfig(permuted_v=1), TypeError),
    ],
)
def test_constructors_refuse_bad_arguments(build: Any, error: type) -> None:
    with pytest.raises(error):
        build()


def test_configuration_defaults_to_the_plain_layout() -> None:
    assert CacheConfig() == CacheConfig(0, 0, None, False)
    assert CacheConfig(0, 0).cache_padding == CacheConfig(0, 0).mask_batch_padding == 1
    assert CacheConfig().mask_dtype == np.float32
    cache = CausalCache()
    assert cache.config is None
    assert made(cache).config == CacheConfig()


def test_set_config_works_once_and_before_init() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(cache_padding=4))
    for again in (CacheConfig(), CacheConfig(cache_padding=4)):
        with pytest.raises(CacheOrderError, match="config cannot be changed"):
            cache.set_config(again)
    assert cells(made(cache, 1, 5)) == 8
    with pytest.raises(CacheOrderError, match="config cannot be changed"):
        made(CausalCache()).set_config(CacheConfig())
    with pytest.raises(TypeError, match="must be a CacheConfig"):
        CausalCache().set_config({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "stored"),
    [(np.float16, "f2"), ("f16", "f2"), ("f32", "f4"), ("float64", "f8"), (np.dtype("f4"), "f4")],
)
def test_keys_and_values_are_stored_in_the_dtype_of_init(given: Any, stored: str) -> None:
    cache = CausalCache()
    assert cache.dtype is None
    cache.init(given, 1, 4, 4)
    cache.start_forward([0], [0])
    cache.put(one(1 / 3, np.float64), np.ones((1, 1, 1), np.int64))
    key, value, _ = cache.get()
    assert cache.dtype == key.dtype == value.dtype == np.dtype(stored)
    assert key[0, 0, 0] == np.dtype(stored).type(1 / 3)


@pytest.mark.parametrize(
    ("cache", "padding", "sequences", "expected"),
    [
        (CausalCache(), 1, 3, 3 * 10),
        (CausalCache(), 16, 3, 32),
        (ChunkedAttentionCache(2), 7, 3, 35),
        (SWACache(4), 1, 1, 4 + 8),
        (SWACache(4), 1, 3, 3 * 5 + 8),  # room for the stop token of parallel sequences
        (SWAMemCache(4, 6), 4, 3, 28),
        (SWAMemCache(4, 0), 1, 1, 4 + 8),
        (SWAMemCache(4, 10), 0, 3, 30),  # memory >= capacity never slides
        (SWACache(9), 1, 1, 9 + 8),
        (SWACache(10), 1, 1, 10),
        (SWACache(0), 1, 1, 10),
    ],
)
def test_number_of_cells(cache: Any, padding: int, sequences: int, expected: int) -> None:
    cache.set_config(CacheConfig(cache_padding=padding))
    assert cells(made(cache, sequences, 10)) == expected


def test_a_memory_below_the_window_is_refused() -> None:
    cache = SWAMemCache(5, 3)
    with pytest.raises(
        CacheValueError, match=r"memory \(3\) must be at least as large as the window \(5\)"
    ):
        made(cache)
    with pytest.raises(CacheOrderError, match="call init first"):
        cache.start_forward([0], [0])
    made(cache, 1, 3)  # nothing slides
    assert cells(made(cache, 2, 16, 4)) == 2 * 6 + 4
    with pytest.raises(CacheValueError, match=r"the window \(unlimited\)"):
        made(SWAMemCache(0, 3), 2)


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
        ((np.float32, 2**16, 2**15, 1), CacheValueError, "at most 2147483647"),
    ],
)
def test_init_refuses_bad_sizes_and_changes_nothing(
    arguments: tuple[Any, ...], error: type, message: str
) -> None:
    cache = made(CausalCache())
    forward(cache, [1, 2], [0, 0], [0, 1])
    before = state(cache)
    with pytest.raises(error, match=message):
        cache.init(*arguments)
    assert_same(before, state(cache))


def test_a_mask_beyond_every_address_is_refused_by_init() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(mask_batch_padding=2**31 - 1, mask_dtype=np.float64))
    with pytest.raises(CacheValueError, match="largest mask"):
        made(cache, 1, 2**30)


def test_close_frees_the_arrays_and_init_starts_anew() -> None:
    cache = CausalCache()
    cache.close()
    forward(made(cache), [1, 2], [0, 0], [0, 1])
    base = weakref.ref(cache.get()[0].base)
    assert base() is not None
    cache.close()
    assert base() is None
    cache.close()
    assert cache.dtype is None
    for call in (
        cache.get,
        lambda: cache.put(one(1), one(1)),
        lambda: cache.start_forward([0], [0]),
        lambda: cache.set_layer(0),
        cache.set_causal,
        lambda: cache.remove(0, 0),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.can_resume(0, 0),
    ):
        with pytest.raises(ClosedError, match="CausalCache was closed"):
            call()
    assert forward(made(cache), [5], [0], [2]) == ([5], [[0]])


def test_order_of_calls_is_checked() -> None:
    cache = CausalCache()
    for call in (cache.get, lambda: cache.set_layer(0), lambda: cache.start_forward([0], [0])):
        with pytest.raises(CacheOrderError, match="CausalCache was not set up; call init first"):
            call()
    made(cache)
    for call in (cache.get, lambda: cache.put(one(1), "x"), cache.set_causal):
        with pytest.raises(CacheOrderError, match="call start_forward first"):
            call()
    cache.start_forward([0], [0])
    with pytest.raises(CacheOrderError, match="nothing was put in this layer"):
        cache.get()
    for layer, error in ((-1, CacheLayerError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error):
            cache.set_layer(layer)


# A forward pass ----------------------------------------------------------------------------


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
        (np.array([2**63], np.uint64), [0], CacheValueError, "below 2"),
    ],
)
def test_start_forward_refuses_bad_batches_and_changes_nothing(
    positions: Any, sequences: Any, error: type, message: str
) -> None:
    cache = made(CausalCache(), max_batch=4)
    forward(cache, [1, 2], [0, 0], [0, 1])
    other = twin(cache)
    with pytest.raises(error, match=message):
        cache.start_forward(positions, sequences)
    assert_twins(cache, other)


def test_positions_reach_2_31_and_ids_any_number() -> None:
    cache = made(CausalCache(), capacity=32)
    ids = [0, 2**63 - 1, 5, *range(100, 117)]  # more than max_sequences
    for i, seq in enumerate(np.array(ids)):
        forward(cache, [i], [seq], np.array([2**31 - 3], np.uint32))
    for i, seq in enumerate(ids[:12]):
        assert seen(cache, seq, 2**31 - 2) == sorted([i, 0.5])
    with pytest.raises(CacheValueError, match=f"in .0, {2**63 - 1}"):
        cache.remove(2**63, 0)


def test_batches_go_to_the_first_block_that_fits() -> None:
    cache = causal(capacity=10)
    for seq, count in enumerate((2, 1, 3, 1)):
        forward(cache, [seq * 10 + i for i in range(count)], [seq] * count, range(count))
    cache.remove(0, 0)
    cache.remove(2, 0)
    # Free now: cells 0-1, 3-5, 7-9. Two tokens fit in front, three do not.
    assert forward(cache, [50, 51, 52], [3, 3, 3], [1, 2, 3])[0] == [50, 51, 52, 30]
    assert forward(cache, [60, 61], [3, 3], [4, 5])[0] == [60, 61, 10, 50, 51, 52, 30]


def test_a_full_cache_refuses_the_batch_and_changes_nothing() -> None:
    cache = causal(capacity=10, max_batch=10)
    fill(cache, 10, step=10)
    cache.copy_prefix(0, 1, 4)
    cache.remove(0, 0)
    forward(cache, [50, 51], [2, 2], [0, 1])
    cache.remove(1, 1, 4)
    # Free: cells 1 to 3 and 6 to 9. 8 tokens do not fit even after defragmenting.
    other, (_, _, mask) = twin(cache), cache.get()
    with pytest.raises(KvCacheFull, match=r"\(cache: 10 batch: 8\)") as caught:
        cache.start_forward(range(8), [0] * 8)
    assert (caught.value.capacity, caught.value.batch) == (10, 8)
    assert cache.get()[2] is mask  # get and put continue with the previous pass
    cache.put(np.full((2, 1, 1), 8), np.full((2, 1, 1), 8))
    other.put(np.full((2, 1, 1), 8), np.full((2, 1, 1), 8))
    assert_twins(cache, other, (0, 1, 2))


def test_a_full_sliding_cache_evicts_nothing() -> None:
    cache = made(SWACache(2), max_batch=4)
    for seq in (0, 1, 2):
        fill(cache, 2, sequence=seq, step=2)
    cache.remove(2, 0)
    forward(cache, [2, 3], [0, 0], [2, 3])
    # Sequence 0 will lose tokens 0 and 1 in the next pass; that makes room for 2, not for 3.
    other = twin(cache)
    with pytest.raises(KvCacheFull, match="cache: 6 batch: 3"):
        cache.start_forward([0, 1, 2], [3, 3, 3])
    assert_twins(cache, twin(other))
    other.start_forward([0, 1], [3, 3])
    assert not other.can_resume(0, 2)


def test_a_reserve_pass_spans_the_cache_and_changes_nothing() -> None:
    cache = causal(capacity=6, max_batch=4, mask_batch_padding=3)
    fill(cache, 2)
    other = twin(cache)
    cache.start_forward([3, 4, 5, 6], [0, 0, 1, 1], reserve=True)
    key, _, mask = cache.get()
    assert (key.shape, mask.shape) == ((6, 1, 1), (6, 6))
    assert mask[0].tolist() == [0, 0, *[-INF] * 4]
    cache.put(np.full((4, 1, 1), 9), np.full((4, 1, 1), 9))
    with pytest.raises(CacheValueError, match="inconsistent batch sizes"):
        cache.put(np.ones((3, 1, 1)), np.ones((3, 1, 1)))
    assert forward(cache, [2], [0], [2]) == forward(other, [2], [0], [2])
    # It may be wider than the free cells, or than the cache.
    wide = causal(capacity=2, max_batch=4)
    forward(wide, [7, 7, 7, 7], [0] * 4, range(4), reserve=True)
    assert wide.get()[0].ravel().tolist() == [0, 0]
    assert forward(wide, [1, 2], [0, 0], [0, 1])[0] == [1, 2]


def test_history_covers_the_sequences_of_the_batch() -> None:
    cache = causal()
    for seq in (0, 1, 2):
        forward(cache, [2 * seq + 1, 2 * seq + 2], [seq] * 2, [0, 1])
    assert forward(cache, [7], [1], [2])[0] == [3, 4, 5, 6, 7]
    assert forward(cache, [8, 9], [2, 1], [2, 3])[0] == [3, 4, 5, 6, 7, 8, 9]
    assert forward(cache, [10], [9], [0]) == ([10], [[0]])
    # With a window, as much as the sequences of the batch need.
    cache = made(SWAMemCache(1, 4), sequences=2, capacity=32, max_batch=4)
    fill(cache, 3, sequence=1)
    fill(cache, 3)
    assert forward(cache, [9], [1], [3])[0] == [2, 0, 1, 2, 9]
    assert forward(cache, [9], [0], [3])[0] == [2, 9, 9]


def test_the_mask_is_aligned_and_padded() -> None:
    cache = causal(cache_padding=4, mask_batch_padding=3)
    forward(cache, [1, 2, 3, 4, 5], [0] * 5, range(5))
    cache.remove(0, 0)
    forward(cache, [1, 2, 3, 4, 5], [1] * 5, range(5))
    numbers, mask = forward(cache, [6, 7], [2, 2], [0, 1])
    # Cells 5 and 6: the history is aligned to cells 4 to 7.
    assert numbers == [5, 6, 7, 0]
    assert mask == [[-INF, 0, -INF, -INF], [-INF, 0, 0, -INF], [-INF] * 4]
    wide = causal(mask_dtype=np.float64)
    forward(wide, [1], [0], [0])
    assert (cache.get()[2].dtype, wide.get()[2].dtype) == (np.float32, np.float64)


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
    for rows, error in (([2], CacheValueError), ([-1], CacheValueError), ([True], TypeError)):
        with pytest.raises(error):
            cache.set_causal(rows)
    assert cache.get()[2] is ahead
    forward(cache, [3, 4], [0, 0], [2, 3])
    assert cache.get()[2][0].tolist() == [0, 0, 0, -INF]  # for one pass only


# Put and get -------------------------------------------------------------------------------


@pytest.mark.parametrize("permuted_v", [False, True])
def test_key_and_value_head_sizes_may_differ(permuted_v: bool) -> None:
    cache = causal(permuted_v=permuted_v)
    k, v = np.random.default_rng(5).normal(size=(2, 4, 2, 5)).astype(np.float32)
    k = k[..., :3].copy()
    for first, last in ((0, 3), (3, 4)):
        cache.start_forward(range(first, last), [0] * (last - first))
        cache.put(k[first:last], v[first:last])
    key, value, mask = cache.get()
    assert np.array_equal(key, k)
    assert np.array_equal(value, v.transpose(1, 2, 0) if permuted_v else v)
    assert mask.shape == (1, 4)
    if permuted_v:  # the cells of a channel are neighbours in memory
        assert value.strides[2] == value.itemsize


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((3, 2, 4), (3, 2, 4), r"inconsistent batch sizes \(layer: 0, batch size: 2, .*: 3\)"),
        ((2, 2, 4), (1, 2, 4), "inconsistent batch sizes"),
        ((2, 2, 5), (2, 2, 4), "key has shape .* layer 0 holds"),
        ((2, 2, 4), (2, 2, 5), "value has shape .* layer 0 holds"),
        ((2, 3, 4), (2, 3, 4), "key has shape"),
        ((2, 2, 4), (2, 1, 4), "key has 2 heads, but value 1"),
        ((2, 8), (2, 8), "is needed"),
        ((1, 2, 2, 4), (1, 2, 2, 4), "is needed"),
        ((), (), "is needed"),
    ],
)
def test_put_refuses_shapes_that_do_not_fit(k: Any, v: Any, message: str) -> None:
    cache = causal()
    cache.start_forward([0, 1], [0, 0])
    cache.put(np.ones((2, 2, 4), np.float32), np.ones((2, 2, 4), np.float32))
    before = state(cache)
    with pytest.raises(CacheValueError, match=message):
        cache.put(np.full(k, 5, np.float32), np.full(v, 5, np.float32))
    assert_same(before, state(cache))


@pytest.mark.parametrize(
    "bad", [np.ones((2, 1, 1), complex), np.ones((2, 1, 1), bool), "ab", [["x"]], None, object()]
)
def test_put_refuses_arrays_that_are_not_numbers(bad: Any) -> None:
    cache = causal()
    forward(cache, [1, 2], [0, 0], [0, 1])
    before, good = state(cache), np.full((2, 1, 1), 5, np.float32)
    for arrays in ((bad, good), (good, bad)):
        with pytest.raises(CacheDTypeError, match="has dtype"):
            cache.put(*arrays)
        assert_same(before, state(cache))


def test_put_converts_numbers_and_lists() -> None:
    cache = causal()
    cache.start_forward([0, 1], [0, 0])
    for good in ([[[1]], [[2]]], np.array([[[1]], [[2]]], np.float64), np.array([[[1]], [[2]]])):
        cache.put(np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))
        cache.put(good, good)
        assert cache.get()[0].ravel().tolist() == [1, 2]


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


@pytest.mark.parametrize("permuted", [False, True])
def test_arrays_of_get_may_be_put_the_other_way_round(permuted: bool) -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(permuted_v=permuted))
    begun(cache)
    for _ in range(3):
        cache.put(one(1), one(2))
        key, value, _ = cache.get()
        cache.put(value.reshape(1, 1, 1), key.reshape(1, 1, 1))
        assert pair(cache) == (2, 1)


@pytest.mark.parametrize("kind", ["raise", "warn"])
def test_a_value_too_large_is_infinite_with_any_seterr(kind: str) -> None:
    cache = begun(CausalCache(lambda layer, key, shift: np.full_like(key, 1e30, np.float64)), "f2")
    with np.errstate(all=kind):
        cache.put(one(3), one(1e30, np.float64))
        assert pair(cache) == (3, np.inf)
        cache.start_forward([1], [0])
        cache.remove(0, 0, 1)
    cache.start_forward([1], [0])
    assert cache.get()[0].ravel().tolist()[1] == np.inf


def test_get_returns_read_only_views_of_the_history() -> None:
    cache = causal(capacity=1024)
    forward(cache, [1, 2], [0, 0], [0, 1])
    key, value, mask = cache.get()
    forward(cache, [3], [0], [2])
    later, later_value, _ = cache.get()
    assert np.shares_memory(key, later)
    assert np.shares_memory(value, later_value)
    for array in (key, value, mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


# Sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        ("remove", (0, 3, 2), PositionError, "begin is 3, over end, which is 2"),
        ("remove", (0, -1), PositionError, "begin is -1"),
        ("remove", (0, 0, -1), PositionError, "end is -1"),
        ("remove", (0, 0, 2**31), PositionError, "end is 2147483648"),
        ("remove", (-1, 0), CacheValueError, "seq is -1"),
        ("remove", (0, 1.0), TypeError, "not float"),
        ("remove", (0, True), TypeError, "not bool"),
        ("remove", (None, 0), TypeError, "not NoneType"),
        ("copy_prefix", (-1, 0, 1), CacheValueError, "src_seq is -1"),
        ("copy_prefix", (0, -1, 1), CacheValueError, "dst_seq is -1"),
        ("copy_prefix", (0, 1, -1), CacheValueError, "n is -1"),
        ("can_resume", (-1, 0), CacheValueError, "seq is -1"),
        ("can_resume", (0, -1), PositionError, "pos is -1"),
    ],
)
def test_sequences_and_ranges_are_checked(
    method: str, arguments: Any, error: type, message: str
) -> None:
    cache = made(CausalCache())
    fill(cache, 4, step=4)
    with pytest.raises(error, match=message):
        getattr(cache, method)(*arguments)
    assert seen(cache, 0, 4) == [0, 0.5, 1, 2, 3]


def test_copy_prefix_shares_cells_and_replaces_the_destination() -> None:
    cache = made(CausalCache(), capacity=6)
    fill(cache, 4, step=4)
    cache.copy_prefix(0, 1, 2)
    assert forward(cache, [7, 8], [1, 1], [2, 3]) == (
        [0, 1, 2, 3, 7, 8],
        [[0, 0, -INF, -INF, 0, -INF], [0, 0, -INF, -INF, 0, 0]],
    )
    for source, n, visible in ((0, 2**40, [0, 1, 2, 3]), (0, 2, [0, 1]), (9, 5, []), (0, 0, [])):
        cache.copy_prefix(source, 1, n)
        assert seen(cache, 1, len(visible)) == sorted([*visible, 0.5])
    cache.copy_prefix(0, 0, 9)
    cache.copy_prefix(0, 0, 2)  # Ollama wipes the sequence
    assert seen(cache, 0, 2) == [0, 0.5, 1]


def test_removing_to_the_end_never_fails() -> None:
    for cache in (CausalCache(), SWACache(2), ChunkedAttentionCache(8)):
        made(cache, sequences=2)
        fill(cache, 5, step=5)
        cache.copy_prefix(0, 1, 4)
        for begin in (3, 3, 100):
            cache.remove(0, begin)
        cache.remove(77, 0)
        cache.remove(1, 2, 2**31 - 1)
        assert max(seen(cache, 0, 3)) == 2
        assert max(seen(cache, 1, 2)) == 1


def test_removing_from_the_middle_moves_and_shifts_later_tokens() -> None:
    cache = made(CausalCache(add_shift))
    fill(cache, 6, step=6)
    cache.remove(0, 1, 3)
    cache.start_forward([4], [0])
    cache.put(one(4), one(6))
    key, value, mask = cache.get()
    visible = mask[0] == 0
    assert key.ravel()[visible].tolist() == [0, 4, 1, 2, 3]
    assert value.ravel()[visible].tolist() == [0, 6, 3, 4, 5]
    gap = made(CausalCache(add_shift))
    forward(gap, [0, 5], [0, 0], [0, 5])
    gap.remove(0, 1, 4)  # positions without tokens
    assert seen(gap, 0, 3) == [0, 0.5, 2]


def test_keys_are_shifted_in_chunks_of_max_batch_cells() -> None:
    calls = []

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        calls.append((layer, key.ravel().tolist(), shift.tolist()))
        key += 1000 * (shift == 0)[:, None, None]  # its own copy; a shift of 0 is not stored
        return key + shift[:, None, None]

    cache = made(CausalCache(shift_fn), max_batch=4)
    forward(cache, [0, 1, 2, 3], [0] * 4, range(4))
    forward(cache, [4, 50, 5], [0, 1, 0], [4, 0, 5])
    forward(cache, [51, 6], [1, 0], [1, 6])
    for layer in (2, 0):
        cache.set_layer(layer)
        cache.put(np.ones((2, 1, 1)), np.ones((2, 1, 1)))
    cache.remove(0, 1, 4)
    # Cells 0 to 3 do not move; cell 8 starts a new chunk.
    assert [call for call in calls if call[0] == 0] == [
        (0, [4, 50, 5], [-3, 0, -3]),
        (0, [1], [-3]),
    ]
    assert [layer for layer, _, _ in calls] == [0, 2, 0, 2]
    assert seen(cache, 1, 2) == [0.5, 1, 50]


def refused(kind: str) -> Any:
    cache: Any = {
        "no shift_fn": CausalCache(),
        "window": SWAMemCache(3, 5, add_shift),
        "chunks": ChunkedAttentionCache(4),
        "shared": CausalCache(add_shift),
    }[kind]
    fill(made(cache, sequences=2, max_batch=4), 10, step=2)
    if kind == "shared":
        cache.copy_prefix(0, 1, 10)
    return cache


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("no shift_fn", NotSupported, "without a shift_fn"),
        ("window", NotSupported, "attends back to 2, but the tokens below 3 were dropped"),
        ("chunks", NotSupported, "without a shift_fn"),
        ("shared", SharedCellsError, "shared by multiple sequences"),
    ],
)
def test_a_refused_removal_changes_nothing(kind: str, error: type, message: str) -> None:
    cache = refused(kind)
    other = twin(cache)
    with pytest.raises(error, match=message) as caught:
        cache.remove(0, 4, 9)
    assert isinstance(caught.value, NotSupported) == (error is NotSupported)
    assert_twins(cache, other)
    cache.remove(0, 0)
    assert seen(cache, 0, 0) == [0.5]


def test_dropped_tokens_limit_a_removal_where_they_are() -> None:
    cache = made(SWAMemCache(3, 5, add_shift), sequences=2, capacity=32, max_batch=1)
    fill(cache, 12)
    cache.copy_prefix(0, 1, 12)  # the copy inherits the hole
    for seq in (0, 1):
        with pytest.raises((NotSupported, SharedCellsError)):
            cache.remove(seq, 7, 11)
    cache.remove(1, 0)
    cache.remove(0, 1, 4)
    assert seen(cache, 0, 9) == [0.5, 6, 7, 8]
    cache.remove(0, 9)
    # 1 to 9 gone, of which 1 and 2 were dropped long ago: 0 is missing before the next token.
    with pytest.raises(NotSupported, match="below 1 were dropped"):
        cache.remove(0, 1, 8)
    cache.remove(0, 0, 8)  # position 0 goes as well: then nothing is missing
    assert seen(cache, 0, 1) == [0, 0.5]


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


def test_defragmenting_keeps_the_order_of_long_runs() -> None:
    cache = made(CausalCache(), max_batch=16)
    forward(cache, range(100, 106), [1] * 6, range(6))
    fill(cache, 9, step=9)
    cache.remove(1, 1, 6)
    numbers, _ = forward(cache, range(9, 15), [0] * 6, range(9, 15))
    assert numbers == [4, 5, 6, 7, 8, 0, 1, 2, 3, *range(9, 15)]


# Functions of the caller -------------------------------------------------------------------


@pytest.mark.parametrize("failing_call", [0, 1, 2, 3])
def test_a_raising_shift_fn_changes_nothing(failing_call: int) -> None:
    calls = []

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        calls.append(layer)
        key += shift[:, None, None]
        if len(calls) > failing_call:
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
    assert len(calls) == failing_call + 1
    assert_twins(cache, other)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda key: key[:1], CacheValueError),
        (lambda key: key[..., None], CacheValueError),
        (lambda key: key.astype(complex), CacheDTypeError),
        (lambda key: None, CacheDTypeError),
    ],
)
def test_shift_fn_must_return_keys(wrong: Any, error: type) -> None:
    cache = made(CausalCache(lambda layer, key, shift: wrong(key)), sequences=2, max_batch=4)
    fill(cache, 6, step=3)
    other = twin(cache)
    with pytest.raises(error, match="shift_fn"):
        cache.remove(0, 1, 2)
    assert_twins(cache, other)
