"""A forward pass: where a batch goes, its mask, put, get, reserve, set_causal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ollama_support import INF, assert_same, fill, forward, seen, state, twin

from pykvcache.arrays import CacheConfig, CausalCache, ChunkedAttentionCache, SWACache
from pykvcache.errors import CacheDTypeError, CacheLayerError, CacheValueError, KvCacheFull


def causal(capacity: int = 16, max_batch: int = 8, **config: Any) -> CausalCache:
    cache = CausalCache()
    cache.set_config(CacheConfig(**config))
    cache.init(np.float32, 1, capacity, max_batch)
    return cache


# A.1 StartForward records the batch; A.1 the mask is built for the batch.
def test_history_and_mask_grow_with_the_sequence() -> None:
    cache = causal()
    first = [[0, -INF, -INF], [0, 0, -INF], [0, 0, 0]]
    assert forward(cache, [7, 8, 9], [0, 0, 0], [0, 1, 2]) == ([7, 8, 9], first)
    assert forward(cache, [4], [0], [3]) == ([7, 8, 9, 4], [[0, 0, 0, 0]])


# A.1 every new cell holds its position and its sequence alone.
def test_tokens_see_their_own_sequence_only() -> None:
    cache = causal()
    numbers, mask = forward(cache, [1, 2, 3, 4], [0, 5, 0, 5], [0, 0, 1, 1])
    assert numbers == [1, 2, 3, 4]
    assert mask == [
        [0, -INF, -INF, -INF],
        [-INF, 0, -INF, -INF],
        [0, -INF, 0, -INF],
        [-INF, 0, -INF, 0],
    ]
    assert forward(cache, [5, 6], [5, 0], [2, 2])[1] == [
        [-INF, 0, -INF, 0, 0, -INF],
        [0, -INF, 0, -INF, -INF, 0],
    ]


# A.1 ranges are widened; A.1 unlimited memory: the range is the union over the batch's sequences.
def test_history_covers_the_sequences_of_the_batch() -> None:
    cache = causal()
    forward(cache, [1, 2], [0, 0], [0, 1])
    forward(cache, [3, 4], [1, 1], [0, 1])
    forward(cache, [5, 6], [2, 2], [0, 1])
    assert forward(cache, [7], [1], [2])[0] == [3, 4, 5, 6, 7]
    assert forward(cache, [8, 9], [2, 1], [2, 3])[0] == [3, 4, 5, 6, 7, 8, 9]
    assert forward(cache, [10], [9], [0]) == ([10], [[0]])


# A.1 the first contiguous block of free cells that is large enough.
def test_batches_go_to_the_first_block_that_fits() -> None:
    cache = causal(capacity=10)
    for seq, count in enumerate((2, 1, 3, 1)):
        forward(cache, [seq * 10 + i for i in range(count)], [seq] * count, range(count))
    cache.remove(0, 0)
    cache.remove(2, 0)
    # Free now: cells 0-1, 3-5, 7-9. Two tokens fit in front, three do not.
    assert forward(cache, [50, 51, 52], [3, 3, 3], [1, 2, 3])[0] == [50, 51, 52, 30]
    assert forward(cache, [60, 61], [3, 3], [4, 5])[0] == [60, 61, 10, 50, 51, 52, 30]


# A.1 a full cache is an error that names its size, and the batch is not recorded.
def test_full_cache_raises_and_records_nothing() -> None:
    cache = causal(capacity=6)
    fill(cache, 5)
    before, other = state(cache), twin(cache)
    with pytest.raises(KvCacheFull, match=r"\(cache: 6 batch: 2\)") as caught:
        cache.start_forward([5, 6], [0, 0])
    assert (caught.value.capacity, caught.value.batch) == (6, 2)
    assert_same(before, state(cache))
    assert forward(cache, [5], [0], [5]) == forward(other, [5], [0], [5])


# A.1 reserve: metadata untouched, location 0, the range is the whole cache.
def test_reserve_spans_the_cache_and_changes_nothing() -> None:
    cache = causal(capacity=6, max_batch=4, mask_batch_padding=3)
    fill(cache, 2)
    other = twin(cache)
    cache.start_forward([3, 4, 5, 6], [0, 0, 1, 1], reserve=True)
    key, _, mask = cache.get()
    assert key.shape == (6, 1, 1)
    assert mask.shape == (6, 6)
    assert mask[0].tolist() == [0, 0, *[-INF] * 4]
    assert forward(cache, [2], [0], [2]) == forward(other, [2], [0], [2])


# A.1 reserve; decided: put in a reserve pass allocates and stores nothing.
def test_put_in_a_reserve_pass_stores_nothing() -> None:
    cache = causal(capacity=6, max_batch=4)
    forward(cache, [7, 7, 7, 7], [0] * 4, range(4), reserve=True)
    assert cache.get()[0].ravel().tolist() == [0] * 6
    fill(cache, 4, step=4)
    forward(cache, [7, 7, 7, 7], [0] * 4, range(4), reserve=True)
    assert cache.get()[0].ravel().tolist() == [0, 1, 2, 3, 0, 0]
    with pytest.raises(CacheValueError, match="inconsistent batch sizes"):
        cache.put(np.ones((3, 1, 1)), np.ones((3, 1, 1)))
    # A reserve pass may be wider than what is free, or than the cache.
    wide = causal(capacity=2, max_batch=4)
    forward(wide, [7, 7, 7, 7], [0] * 4, range(4), reserve=True)
    assert forward(wide, [1, 2], [0, 0], [0, 1])[0] == [1, 2]


# A.1 buildMask: [roundUp(batch), range aligned down and up]; padding rows are -inf.
def test_mask_is_aligned_and_padded() -> None:
    cache = causal(capacity=16, cache_padding=4, mask_batch_padding=3)
    forward(cache, [1, 2, 3, 4, 5], [0] * 5, range(5))
    cache.remove(0, 0)
    forward(cache, [1, 2, 3, 4, 5], [1] * 5, range(5))
    numbers, mask = forward(cache, [6, 7], [2, 2], [0, 1])
    # Cells 5 and 6: the range is aligned to cells 4 to 7.
    assert numbers == [5, 6, 7, 0]
    assert mask == [[-INF, 0, -INF, -INF], [-INF, 0, 0, -INF], [-INF] * 4]
    assert cache.get()[2].dtype == np.float32


# A.1 buildMask: -inf for other sequences, later positions, earlier chunks, beyond the window.
@pytest.mark.parametrize(
    ("cache", "rule"),
    [
        (CausalCache(), lambda pos, cur: pos <= cur),
        (SWACache(3), lambda pos, cur: cur - 3 <= pos <= cur),
        (ChunkedAttentionCache(3), lambda pos, cur: cur - cur % 3 <= pos <= cur),
        (ChunkedAttentionCache(0), lambda pos, cur: pos <= cur),
    ],
    ids=["causal", "window", "chunks", "no chunks"],
)
def test_mask_follows_the_rule_of_the_cache(cache: Any, rule: Any) -> None:
    cache.init(np.float32, 2, 32, 16)
    sequences = [0, 1] * 6
    positions = [i // 2 for i in range(12)]
    _, mask = forward(cache, range(12), sequences, positions)
    for i, row in enumerate(mask):
        for j, entry in enumerate(row):
            visible = sequences[i] == sequences[j] and rule(positions[j], positions[i])
            assert entry == (0 if visible else -INF), (i, j)


# A.1 buildMask: window W shows W + 1 keys.
def test_window_shows_one_key_more_than_its_size() -> None:
    for window in (1, 2, 5):
        cache = SWACache(window)
        cache.init(np.float32, 1, 32, 4)
        fill(cache, 10)
        assert seen(cache, 0, 10) == sorted([*range(10 - window, 10), 0.5])


# A.1 the mask is cast to MaskDType.
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_mask_has_the_dtype_of_the_config(dtype: Any) -> None:
    cache = causal(mask_dtype=dtype)
    _, mask = forward(cache, [1, 2], [0, 0], [0, 1])
    assert mask == [[0, -INF], [0, 0]]
    assert cache.get()[2].dtype == dtype


# A.1 SetLayer chooses the layer for Put and Get; layers start as zeros at their first put.
def test_layers_are_separate_and_start_as_zeros() -> None:
    cache = causal()
    forward(cache, [1, 2], [0, 0], [0, 1])
    cache.start_forward([2], [0])
    cache.set_layer(np.int8(3))
    nine = np.full((1, 1, 1), 9)
    cache.put(nine, nine)
    assert cache.get()[0].ravel().tolist() == [0, 0, 9]
    cache.set_layer(0)
    cache.put(nine * 2, nine * 2)
    assert cache.get()[0].ravel().tolist() == [1, 2, 18]
    with pytest.raises(CacheLayerError, match="layer is -1"):
        cache.set_layer(-1)
    assert cache.get()[0].ravel().tolist() == [1, 2, 18]


# A.1 K [headDim, kvHeads, cells], V the same; the head sizes may differ.
@pytest.mark.parametrize("permuted_v", [False, True])
def test_key_and_value_head_sizes_may_differ(permuted_v: bool) -> None:
    cache = causal(permuted_v=permuted_v)
    random = np.random.default_rng(5)
    k, v = random.normal(size=(4, 2, 3)), random.normal(size=(4, 2, 5))
    k, v = k.astype(np.float32), v.astype(np.float32)
    for first in (0, 3):
        last = first + 3
        cache.start_forward(range(4)[first:last], [0] * len(k[first:last]))
        cache.put(k[first:last], v[first:last])
    key, value, mask = cache.get()
    assert np.array_equal(key, k)
    # A.1 PermutedV: the order is [cells, headDim, kvHeads], reversed here.
    assert np.array_equal(value, v.transpose(1, 2, 0) if permuted_v else v)
    assert mask.shape == (1, 4)


# A.1 PermutedV: cells are neighbours in memory, the layout is real.
def test_permuted_v_is_a_layout_in_memory() -> None:
    cache = causal(permuted_v=True)
    cache.start_forward([0, 1], [0, 0])
    cache.put(np.ones((2, 2, 3), np.float32), np.ones((2, 2, 4), np.float32))
    value = cache.get()[1]
    assert value.shape == (2, 4, 2)
    assert value.strides[2] == value.itemsize


# A.1 Put with another batch size, and every other shape that does not fit, is refused.
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
def test_put_refuses_what_is_not_numbers(bad: Any) -> None:
    cache = causal()
    forward(cache, [1, 2], [0, 0], [0, 1])
    before, good = state(cache), np.full((2, 1, 1), 5, np.float32)
    for pair in ((bad, good), (good, bad)):
        with pytest.raises(CacheDTypeError, match="has dtype"):
            cache.put(*pair)
        assert_same(before, state(cache))


def test_put_converts_numbers_and_lists() -> None:
    cache = causal()
    cache.start_forward([0, 1], [0, 0])
    for good in ([[[1]], [[2]]], np.array([[[1]], [[2]]], np.float64), np.array([[[1]], [[2]]])):
        cache.put(np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))
        cache.put(good, good)
        assert cache.get()[0].ravel().tolist() == [1, 2]


def test_put_checks_the_batch_size_after_a_larger_pass() -> None:
    """The short way through put must not outlive the pass that it was made for."""
    cache = causal()
    three, one = np.ones((3, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    cache.start_forward(range(3), [0] * 3)
    cache.put(three, three)
    cache.start_forward([3], [0])
    with pytest.raises(CacheValueError, match="inconsistent batch sizes"):
        cache.put(three, three)
    cache.put(one, one)
    cache.start_forward([4], [0], reserve=True)
    cache.put(one * 9, one * 9)
    assert 9 not in cache.get()[0]


# A.1 Get returns views of the current range, and the mask; they cannot be written to.
def test_get_returns_read_only_views_of_the_range() -> None:
    cache = causal(capacity=1024)
    forward(cache, [1, 2], [0, 0], [0, 1])
    key, value, mask = cache.get()
    forward(cache, [3], [0], [2])
    later, later_value, _ = cache.get()
    assert np.shares_memory(key, later)
    assert np.shares_memory(value, later_value)
    assert later.shape == (3, 1, 1)
    for array in (key, value, mask):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


# A.1 SetCausal: rows in Except see later positions of their sequence; reset at StartForward.
def test_set_causal_lets_rows_look_ahead_for_one_pass() -> None:
    cache = causal()
    forward(cache, [1, 2, 3], [0, 0, 1], [0, 1, 0])
    cache.set_causal([0])
    assert cache.get()[2].tolist() == [[0, 0, -INF], [0, 0, -INF], [-INF, -INF, 0]]
    cache.set_causal()
    assert cache.get()[2].tolist() == [[0, -INF, -INF], [0, 0, -INF], [-INF, -INF, 0]]
    cache.set_causal([0])
    _, mask = forward(cache, [4, 5], [0, 0], [2, 3])
    assert mask == [[0, 0, -INF, 0, -INF], [0, 0, -INF, 0, 0]]


# A.1 SetCausal: the window and the chunk bind an excepted row too.
def test_set_causal_keeps_window_and_chunk() -> None:
    for cache, rows in (
        (SWACache(1), [[0, 0, 0, 0], [0, 0, -INF, -INF], [-INF, 0, 0, 0], [-INF, -INF, 0, 0]]),
        (
            ChunkedAttentionCache(2),
            [[0, 0, 0, 0], [0, 0, -INF, -INF], [-INF, -INF, 0, 0], [-INF, -INF, 0, 0]],
        ),
    ):
        cache.init(np.float32, 1, 16, 8)
        forward(cache, range(4), [0] * 4, range(4))
        cache.set_causal((0, 2))
        assert cache.get()[2].tolist() == rows


# A.1 SetCausal rebuilds the mask only if Except differs.
def test_set_causal_rebuilds_the_mask_only_if_rows_change() -> None:
    cache = causal()
    forward(cache, [1, 2], [0, 0], [0, 1])
    plain = cache.get()[2]
    cache.set_causal(())
    assert cache.get()[2] is plain
    cache.set_causal(row for row in (0, 1, 1))
    ahead = cache.get()[2]
    assert ahead is not plain
    cache.set_causal(np.array([1, 0]))
    assert cache.get()[2] is ahead
    assert plain.tolist() == [[0, -INF], [0, 0]]


@pytest.mark.parametrize(
    ("rows", "error"), [([2], CacheValueError), ([-1], CacheValueError), ([True], TypeError)]
)
def test_set_causal_refuses_rows_outside_the_batch(rows: Any, error: type) -> None:
    cache = causal(mask_batch_padding=4)
    forward(cache, [1, 2], [0, 0], [0, 1])
    before = state(cache)
    with pytest.raises(error):
        cache.set_causal(rows)
    assert_same(before, state(cache))
