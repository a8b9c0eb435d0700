"""What sequences share and lose: copying, removing with a shift, defragmenting."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from ollama_support import INF, add_shift, attend, fill, forward, made, rope, rope_shift, seen

from pykvcache.arrays import CacheConfig, CausalCache, ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.errors import CacheValueError, NotSupported, PositionError, SharedCellsError


# A.1 CopyPrefix shares every source cell below len; nothing is copied.
def test_copy_prefix_shares_cells() -> None:
    cache = made(CausalCache(), capacity=6)
    fill(cache, 4, step=4)
    cache.copy_prefix(0, 1, 2)
    assert forward(cache, [7, 8], [1, 1], [2, 3]) == (
        [0, 1, 2, 3, 7, 8],
        [[0, 0, -INF, -INF, 0, -INF], [0, 0, -INF, -INF, 0, 0]],
    )
    cache.remove(1, 2)
    assert seen(cache, 0, 4) == [0, 0.5, 1, 2, 3]


# A.1 CopyPrefix removes what the destination held.
def test_copy_prefix_replaces_the_destination() -> None:
    cache = made(CausalCache())
    fill(cache, 4, step=4)
    forward(cache, [50, 51, 52], [1] * 3, range(3))
    cache.copy_prefix(0, 1, 2)
    assert seen(cache, 1, 2) == [0, 0.5, 1]
    cache.copy_prefix(9, 1, 5)
    assert seen(cache, 1, 0) == [0.5]
    cache.copy_prefix(0, 1, 2**40)
    assert seen(cache, 1, 4) == [0, 0.5, 1, 2, 3]
    cache.copy_prefix(0, 1, 0)
    assert seen(cache, 1, 0) == [0.5]


# A.1 CopyPrefix(s, s, len), which wipes the sequence in the original, keeps the prefix.
def test_copy_prefix_onto_itself_keeps_the_prefix() -> None:
    cache = made(CausalCache())
    fill(cache, 4, step=4)
    cache.copy_prefix(0, 0, 9)
    cache.copy_prefix(0, 0, 2)
    assert seen(cache, 0, 2) == [0, 0.5, 1]


@pytest.mark.parametrize("arguments", [(-1, 0, 1), (0, -1, 1), (0, 1, -1)])
def test_copy_prefix_refuses_negative_numbers(arguments: tuple[int, int, int]) -> None:
    cache = made(CausalCache())
    fill(cache, 2)
    with pytest.raises(CacheValueError):
        cache.copy_prefix(*arguments)
    assert seen(cache, 0, 2) == [0, 0.5, 1]


# A.1 Remove to the end never fails: shared cells, no shift_fn, unknown sequences, nothing left.
def test_remove_to_the_end_never_fails() -> None:
    for cache in (CausalCache(), SWACache(2), ChunkedAttentionCache(8)):
        made(cache, sequences=2)
        fill(cache, 5, step=5)
        cache.copy_prefix(0, 1, 4)
        cache.remove(0, 3)
        cache.remove(0, 3)
        cache.remove(0, 100)
        cache.remove(77, 0)
        # A.1 MaxInt32 is the end as well.
        cache.remove(1, 2, 2**31 - 1)
        assert max(seen(cache, 0, 3)) == 2
        assert max(seen(cache, 1, 2)) == 1


# A.1 Remove from the middle: later positions move up and their keys are shifted.
def test_remove_from_the_middle_shifts_later_tokens() -> None:
    cache = made(CausalCache(add_shift))
    fill(cache, 6, step=6)
    cache.remove(0, 1, 3)
    cache.start_forward([4], [0])
    cache.put(np.full((1, 1, 1), 4.0), np.full((1, 1, 1), 6.0))
    key, value, mask = cache.get()
    visible = mask[0] == 0
    assert key.ravel()[visible].tolist() == [0, 4, 1, 2, 3]
    assert value.ravel()[visible].tolist() == [0, 6, 3, 4, 5]


# A.1 Remove: with a gap of its own, a sequence is moved by begin - end all the same.
def test_remove_of_positions_that_are_not_there_moves_later_tokens() -> None:
    cache = made(CausalCache(add_shift))
    forward(cache, [0, 5], [0, 0], [0, 5])
    cache.remove(0, 1, 4)
    assert seen(cache, 0, 3) == [0, 0.5, 2]
    cache.remove(0, 2, 2)
    assert sorted(seen(cache, 0, 4)) == [0, 0.5, 0.5, 2]


# A.1 shift(): chunks of max_batch cells, trimmed to first..last affected, untouched ones skipped.
def test_keys_are_shifted_in_chunks_of_max_batch_cells() -> None:
    calls = []

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        calls.append((layer, key.ravel().tolist(), shift.tolist()))
        assert shift.dtype.kind == "i"
        return key + shift[:, None, None]

    cache = made(CausalCache(shift_fn), max_batch=4)
    forward(cache, [0, 1, 2, 3], [0] * 4, range(4))
    forward(cache, [4, 50, 5], [0, 1, 0], [4, 0, 5])
    forward(cache, [51, 6], [1, 0], [1, 6])
    for layer in (2, 0):
        cache.set_layer(layer)
        cache.put(np.ones((2, 1, 1)), np.ones((2, 1, 1)))
    calls.clear()
    cache.remove(0, 1, 4)
    # Cells 0 to 3 hold nothing that moves; cell 8 starts a chunk of its own.
    assert [call for call in calls if call[0] == 0] == [
        (0, [4, 50, 5], [-3, 0, -3]),
        (0, [1], [-3]),
    ]
    assert [layer for layer, _, _ in calls] == [0, 2, 0, 2]
    assert seen(cache, 1, 2) == [0.5, 1, 50]


# A.1 shift(): what shift_fn gets is its own, and a shift of 0 is not written back.
def test_shift_fn_may_write_to_its_keys_and_cannot_touch_other_sequences() -> None:
    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        key += 1000 * (shift != 0)[:, None, None] - 500
        return key

    cache = made(CausalCache(shift_fn))
    forward(cache, [0, 10, 1, 11, 2, 12], [0, 1] * 3, [0, 0, 1, 1, 2, 2])
    cache.remove(0, 1, 2)
    cache.start_forward([3], [1])
    # From the first cell of sequence 1 on; the new token has the cell that 1 left.
    assert cache.get()[0].ravel().tolist() == [10, 1, 11, 502, 12]


# A.1 a later cell that another sequence shares cannot be shifted.
def test_remove_before_shared_tokens_is_refused() -> None:
    cache = made(CausalCache(add_shift))
    fill(cache, 4, step=4)
    cache.copy_prefix(0, 1, 4)
    with pytest.raises(SharedCellsError, match="shared by multiple sequences") as caught:
        cache.remove(0, 1, 2)
    assert not isinstance(caught.value, NotSupported)
    # Shared tokens before the cut do no harm; nor do those in it.
    cache.copy_prefix(0, 1, 2)
    cache.remove(0, 1, 3)
    assert seen(cache, 0, 2) == [0, 0.5, 1]
    assert seen(cache, 1, 2) == [0, 0.5, 1]


# A.1 shiftFn nil: ErrNotSupported, unless nothing comes after the end.
def test_remove_from_the_middle_needs_a_shift_fn() -> None:
    cache = made(CausalCache())
    fill(cache, 4, step=4)
    with pytest.raises(NotSupported, match="without a shift_fn"):
        cache.remove(0, 1, 2)
    cache.remove(0, 2, 4)
    assert seen(cache, 0, 2) == [0, 0.5, 1]
    cache.remove(0, 1, 100)
    assert seen(cache, 0, 1) == [0, 0.5]


# A.1 a sequence without tokens is deleted, and leaves nothing behind.
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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 3, 2), PositionError, "begin is 3, over end, which is 2"),
        ((0, -1), PositionError, "begin is -1"),
        ((0, 0, -1), PositionError, "end is -1"),
        ((0, 0, 2**31), PositionError, "end is 2147483648"),
        ((-1, 0), CacheValueError, "seq is -1"),
        ((0, 1.0), TypeError, "not float"),
        ((0, True), TypeError, "not bool"),
        ((None, 0), TypeError, "not NoneType"),
    ],
)
def test_remove_refuses_bad_ranges(arguments: Any, error: type, message: str) -> None:
    cache = made(CausalCache())
    fill(cache, 4, step=4)
    with pytest.raises(error, match=message):
        cache.remove(*arguments)
    assert seen(cache, 0, 4) == [0, 0.5, 1, 2, 3]


# A.1 defrag: holes at the front are filled from the end, neighbours together and in order.
def test_full_cache_is_defragmented_and_keeps_position_and_data_paired() -> None:
    cache = made(CausalCache(add_shift), max_batch=16)
    fill(cache, 16, step=16)
    cache.remove(0, 2, 4)
    cache.remove(0, 13)
    numbers, mask = forward(cache, [20, 21, 22], [0] * 3, [13, 14, 15])
    assert numbers == [0, 1, 11, 12, *range(2, 11), 20, 21, 22]
    assert mask[0] == [0] * 14 + [-INF] * 2
    # Each key is the position of its token: it shows where the position went.
    cache.remove(0, 12)
    assert seen(cache, 0, 12) == sorted([*range(12), 0.5])


# A.1 defrag (beat): runs of any length move as one.
def test_defragmenting_keeps_the_order_of_long_runs() -> None:
    cache = made(CausalCache(), max_batch=16)
    forward(cache, range(100, 106), [1] * 6, range(6))
    fill(cache, 9, step=9)
    cache.remove(1, 1, 6)
    numbers, _ = forward(cache, range(9, 15), [0] * 6, range(9, 15))
    assert numbers == [4, 5, 6, 7, 8, 0, 1, 2, 3, *range(9, 15)]


# A.1 defrag: ranges and the window are recomputed, V follows in both layouts, in all layers.
@pytest.mark.parametrize("permuted_v", [False, True])
def test_defragmenting_moves_every_layer(permuted_v: bool) -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(permuted_v=permuted_v))
    made(cache, capacity=8)
    random = np.random.default_rng(3)
    k, v = random.normal(size=(2, 8, 2, 4)), random.normal(size=(2, 8, 2, 3))

    def put(tokens: list[int], sequences: list[int], positions: list[int]) -> None:
        cache.start_forward(positions, sequences)
        for layer in (0, 1):
            cache.set_layer(layer)
            cache.put(k[layer, tokens], v[layer, tokens])

    put([0, 1, 2, 3, 4, 5], [1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 2, 2])
    cache.remove(1, 0)
    put([6, 7], [0, 0], [3, 4])
    put([0, 2, 4], [2, 2, 2], [0, 1, 2])
    cache.start_forward([5], [0], reserve=True)
    for layer in (0, 1):
        cache.set_layer(layer)
        key, value, mask = cache.get()
        if permuted_v:
            value = value.transpose(2, 0, 1)
        mine = mask[0] == 0
        order = np.argsort([np.abs(k[layer] - row).sum((1, 2)).argmin() for row in key[mine]])
        np.testing.assert_allclose(key[mine][order], k[layer, [1, 3, 5, 6, 7]], rtol=1e-6)
        np.testing.assert_allclose(value[mine][order], v[layer, [1, 3, 5, 6, 7]], rtol=1e-6)


# A.1 Remove and attention: after a shift, attention equals that over the shorter history.
def test_attention_after_a_shift_equals_attention_over_the_rest() -> None:
    random = np.random.default_rng(11)
    k, v = random.normal(size=(9, 2, 6)), random.normal(size=(9, 2, 4))
    cache = CausalCache(rope_shift)
    cache.init(np.float64, 1, 16, 3)
    for first in range(0, 9, 3):
        rows = slice(first, first + 3)
        cache.start_forward(range(9)[rows], [0] * 3)
        cache.put(rope(k[rows], range(9)[rows]), v[rows])
    cache.remove(0, 2, 5)
    rest = [0, 1, 5, 6, 7, 8, 8]
    q = rope(random.normal(size=(1, 2, 6)), [6])
    cache.start_forward([6], [0])
    cache.put(rope(k[8:], [6]), v[8:])
    key, value, mask = cache.get()
    np.testing.assert_allclose(
        attend(q, key, value, mask), attend(q, rope(k[rest], range(7)), v[rest]), rtol=1e-10
    )
