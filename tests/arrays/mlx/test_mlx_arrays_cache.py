"""Caches of recurrent layers by example: slots, rows, padding, states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlx_support import kv, snapshot

from pykvcache.arrays import ArraysCache, MambaCache, from_state
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, NotSupported


def rows(*numbers: float) -> Any:
    return np.array(numbers, np.float32)[:, None] * np.ones((1, 3), np.float32)


def first(cache: Any, slot: int = 0) -> list[float]:
    found: list[float] = cache[slot][:, 0].tolist()
    return found


def test_slots_are_set_and_read_by_index() -> None:
    cache, array = ArraysCache(2), rows(1, 2)
    assert (len(cache), cache[0], cache.is_empty()) == (2, None, True)
    cache[1] = array
    array[:] = 9  # a given array is copied
    assert first(cache, 1) == [1, 2]
    assert (cache.is_empty(), cache.nbytes, cache.offset, cache.size()) == (False, 24, 0, 0)
    cache[1][:] = 5  # the stored one may be written to
    assert first(cache, 1) == [5, 5]
    for slot, error in ((2, CacheValueError), (-1, CacheValueError), (0.0, TypeError)):
        with pytest.raises(error):
            cache[slot]  # type: ignore[index]
        with pytest.raises(error):
            cache[slot] = array  # type: ignore[index]
    for strange in ([1, 2], np.zeros(2, "V4"), np.zeros(2, [("a", "f4")]), np.array(["a"])):
        with pytest.raises(CacheDTypeError):
            cache[0] = strange  # type: ignore[assignment]
    with pytest.raises(CacheValueError):
        cache[0] = np.array(1.0)
    for size in (-1, 2**17):
        with pytest.raises(CacheValueError):
            ArraysCache(size)
    with pytest.raises(NotSupported):
        cache.update(*kv([1]))
    assert len(MambaCache([1])) == 2


def test_the_batch_size_is_that_of_the_first_array_or_count() -> None:
    cache = ArraysCache(2)
    assert cache.batch_size == 1
    cache.prepare(lengths=[4, 5, 6])
    assert cache.batch_size == 3
    cache = ArraysCache(2, left_padding=[0, 1])
    assert cache.batch_size == 2
    cache[1] = rows(1, 2, 3, 4)
    assert cache.batch_size == 4


def test_filter_keeps_rows_of_arrays_and_counts() -> None:
    cache = ArraysCache(2, left_padding=[1, 2, 3])
    cache[0] = rows(1, 2, 3)
    cache.prepare(lengths=[4, 5, 6])
    cache.filter([2, 0])
    assert (first(cache), cache[1]) == ([3, 1], None)
    assert cache.left_padding is not None
    assert cache.lengths is not None
    assert (cache.left_padding.tolist(), cache.lengths.tolist()) == ([3, 1], [6, 4])
    before = snapshot(cache)
    for bad in ([2], [-1]):
        with pytest.raises(CacheValueError):
            cache.filter(bad)
    assert snapshot(cache) == before
    alone = cache.extract(1)
    assert (type(alone), first(alone), alone[1], alone.left_padding) == (
        ArraysCache,
        [1],
        None,
        None,
    )
    assert not np.shares_memory(alone[0], cache[0])  # type: ignore[arg-type]
    for call in (lambda: cache.extract(2), lambda: cache.prepare(left_padding=[1])):
        with pytest.raises(CacheValueError):
            call()
    new = ArraysCache(2)  # nothing says how many rows it has
    new.filter([5, 2])
    assert new.extract(7).is_empty()
    new.prepare(lengths=[1, 2])
    with pytest.raises(CacheValueError):
        new.prepare(left_padding=[1])


def test_extend_puts_zeros_for_a_missing_side() -> None:
    a, b = ArraysCache(3), ArraysCache(3, left_padding=[5])
    a[0], a[1] = rows(1, 2), rows(3, 4)
    b[0] = rows(9)
    a.extend(b)
    assert (first(a, 0), first(a, 1), a[2]) == ([1, 2, 9], [3, 4, 0], None)
    assert a.left_padding is not None
    assert (a.left_padding.tolist(), a.lengths) == ([0, 0, 5], None)
    before = snapshot(a)
    wrong, double = ArraysCache(3), ArraysCache(3)
    wrong[1] = np.ones((1, 4), np.float32)
    double[1] = np.ones((1, 3))
    for other, error in (
        (wrong, CacheValueError),
        (ArraysCache(2), CacheValueError),
        (double, CacheDTypeError),
        (None, CacheDTypeError),
    ):
        with pytest.raises(error):
            a.extend(other)  # type: ignore[arg-type]
    assert snapshot(a) == before


def test_prepare_advance_and_finalize_count_the_coming_input() -> None:
    cache = ArraysCache(1, left_padding=[0, 3])
    cache.prepare(lengths=[7, 4], right_padding=[0, 3])
    assert cache.make_mask(5).astype(int).tolist() == [[1] * 5, [0, 0, 0, 1, 0]]  # type: ignore
    cache.advance(2)
    assert cache.left_padding is not None
    assert cache.lengths is not None
    assert (cache.lengths.tolist(), cache.left_padding.tolist()) == ([5, 2], [-2, 1])
    cache.finalize()
    assert (cache.lengths, cache.left_padding, cache.make_mask(3)) == (None, None, None)
    cache.prepare(lengths=[3, 1])
    mask: Any = cache.make_mask(3)
    assert mask.astype(int).tolist() == [[1, 1, 1], [1, 0, 0]]
    cache = ArraysCache(1, left_padding=[0, 2])
    cache.prepare(left_padding=[1, 0])
    assert cache.left_padding is not None
    assert cache.left_padding.tolist() == [1, 2]
    cache[0] = rows(1, 2)
    with pytest.raises(CacheValueError):
        cache.prepare(left_padding=[1, 1])
    for call in (cache.make_mask, cache.advance):
        with pytest.raises(CacheValueError):
            call(2**64)


def test_merge_stacks_arrays_and_padding() -> None:
    a, b, c = MambaCache(), MambaCache([2]), MambaCache()
    a[0], c[0] = rows(1), rows(3)
    merged = MambaCache.merge(iter([a, b, c]))
    assert (first(merged), merged[1]) == ([1, 0, 3], None)
    assert merged.left_padding is not None
    assert merged.left_padding.tolist() == [0, 2, 0]  # still to come; mlx-lm forgets it
    b.advance(2)
    assert MambaCache.merge([a, b, c]).left_padding is None
    empty = ArraysCache.merge([ArraysCache(2), ArraysCache(2)])
    assert empty.left_padding is not None
    assert (empty.is_empty(), empty.left_padding.tolist(), empty.batch_size) == (True, [0, 0], 2)
    c.prepare(lengths=[3])
    for call, match in (
        (lambda: MambaCache.merge([a, c]), "finalize"),
        (lambda: a.extend(c), "lengths"),
        (lambda: c.extend(a), "lengths"),
    ):
        with pytest.raises(CacheOrderError, match=match):
            call()
    a[0] = rows(1, 2)
    for bad in ([], [a, MambaCache()], [ArraysCache(1), ArraysCache(2)], [MambaCache([0, 0])]):
        with pytest.raises(CacheValueError):
            ArraysCache.merge(bad)  # type: ignore[arg-type]


def run(cache: ArraysCache, tokens: Any) -> None:
    """A recurrent layer: each token halves the state and is added; columns in chunks of 2."""
    for start in range(0, tokens.shape[1], 2):
        part = tokens[:, start : start + 2]
        mask = cache.make_mask(part.shape[1])
        state = np.zeros((len(part), 1)) if cache[0] is None else cache[0]
        for column in range(part.shape[1]):
            new = state / 2 + part[:, column, None]
            state = new if mask is None else np.where(mask[:, column, None], new, state)
        cache[0] = state
        cache.advance(part.shape[1])


@pytest.mark.parametrize("seed", range(10))
def test_padding_never_reaches_the_state(seed: int) -> None:
    """Rows of a batch, padded left or right, end in the state that each reaches alone."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, size=3)
    prompts = [[rng.integers(1, 9, size=n).astype(float) for n in lengths[::d]] for d in (1, -1)]
    columns = int(lengths.max())
    padding = columns - lengths

    def stacked(rows: Any, left: bool) -> Any:
        pads = [(columns - len(r), 0) if left else (0, columns - len(r)) for r in rows]
        padded = [np.pad(r, p, constant_values=99) for r, p in zip(rows, pads, strict=True)]
        return np.stack(padded)

    def alone(*parts: Any) -> float:
        cache = ArraysCache(1)
        run(cache, np.concatenate(parts)[None])
        return float(cache[0].item())  # type: ignore[union-attr]

    right = ArraysCache.merge([ArraysCache(1) for _ in range(3)])
    right.prepare(lengths=lengths, right_padding=padding)
    left = ArraysCache(1, left_padding=padding)
    for cache in (left, right):
        run(cache, stacked(prompts[0], cache is left))
        cache.finalize()
        assert cache[0] is not None
        assert cache[0].ravel().tolist() == [alone(prompt) for prompt in prompts[0]]
    # A second prompt on top of the first, padded on the right again.
    right.prepare(lengths=lengths[::-1].copy(), right_padding=padding[::-1].copy())
    run(right, stacked(prompts[1], False))
    both = [alone(*parts) for parts in zip(*prompts, strict=True)]
    assert right[0] is not None
    assert right[0].ravel().tolist() == both


@pytest.mark.parametrize("filled", [(), (0,), (1,), (0, 1)])
def test_slots_and_counts_survive_saving(filled: tuple[int, ...]) -> None:
    cache = ArraysCache(2, left_padding=[1, 0])
    cache.prepare(lengths=[3, 4])
    cache.advance(2)
    for slot in filled:
        cache[slot] = rows(slot, 7)
    again: Any = from_state("ArraysCache", cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)
    assert len(again) == 2
    assert (again.left_padding.tolist(), again.lengths.tolist()) == ([-1, -2], [1, 2])
    cache.finalize()
    assert (cache.meta_state == ()) is (len(filled) == 2)  # as in mlx-lm where it can be
    cache.state = ()
    assert (len(cache), cache.is_empty()) == (2, True)


def test_slots_of_different_rows_are_refused() -> None:
    cache = ArraysCache(2)
    cache[0], cache[1] = rows(1), rows(1, 2)
    before = snapshot(cache)
    for call in (
        lambda: cache.filter([0]),
        lambda: cache.extract(0),
        lambda: cache.extend(ArraysCache(2)),
    ):
        with pytest.raises(CacheValueError, match="rows"):
            call()
    assert snapshot(cache) == before
