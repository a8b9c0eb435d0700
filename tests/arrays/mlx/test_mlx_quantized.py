"""Quantized caches by example: codes, triples, error bounds, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from mlx_support import snapshot

from pykvcache.arrays import KVCache, QuantizedKVCache
from pykvcache.errors import CacheDTypeError, CacheValueError

BITS = [2, 3, 4, 6, 8]


def some(n, dim=64, dtype=np.float32, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, 2, n, dim)).astype(dtype)


def test_a_cache_keeps_words_scales_and_biases() -> None:
    cache = QuantizedKVCache()
    assert (cache.group_size, cache.bits) == (64, 8)
    cache = QuantizedKVCache(group_size=32, bits=4)
    assert cache.quantized_state is None
    assert (cache.state, cache.meta_state) == ((), ("0", "32", "4"))
    key_triple, value_triple = cache.update_quantized(some(3), some(3, 128))
    assert [a.shape[-1] for a in key_triple] == [8, 2, 2]
    assert [a.shape[-1] for a in value_triple] == [16, 4, 4]
    assert all(a.shape[:3] == (1, 2, 3) for a in (*key_triple, *value_triple))
    for got, state in zip(cache.quantized_state, cache.state, strict=True):
        for a, b in zip(got, state, strict=True):
            assert np.array_equal(a, b)
    assert cache.meta_state == ("3", "32", "4")
    one = QuantizedKVCache()
    one.update_quantized(some(1), some(1))
    assert one.nbytes == one.copy().nbytes == 2 * 2 * 256 * (64 + 4 + 4)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_a_little_endian_bit_stream(bits):
    """Quantisation: codes as a little-endian bit stream, width head_dim * bits / 32 words."""
    levels = 2**bits
    codes = np.random.default_rng(bits).integers(0, levels, 64)
    codes[:2] = 0, levels - 1  # the group spans all levels, so a code is its own value
    x = codes.astype(np.float32).reshape(1, 1, 1, 64)
    cache = QuantizedKVCache(64, bits)
    (words, scales, biases), _ = cache.update_quantized(x, x)
    assert words.dtype == np.uint32
    assert words.shape == (1, 1, 1, 64 * bits // 32)
    assert scales.item() == 1
    assert biases.item() == 0
    stream = sum(int(word) << (32 * i) for i, word in enumerate(words.ravel()))
    assert stream == sum(int(code) << (bits * i) for i, code in enumerate(codes))
    assert np.array_equal(cache.update(x, x)[0][:, :, :1], x)


def test_quantized_cache_refuses_and_keeps():
    cache = QuantizedKVCache(32, 4)
    cache.update(some(2), some(2))
    before = snapshot(cache)
    for keys, values, error in (
        (some(1, 48), some(1), CacheValueError),
        (some(1), some(1, 16), CacheValueError),
        (some(1) * np.inf, some(1), CacheValueError),
        (some(1), some(1) * np.nan, CacheValueError),
        (some(1).astype(np.int32), some(1), CacheDTypeError),
        (some(1, dtype=np.float16), some(1), CacheDTypeError),
    ):
        with pytest.raises(error):
            cache.update(keys, values)
        assert snapshot(cache) == before


@pytest.mark.parametrize("arguments", [{"bits": 5}, {"bits": 1}, {"group_size": 0}])
def test_quantization_that_cannot_be_is_refused(arguments):
    with pytest.raises(CacheValueError):
        QuantizedKVCache(**arguments)
    with pytest.raises(CacheValueError):
        KVCache().to_quantized(**arguments)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bits", BITS)
def test_every_finite_value_has_a_finite_one(bits, dtype):
    """A group's range may be nearly the dtype's largest number; in float16 it may be twice that."""
    largest, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    if dtype is not np.float16:
        wide = np.tile(np.array([-largest, largest]), (1, 1, 1, 16))
        with pytest.raises(CacheValueError, match="range overflows"):
            QuantizedKVCache(32, bits).update(wide, wide)
        largest *= dtype(0.499)
    rng = np.random.default_rng(bits)
    groups = [
        [-largest, largest, 0, largest / 2],
        [largest, largest, largest / 3, -largest / 2],
        [-largest, -largest, 0, 0],
        [0, tiny, 2 * tiny, 300 * tiny],  # its own precision stays
        [largest] * 4,
    ]
    x = np.concatenate(
        [np.tile(np.array(g, dtype), 8) for g in groups] + [rng.uniform(-1, 1, 32) * largest]
    ).astype(dtype)[None, None, None]
    plain = KVCache()
    plain.update(x, x)
    for cache in (QuantizedKVCache(32, bits), plain.to_quantized(32, bits)):
        with np.errstate(all="raise"):  # a caller's setting has no effect
            got = cache.update(x, x)[0][:, :, -1:]
        assert np.isfinite(got).all()
        assert within_the_bound(x, got, cache)


def within_the_bound(x, got, cache):
    """Return whether the error is within half a scale plus rounding, as the class says."""
    wide = np.longdouble
    scales = np.repeat(cache.quantized_state[0][1][:, :, -1:].astype(wide), cache.group_size, -1)
    groups = np.abs(x.astype(wide)).reshape(*x.shape[:-1], -1, cache.group_size)
    most = np.repeat(groups.max(-1), cache.group_size, -1)
    eps, tiny = (wide(getattr(np.finfo(x.dtype), n)) for n in ("eps", "smallest_subnormal"))
    rounded = most * eps * (wide(0.5) if x.dtype == np.float16 else 4) + tiny
    error = np.abs(x.astype(wide) - got.astype(wide))
    # longdouble may be no wider than float64.
    return (error <= (scales / 2 + rounded) * (1 + 8 * np.finfo(float).eps)).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bits", BITS)
def test_the_bound_holds_in_every_dtype(bits, dtype):
    """float16 with 8 bits was off by 1.2 half steps: it was rounded three times."""
    rng = np.random.default_rng(bits)
    scale = 10.0 ** rng.integers(-3, 3, (200, 1, 1, 1))
    x = rng.normal(0, 1, (200, 1, 2, 64)) * scale + scale * 5 * rng.integers(-1, 2, scale.shape)
    x = x.astype(dtype)
    cache = QuantizedKVCache(64, bits)
    assert within_the_bound(x[:, :, -1:], cache.update(x, x)[0][:, :, -1:], cache)
