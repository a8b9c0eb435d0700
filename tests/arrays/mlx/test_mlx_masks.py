import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_reference import kv

from pykvcache.arrays import KVCache, RotatingKVCache, create_attention_mask, create_causal_mask
from pykvcache.errors import CacheDTypeError, CacheValueError


@given(
    n=st.integers(1, 12),
    offset=st.integers(0, 12),
    window=st.none() | st.integers(1, 30),
    right=st.none() | st.lists(st.integers(0, 9), min_size=2, max_size=2),
    left=st.none() | st.lists(st.integers(0, 9), min_size=2, max_size=2),
)
def test_causal_mask_is_what_the_rule_says(n, offset, window, right, left):
    """create_causal_mask(N, offset, window, right_padding, left_padding), boolean."""
    mask = create_causal_mask(n, offset, window, right, left)
    batched = right is not None or left is not None
    assert mask.dtype == np.bool_
    assert mask.shape == ((2, 1, n, offset + n) if batched else (n, offset + n))
    for row in range(2):
        for i in range(n):
            for j in range(offset + n):
                p = offset + i
                seen = j <= p and (window is None or p - j < window)
                seen = seen and (right is None or j < offset + n - right[row])
                seen = seen and (left is None or j >= left[row])
                assert (mask[row, 0, i, j] if batched else mask[i, j]) == seen


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": 0}, CacheValueError),
        ({"n": 2, "offset": -1}, CacheValueError),
        ({"n": 2, "window_size": 0}, CacheValueError),
        ({"n": 2.0}, TypeError),
        ({"n": True}, TypeError),
        ({"n": 2, "left_padding": [[1]]}, CacheValueError),
        ({"n": 2, "left_padding": [1.5]}, CacheValueError),
    ],
)
def test_causal_mask_refuses(arguments, error):
    with pytest.raises(error):
        create_causal_mask(**arguments)


def test_attention_mask_without_a_cache():
    """create_attention_mask(h, cache, window, return_array)."""
    h = np.zeros((1, 4, 16))
    assert create_attention_mask(h) == "causal"
    assert create_attention_mask(h[:, :1]) is None
    assert create_attention_mask(h, window_size=4) == "causal"
    assert np.array_equal(create_attention_mask(h, window_size=2), create_causal_mask(4, 0, 2))
    assert np.array_equal(create_attention_mask(h, return_array=True), create_causal_mask(4))
    with pytest.raises(CacheValueError):
        create_attention_mask(np.zeros(3))


def test_attention_mask_asks_the_cache():
    """create_attention_mask: with a cache, the cache decides."""
    cache = KVCache()
    cache.update(*kv([1, 2, 3]))
    h = np.zeros((1, 2, 16))
    assert create_attention_mask(h, cache) == "causal"
    got = create_attention_mask(h, cache, return_array=True)
    assert np.array_equal(got, create_causal_mask(2, 3))
    ring = RotatingKVCache(4)
    assert create_attention_mask(h, ring, window_size=1).tolist() == [[True, False], [False, True]]


def test_mask_mode_is_none_causal_or_array():
    """MaskMode {None, Causal, Array}."""
    cache = KVCache()
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) == "causal"
    assert cache.make_mask(2, return_array=True).dtype == np.bool_


def test_padding_must_be_integers():
    from pykvcache.arrays import BatchKVCache

    with pytest.raises(CacheDTypeError):
        BatchKVCache([0.5])
    with pytest.raises(CacheDTypeError):
        BatchKVCache([True])
    with pytest.raises(CacheValueError):
        BatchKVCache([-1])
