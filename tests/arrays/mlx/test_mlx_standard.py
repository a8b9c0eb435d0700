import copy
import pickle

import numpy as np
import pytest
from mlx_reference import HEADS, K_DIM, V_DIM, ids, kv, snapshot, stored

from pykvcache.arrays import BatchKVCache, ConcatenateKVCache, KVCache, QuantizedKVCache
from pykvcache.errors import CacheDTypeError, CacheValueError, KvCacheError

BOTH = [KVCache, ConcatenateKVCache]


@pytest.mark.parametrize("cls", BOTH)
def test_kv_cache_update_returns_the_whole_history(cls):
    """KVCache: update/fetch."""
    cache = cls()
    assert ids(cache.update(*kv([1, 2, 3]))[1]) == [1, 2, 3]
    keys, values = cache.update(*kv([4]))
    assert ids(values) == [1, 2, 3, 4]
    assert np.array_equal(keys, kv([1, 2, 3, 4])[0])
    assert np.array_equal(values, kv([1, 2, 3, 4])[1])
    assert cache.offset == cache.size() == 4


def test_growth_is_by_steps_of_256():
    """Growth step 256 everywhere: capacities are multiples of it, at least ceil(n/256)*256."""
    token = HEADS * (K_DIM + V_DIM) * 4
    cache = KVCache()
    cache.update(*kv([1]))
    assert cache.nbytes == 256 * token
    cache.update(*kv(list(range(255))))
    assert cache.nbytes == 256 * token
    cache.update(*kv([1]))
    assert cache.nbytes == 512 * token
    big = KVCache()
    big.update(*kv(list(range(257))))
    assert big.nbytes == 512 * token


def test_growth_cuts_a_partly_used_tail():
    """Growth: what was trimmed is overwritten, not carried along."""
    cache = KVCache()
    cache.update(*kv(list(range(250))))
    cache.trim(50)
    cache.update(*kv(list(range(1000, 1100))))
    assert stored(cache) == [*range(200), *range(1000, 1100)]
    assert cache.offset == 300


def test_growth_copies_each_token_a_few_times_only():
    """Steady-state update costs O(1) amortised copies: few reallocations on the way to 8,192."""
    cache = KVCache()
    key, value = np.ones((1, 1, 1, 4), np.float32), np.ones((1, 1, 1, 4), np.float32)
    copied, capacity = 0, 0
    for n in range(8192):
        cache.update(key, value)
        if cache.nbytes != capacity:
            copied, capacity = copied + n, cache.nbytes
    assert copied < 3 * 8192


def test_update_returns_views():
    """Fast: update returns views, not copies."""
    cache = KVCache()
    first, _ = cache.update(*kv([1, 2]))
    second, _ = cache.update(*kv([3]))
    assert np.shares_memory(first, second)


@pytest.mark.parametrize("cls", BOTH)
def test_state_has_the_exact_length_and_sets_the_offset(cls):
    """KVCache: state = exact length, set_state sets offset from shape."""
    cache = cls()
    assert cache.state == ()
    assert cache.meta_state == ()
    cache.update(*kv([1, 2, 3]))
    assert cache.state[0].shape == (1, HEADS, 3, K_DIM)
    assert cache.state[1].shape == (1, HEADS, 3, V_DIM)
    other = cls()
    other.state = cache.state
    assert other.offset == 3
    assert ids(other.update(*kv([4]))[1]) == [1, 2, 3, 4]
    other.state = ()
    assert other.is_empty()
    assert other.offset == 0


@pytest.mark.parametrize("cls", BOTH)
def test_trim_drops_at_most_what_there_is(cls):
    """KVCache: trim = min(offset, n)."""
    cache = cls()
    cache.update(*kv([1, 2, 3]))
    assert cache.is_trimmable()
    assert cache.trim(2) == 2
    assert stored(cache) == [1]
    assert cache.trim(9) == 1
    assert cache.is_empty()
    assert cache.state == ()
    assert cache.offset == 0
    assert ids(cache.update(*kv([7]))[1]) == [7]


def test_concatenate_cache_trim_really_cuts():
    """ConcatenateKVCache: after trim the next update follows the trimmed tokens (mlx-lm flaw)."""
    cache = ConcatenateKVCache()
    cache.update(*kv([1, 2, 3, 4]))
    cache.trim(2)
    assert ids(cache.update(*kv([9]))[1]) == [1, 2, 9]
    assert cache.offset == 3


def test_concatenate_cache_has_no_spare_room():
    """ConcatenateKVCache: concatenation only."""
    cache = ConcatenateKVCache()
    cache.update(*kv([1, 2, 3]))
    cache.update(*kv([4]))
    assert cache.nbytes == 4 * HEADS * (K_DIM + V_DIM) * 4


@pytest.mark.parametrize("bits", [4, 8])
def test_to_quantized_holds_the_same_tokens(bits):
    """KVCache: to_quantized(group 64, bits 4)."""
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 1, 2, 5, 64)).astype(np.float32)
    cache = KVCache()
    cache.update(keys, values)
    assert (cache.to_quantized().group_size, cache.to_quantized().bits) == (64, 4)
    quantized = cache.to_quantized(group_size=32, bits=bits)
    assert isinstance(quantized, QuantizedKVCache)
    assert quantized.offset == 5
    assert quantized.bits == bits
    one = rng.standard_normal((1, 2, 1, 64)).astype(np.float32)
    got, _ = quantized.update(one, one)
    assert np.abs(got[:, :, :5] - keys).max() < 6 / (2**bits - 1) / 2
    assert KVCache().to_quantized().is_empty()


def test_kv_cache_merge_makes_a_batch():
    """KVCache: merge -> BatchKVCache."""
    a, b = KVCache(), KVCache()
    a.update(*kv([1, 2, 3]))
    b.update(*kv([4]))
    batch = KVCache.merge([a, b])
    assert isinstance(batch, BatchKVCache)
    assert batch.left_padding.tolist() == [0, 2]


def test_kv_cache_size_empty_and_nbytes():
    """KVCache: size, empty, nbytes (allocated, not used)."""
    cache = KVCache()
    assert cache.is_empty()
    assert cache.size() == 0
    assert cache.nbytes == 0
    cache.update(*kv([1]))
    assert not cache.is_empty()
    assert cache.size() == 1
    assert cache.nbytes > sum(a.nbytes for a in cache.state)


def test_kv_cache_masks():
    """KVCache make_mask: None for one token, "causal", or an array."""
    cache = KVCache()
    cache.update(*kv([1, 2, 3]))
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None
    assert cache.make_mask(2) == "causal"
    expected = [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert cache.make_mask(2, return_array=True).astype(int).tolist() == expected
    windowed = cache.make_mask(2, window_size=2).astype(int).tolist()
    assert windowed == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert cache.make_mask(1, window_size=2).astype(int).tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("cls", BOTH)
def test_nothing_is_shared_with_given_arrays_or_copies(cls):
    """A cache never shares memory with arrays it was given or with its own copies."""
    keys, values = kv([1, 2, 3])
    cache = cls()
    cache.update(keys, values)
    twin, deep = cache.copy(), copy.deepcopy(cache)
    loaded = cls()
    loaded.state = cache.state
    before = snapshot(cache)
    keys[:] = values[:] = 99
    for other in (twin, deep, loaded):
        other.update(*kv([5]))
        for a, b in zip(cache.state, other.state, strict=True):
            assert not np.shares_memory(a, b)
        assert stored(other) == [1, 2, 3, 5]
    assert snapshot(cache) == before


def test_pickled_cache_goes_on():
    cache = KVCache()
    cache.update(*kv([1, 2]))
    again = pickle.loads(pickle.dumps(cache))
    assert ids(again.update(*kv([3]))[1]) == [1, 2, 3]
    assert ids(again.update(*kv([4]))[1]) == [1, 2, 3, 4]


K1, V1 = kv([5])


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        (K1[0], V1, CacheValueError),
        (K1, V1[:, :, :0], CacheValueError),
        (K1[:, :, :0], V1[:, :, :0], CacheValueError),
        (K1[:, :1], V1[:, :1], CacheValueError),
        (K1[..., :3], V1, CacheValueError),
        (K1, V1[..., :3], CacheValueError),
        (np.concatenate([K1, K1]), np.concatenate([V1, V1]), CacheValueError),
        (K1.astype(np.float64), V1, CacheDTypeError),
        (K1, V1.astype(np.float16), CacheDTypeError),
        (K1.tolist(), V1, CacheDTypeError),
        (K1, None, CacheDTypeError),
        (K1.astype(object), V1, CacheDTypeError),
        (K1.view("V4"), V1, CacheDTypeError),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(cls, keys, values, error):
    """Wrong shapes and dtypes are typed errors that leave the cache as it was."""
    cache = cls()
    cache.update(*kv([1, 2]))
    before = snapshot(cache)
    with pytest.raises(error) as caught:
        cache.update(keys, values)
    assert isinstance(caught.value, KvCacheError)
    assert snapshot(cache) == before


def test_an_emptied_cache_takes_another_layout():
    cache = KVCache()
    cache.update(*kv([1, 2]))
    cache.trim(2)
    wide = np.ones((3, 1, 2, 5))
    keys, values = cache.update(wide, wide)
    assert keys.shape == values.shape == (3, 1, 2, 5)
    assert keys.dtype == np.float64


@pytest.mark.parametrize("n", [True, 1.0, "1", None, np.float32(2)])
def test_counts_must_be_integers(n):
    """A bool or a float is no integer."""
    cache = KVCache()
    cache.update(*kv([1, 2]))
    with pytest.raises(TypeError):
        cache.trim(n)
    with pytest.raises(TypeError):
        cache.make_mask(n)
    assert cache.trim(np.int8(1)) == 1


def test_negative_trim_is_an_error():
    """Trim: a negative n is an error."""
    cache = KVCache()
    cache.update(*kv([1, 2]))
    with pytest.raises(CacheValueError):
        cache.trim(-1)
    assert stored(cache) == [1, 2]


@pytest.mark.parametrize("dtype", ["V4", [("a", "f4")], "O", "S4", "M8[s]"])
@pytest.mark.parametrize("cls", BOTH)
def test_an_empty_cache_takes_numbers_only(cls, dtype):
    """Wrong dtypes are typed errors: raw bytes, records, objects, text and times."""
    cache, strange = cls(), np.zeros((1, 1, 1, 4), dtype)
    with pytest.raises(CacheDTypeError):
        cache.update(strange, strange)
    assert cache.is_empty()
