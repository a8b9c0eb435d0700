"""Boolean masks against their rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_support import filled

from pykvcache.arrays import KVCache, RotatingKVCache, create_attention_mask, create_causal_mask
from pykvcache.errors import CacheValueError

PADDING = st.none() | st.lists(st.integers(-2, 9), min_size=2, max_size=2)


@given(
    n=st.integers(1, 12),
    offset=st.integers(0, 12),
    window=st.none() | st.integers(1, 30),
    right=PADDING,
    left=PADDING,
)
def test_a_causal_mask_is_its_rule(n: int, offset: int, window: Any, right: Any, left: Any) -> None:
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


def test_a_causal_mask_checks_its_numbers() -> None:
    for arguments in (
        *({"n": 0}, {"n": 2, "offset": -1}, {"n": 2, "window_size": 0}, {"n": 2**40}),
        {"n": 2, "right_padding": [0, 1], "left_padding": [0]},
    ):
        with pytest.raises(CacheValueError):
            create_causal_mask(**arguments)  # type: ignore[arg-type]
    for n in (2.0, True):
        with pytest.raises(TypeError):
            create_causal_mask(n)  # type: ignore[arg-type]


def test_an_attention_mask_without_a_cache() -> None:
    h = np.zeros((1, 4, 16))
    assert create_attention_mask(h) == "causal"
    assert create_attention_mask(h[:, :1]) is None
    assert create_attention_mask(h, window_size=4) == "causal"
    assert np.array_equal(create_attention_mask(h, window_size=2), create_causal_mask(4, 0, 2))
    assert np.array_equal(create_attention_mask(h, return_array=True), create_causal_mask(4))
    with pytest.raises(CacheValueError):
        create_attention_mask(np.zeros(3))


def test_an_attention_mask_is_that_of_the_cache() -> None:
    cache, h = filled(KVCache(), [[1, 2, 3]]), np.zeros((1, 2, 16))
    assert create_attention_mask(h, cache) == "causal"
    got = create_attention_mask(h, cache, return_array=True)
    assert np.array_equal(got, create_causal_mask(2, 3))
    ring: Any = create_attention_mask(h, RotatingKVCache(4), window_size=1)
    assert ring.tolist() == [[True, False], [False, True]]
    with pytest.raises(TypeError):
        create_attention_mask(h, 5)  # type: ignore[arg-type]
