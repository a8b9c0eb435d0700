import numpy as np
import pytest
from mlx_reference import kv, snapshot

from pykvcache.arrays import ArraysCache, MambaCache, from_state
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, NotSupported


def rows(*numbers):
    return np.array(numbers, np.float32)[:, None] * np.ones((1, 3), np.float32)


def first(cache, slot=0):
    return cache[slot][:, 0].tolist()


def test_slots_are_set_and_read_by_index():
    """ArraysCache: slots by index; a given array is copied."""
    cache = ArraysCache(2)
    assert len(cache) == 2
    assert cache[0] is None
    assert cache.is_empty()
    array = rows(1, 2)
    cache[1] = array
    array[:] = 9
    assert first(cache, 1) == [1, 2]
    assert not cache.is_empty()
    assert cache.nbytes == 24
    assert cache.offset == 0
    assert cache.size() == 0
    for slot, error in ((2, CacheValueError), (-1, CacheValueError), (0.0, TypeError)):
        with pytest.raises(error):
            cache[slot]
    for strange in ([1, 2], np.zeros(2, "V4"), np.zeros(2, [("a", "f4")]), np.array(["a"])):
        with pytest.raises(CacheDTypeError):
            cache[0] = strange
    with pytest.raises(CacheValueError):
        cache[0] = np.array(1.0)


def test_batch_size_rule():
    """ArraysCache: batch_size is the first array's, else left_padding, else lengths, else 1."""
    cache = ArraysCache(2)
    assert cache.batch_size == 1
    cache.prepare(lengths=[4, 5, 6])
    assert cache.batch_size == 3
    assert ArraysCache(2, left_padding=[0, 1]).batch_size == 2
    cache = ArraysCache(2, left_padding=[0, 1])
    cache[1] = rows(1, 2, 3, 4)
    assert cache.batch_size == 4


def test_arrays_filter():
    """ArraysCache: filter keeps rows of arrays, left_padding and lengths."""
    cache = ArraysCache(2, left_padding=[1, 2, 3])
    cache[0] = rows(1, 2, 3)
    cache.prepare(lengths=[4, 5, 6])
    cache.filter([2, 0])
    assert first(cache) == [3, 1]
    assert cache[1] is None
    assert cache.left_padding.tolist() == [3, 1]
    assert cache.lengths.tolist() == [6, 4]
    before = snapshot(cache)
    for bad in ([2], [-1]):
        with pytest.raises(CacheValueError):
            cache.filter(bad)
    assert snapshot(cache) == before


def test_arrays_extend_puts_zeros_for_a_missing_side():
    """ArraysCache: extend (zeros for a missing side)."""
    a, b = ArraysCache(3), ArraysCache(3, left_padding=[5])
    a[0], a[1] = rows(1, 2), rows(3, 4)
    b[0] = rows(9)
    a.extend(b)
    assert first(a, 0) == [1, 2, 9]
    assert first(a, 1) == [3, 4, 0]
    assert a[2] is None
    assert a.left_padding.tolist() == [0, 0, 5]
    assert a.lengths is None
    before = snapshot(a)
    wrong = ArraysCache(3)
    wrong[1] = np.ones((1, 4), np.float32)
    for other in (wrong, ArraysCache(2)):
        with pytest.raises(CacheValueError):
            a.extend(other)
    with pytest.raises(CacheDTypeError):
        a.extend(None)
    assert snapshot(a) == before


def test_arrays_extract():
    """ArraysCache: extract one row; empty slots stay empty (mlx-lm fails)."""
    cache = MambaCache(left_padding=[0, 1])
    cache[0] = rows(1, 2)
    alone = cache.extract(1)
    assert type(alone) is MambaCache
    assert first(alone) == [2]
    assert alone[1] is None
    assert alone.left_padding is None
    assert not np.shares_memory(alone[0], cache[0])
    with pytest.raises(CacheValueError):
        cache.extract(2)


def test_arrays_prepare_advance_and_finalize():
    """ArraysCache: prepare(lengths), advance(N) lowers lengths and left_padding, finalize."""
    cache = ArraysCache(1, left_padding=[0, 3])
    cache.prepare(lengths=[7, 4], right_padding=[0, 3])
    cache.advance(2)
    assert cache.lengths.tolist() == [5, 2]
    assert cache.left_padding.tolist() == [-2, 1]
    cache.finalize()
    assert cache.lengths is None
    assert cache.left_padding is None
    cache.prepare(left_padding=[1, 1])
    cache.prepare(left_padding=[1, 0])
    assert cache.left_padding.tolist() == [2, 1]
    cache[0] = rows(1, 2)
    with pytest.raises(CacheValueError):
        cache.prepare(left_padding=[1, 1])


def test_arrays_mask():
    """ArraysCache make_mask: pos >= left_padding and pos < lengths, where set; else None."""
    cache = ArraysCache(1, left_padding=[0, 2])
    assert cache.make_mask(3).astype(int).tolist() == [[1, 1, 1], [0, 0, 1]]
    cache.prepare(lengths=[1, 3])
    assert cache.make_mask(3).astype(int).tolist() == [[1, 0, 0], [0, 0, 1]]
    cache.finalize()
    assert cache.make_mask(3) is None
    cache.prepare(lengths=[3, 1])
    assert cache.make_mask(3).astype(int).tolist() == [[1, 1, 1], [1, 0, 0]]


def test_arrays_merge():
    """ArraysCache: merge; all empty -> left_padding zeros; a slot that nobody filled stays."""
    a, b, c = MambaCache(), MambaCache(), MambaCache()
    a[0], c[0] = rows(1), rows(3)
    merged = MambaCache.merge([a, b, c])
    assert first(merged) == [1, 0, 3]
    assert merged[1] is None
    assert merged.left_padding is None
    empty = ArraysCache.merge([ArraysCache(2), ArraysCache(2)])
    assert empty.is_empty()
    assert empty.left_padding.tolist() == [0, 0]
    assert empty.batch_size == 2
    a[0] = rows(1, 2)
    for bad in ([], [a, b], [ArraysCache(1), ArraysCache(2)]):
        with pytest.raises(CacheValueError):
            ArraysCache.merge(bad)


def test_a_merged_batch_knows_both_ends():
    """merge sets left_padding; lengths that follow must count all the same."""
    cache = ArraysCache.merge([ArraysCache(1), ArraysCache(1)])
    cache.prepare(lengths=[2, 4], right_padding=[2, 0])
    assert cache.make_mask(4).astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    cache.advance(3)
    assert cache.make_mask(1).tolist() == [[False], [True]]


def run(cache, tokens):
    """A recurrent layer: each token halves the state and is added; columns in chunks of 2."""
    for first in range(0, tokens.shape[1], 2):
        part = tokens[:, first : first + 2]
        mask = cache.make_mask(part.shape[1])
        state = np.zeros((len(part), 1)) if cache[0] is None else cache[0]
        for column in range(part.shape[1]):
            new = state / 2 + part[:, column, None]
            state = new if mask is None else np.where(mask[:, column, None], new, state)
        cache[0] = state
        cache.advance(part.shape[1])


@pytest.mark.parametrize("seed", range(20))
def test_padding_never_reaches_the_state(seed):
    """What rows of a batch end in, padded left or right, is what each gives alone."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, size=3)
    prompts = [rng.integers(1, 9, size=n).astype(float) for n in lengths]
    alone = []
    for prompt in prompts:
        cache = ArraysCache(1)
        run(cache, prompt[None])
        alone.append(cache[0].item())
    columns = int(lengths.max())
    padding = columns - lengths
    right = ArraysCache.merge([ArraysCache(1) for _ in prompts])
    right.prepare(lengths=lengths, right_padding=padding)
    run(
        right,
        np.stack(
            [np.pad(p, (0, n), constant_values=99) for p, n in zip(prompts, padding, strict=True)]
        ),
    )
    left = ArraysCache(1, left_padding=padding)
    run(
        left,
        np.stack(
            [np.pad(p, (n, 0), constant_values=99) for p, n in zip(prompts, padding, strict=True)]
        ),
    )
    for cache in (left, right):
        cache.finalize()
        assert cache[0].ravel().tolist() == alone
    # A second prompt on top of the first, padded on the right again.
    right.prepare(lengths=lengths[::-1].copy(), right_padding=padding[::-1].copy())
    more = [rng.integers(1, 9, size=n).astype(float) for n in lengths[::-1]]
    run(right, np.stack([np.pad(p, (0, columns - len(p)), constant_values=99) for p in more]))
    for row, (prompt, tokens) in enumerate(zip(prompts, more, strict=True)):
        cache = ArraysCache(1)
        run(cache, np.concatenate([prompt, tokens])[None])
        assert right[0][row].item() == cache[0].item()


def test_merge_keeps_padding_to_come_and_refuses_lengths():
    """What is still to come is not forgotten (in mlx-lm it is)."""
    a, b = ArraysCache(1, left_padding=[2]), ArraysCache(1)
    assert ArraysCache.merge([a, b]).left_padding.tolist() == [2, 0]
    a[0], b[0] = rows(1), rows(2)
    assert ArraysCache.merge([a, b]).left_padding.tolist() == [2, 0]
    a.advance(2)
    assert ArraysCache.merge([a, b]).left_padding is None
    b.prepare(lengths=[3])
    with pytest.raises(CacheOrderError, match="finalize"):
        ArraysCache.merge([a, b])
    with pytest.raises(CacheOrderError, match="lengths"):
        a.extend(b)
    with pytest.raises(CacheOrderError, match="lengths"):
        b.extend(a)
    assert first(a) == [1]
    with pytest.raises(CacheValueError):
        ArraysCache.merge([ArraysCache(1, left_padding=[0, 0])])


def test_a_cache_that_has_no_rows_yet_takes_any():
    """Nothing says how many rows there are before the first array."""
    cache = ArraysCache(2)
    cache.filter([5, 2])
    assert cache.extract(7).is_empty()
    for bad in (lambda: cache.filter([-1]), lambda: cache.extract(-1)):
        with pytest.raises(CacheValueError):
            bad()
    cache.prepare(lengths=[1, 2])
    with pytest.raises(CacheValueError):
        cache.filter([2])


def test_mamba_cache_has_two_slots():
    """Arrays / Mamba flag: MambaCache(left_padding=None) has two slots."""
    cache = MambaCache([1])
    assert len(cache) == 2
    assert cache.left_padding.tolist() == [1]
    with pytest.raises(CacheValueError):
        cache.state = (rows(1), rows(2), rows(3))
    assert isinstance(from_state("MambaCache", (), ()), MambaCache)
    assert type(from_state("ArraysCache", (rows(1),), ())) is ArraysCache


@pytest.mark.parametrize("filled", [(), (0,), (1,), (0, 1)])
def test_arrays_state_round_trip(filled):
    """ArraysCache: slots, left_padding and lengths survive from_state."""
    cache = ArraysCache(2, left_padding=[1, 0])
    cache.prepare(lengths=[3, 4])
    cache.advance(2)
    for slot in filled:
        cache[slot] = rows(slot, 7)
    again = from_state("ArraysCache", cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)
    assert len(again) == 2
    assert again.left_padding.tolist() == [-1, -2]
    assert again.lengths.tolist() == [1, 2]


def test_arrays_state_is_that_of_mlx_lm_where_it_can_be():
    cache = ArraysCache(2)
    assert cache.state == ()
    cache[0], cache[1] = rows(1), rows(2)
    assert cache.meta_state == ()
    assert len(cache.state) == 2
    cache.state = ()
    assert len(cache) == 2
    assert cache.is_empty()


@pytest.mark.parametrize(
    "meta",
    [
        ("1", "", ""),
        ("x", "", ""),
        ("2", "a", ""),
        ("2", ""),
        ("99999999", "", ""),
        (2, "", ""),
    ],
)
def test_arrays_meta_must_fit(meta):
    with pytest.raises(CacheValueError):
        from_state("ArraysCache", (rows(1), None), meta)


def test_recurrent_cache_has_no_keys_and_does_not_trim():
    cache = ArraysCache(1)
    with pytest.raises(NotSupported):
        cache.update(*kv([1]))
    cache[0] = rows(1)
    assert not cache.is_trimmable()
    assert cache.trim(1) == 0
    twin = cache.copy()
    twin[0][:] = 5
    assert first(cache) == [1]


def test_rows_of_different_number_are_refused():
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
