"""Sizes that no array has."""

from __future__ import annotations

import numpy as np
import pytest

from pykvcache.arrays import CacheConfig, CausalCache, FlatKVCache, RecurrentCache
from pykvcache.errors import CacheValueError


# Found: 2**62 rows of padding were accepted, and an untyped ValueError came after the cells.
def test_sizes_that_no_array_has_are_refused() -> None:
    for padding in (2**31, 2**62, 10**5000):
        for name in ("cache_padding", "mask_batch_padding"):
            with pytest.raises(CacheValueError, match=name):
                CacheConfig(**{name: padding})
    for sizes in ((2**31 - 1, 2**31 - 1, 1), (2**16, 2**15, 1)):
        with pytest.raises(CacheValueError, match="at most 2147483647"):
            CausalCache().init(np.float32, *sizes)
    with pytest.raises(CacheValueError, match="at most"):
        FlatKVCache(1, 10**5000, 1)
    cache = RecurrentCache()
    cache.init(np.float32, 1, 4, 4)
    cache.start_forward([0], [0])
    for shape in ((-1,), (2**62,), (2**40, 2**40, 0)):
        with pytest.raises(CacheValueError):
            cache.get_state("s", shape)


def test_a_mask_of_more_bytes_than_there_can_be_is_refused_by_init() -> None:
    cache = CausalCache()
    cache.set_config(CacheConfig(mask_batch_padding=2**31 - 1, mask_dtype=np.float64))
    with pytest.raises(CacheValueError, match="largest mask"):
        cache.init(np.float32, 1, 2**30, 8)
