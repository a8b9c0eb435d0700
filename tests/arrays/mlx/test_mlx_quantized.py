import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_reference import snapshot

from pykvcache.arrays import KVCache, QuantizedKVCache, from_state
from pykvcache.errors import CacheDTypeError, CacheValueError

BITS = [2, 3, 4, 6, 8]


def some(n, dim=64, dtype=np.float32, seed=0, batch=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, 2, n, dim)).astype(dtype)


def half_steps(x, group, bits):
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    half = (groups.max(-1) - groups.min(-1)) / (2**bits - 1) / 2
    return np.repeat(half, group, axis=-1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_error_is_within_half_a_step(bits, group, dtype):
    """Quantisation: error within half a step, for bits 2, 3, 4, 6, 8."""
    keys, values = some(20, 128, dtype, seed=bits), some(20, 256, dtype, seed=group) * 40
    got_keys, got_values = QuantizedKVCache(group, bits).update(keys, values)
    for x, y in ((keys, got_keys), (values, got_values)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        rounding = np.finfo(dtype).eps * np.abs(x).max()
        error = np.abs(x.astype(np.float64) - y.astype(np.float64))
        assert (error <= half_steps(x, group, bits) + rounding).all()


@settings(deadline=None)
@given(
    bits=st.sampled_from(BITS),
    x=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32),
)
def test_error_is_within_half_a_step_for_any_values(bits, x):
    """Quantisation: error within half a step, for any finite group."""
    keys = np.array(x, np.float32).reshape(1, 1, 1, 32)
    got, _ = QuantizedKVCache(32, bits).update(keys, keys)
    rounding = 2 * np.finfo(np.float32).eps * np.abs(keys).max() + 1e-44
    assert (np.abs(keys.astype(float) - got) <= half_steps(keys, 32, bits) + rounding).all()


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


def test_quantized_triples_are_words_scales_and_biases():
    """QTriple = (w, scales, biases); QuantizedKVCache: triples, group_size, bits."""
    cache = QuantizedKVCache()
    assert (cache.group_size, cache.bits) == (64, 8)
    cache = QuantizedKVCache(group_size=32, bits=4)
    assert cache.quantized_state is None
    key_triple, value_triple = cache.update_quantized(some(3), some(3, 128))
    assert [a.shape[-1] for a in key_triple] == [8, 2, 2]
    assert [a.shape[-1] for a in value_triple] == [16, 4, 4]
    assert all(a.shape[:3] == (1, 2, 3) for a in (*key_triple, *value_triple))
    for got, state in zip(cache.quantized_state, cache.state, strict=True):
        for a, b in zip(got, state, strict=True):
            assert np.array_equal(a, b)


def test_update_quantized_continues_what_is_stored():
    """QuantizedKVCache: update_quantized appends; growth step 256."""
    x = some(600)
    parts, whole = QuantizedKVCache(), QuantizedKVCache()
    for n in range(0, 600, 100):
        got = parts.update_quantized(x[:, :, n : n + 100], x[:, :, n : n + 100])
    want = whole.update_quantized(x, x)
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert np.array_equal(a, b)
    assert parts.offset == parts.size() == 600
    one = QuantizedKVCache()
    one.update_quantized(x[:, :, :1], x[:, :, :1])
    assert one.nbytes == 2 * 2 * 256 * (64 + 4 + 4)


def test_an_empty_quantized_cache_has_a_state():
    """QuantizedKVCache: an empty cache can be saved (mlx-lm fails there); quantized_state None."""
    cache = QuantizedKVCache(32, 4)
    assert cache.state == ()
    assert cache.quantized_state is None
    assert cache.nbytes == 0
    assert cache.meta_state == ("0", "32", "4")
    again = from_state("QuantizedKVCache", cache.state, cache.meta_state)
    assert again.is_empty()
    assert (again.group_size, again.bits) == (32, 4)


def test_quantized_meta_is_offset_group_bits():
    """QuantizedKVCache: meta (offset, group, bits)."""
    cache = QuantizedKVCache(32, 6)
    cache.update(some(3), some(3))
    assert cache.meta_state == ("3", "32", "6")
    again = from_state("QuantizedKVCache", cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)


@pytest.mark.parametrize(
    "meta", [("2", "32", "4"), ("4", "32", "4"), ("3", "64", "4"), ("3", "32", "8"),
             ("3", "32", "5"), ("3", "0", "4"), ("3", "32"), ("3", "32", "x"), ()],
)  # fmt: skip
def test_quantized_offset_and_layout_must_fit_the_arrays(meta):
    """from_state: Quantized offset/length invariant, and widths that fit group and bits."""
    cache = QuantizedKVCache(32, 4)
    cache.update(some(3), some(3))
    with pytest.raises(CacheValueError):
        from_state("QuantizedKVCache", cache.state, meta)


def test_empty_quantized_state_needs_offset_zero():
    """from_state: Quantized empty => offset = 0."""
    with pytest.raises(CacheValueError):
        from_state("QuantizedKVCache", (), ("1", "64", "8"))


def test_quantized_trim_and_copy():
    cache = QuantizedKVCache(32, 4)
    cache.update(some(5), some(5))
    twin = cache.copy()
    assert cache.is_trimmable()
    assert cache.trim(2) == 2
    assert cache.offset == 3
    assert twin.offset == 5
    twin.update(some(1, seed=9), some(1, seed=9))
    assert cache.offset == 3
    assert not any(
        np.shares_memory(a, b)
        for s, t in zip(cache.state, twin.state, strict=True)
        for a, b in zip(s, t, strict=True)
    )
    assert cache.trim(10) == 3
    assert cache.is_empty()


def test_quantized_masks_are_those_of_a_kv_cache():
    quantized, plain = QuantizedKVCache(), KVCache()
    for cache in (quantized, plain):
        cache.update(some(5), some(5))
    assert quantized.make_mask(1) is None
    assert quantized.make_mask(2) == "causal"
    assert np.array_equal(quantized.make_mask(2, 3), plain.make_mask(2, 3))


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        (some(1, 48), some(1), CacheValueError),
        (some(1), some(1, 16), CacheValueError),
        (some(1) * np.inf, some(1), CacheValueError),
        (some(1), some(1) * np.nan, CacheValueError),
        (some(1).astype(np.int32), some(1), CacheDTypeError),
        (some(1, 128), some(1), CacheValueError),
        (some(1, batch=2), some(1, batch=2), CacheValueError),
        (some(1, dtype=np.float16), some(1), CacheDTypeError),
        (some(1)[0], some(1)[0], CacheValueError),
    ],
)
def test_quantized_cache_refuses_and_keeps(keys, values, error):
    """Wrong shapes, dtypes and values leave a quantized cache as it was."""
    cache = QuantizedKVCache(32, 4)
    cache.update(some(2), some(2))
    before = snapshot(cache)
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
    """A group may reach over more than the dtype's largest number."""
    largest, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    rng = np.random.default_rng(bits)
    groups = [
        [-largest, largest, 0, largest / 2],
        [largest, largest, largest / 3, -largest / 2],
        [-largest, -largest, 0, 0],
        [0, tiny, 2 * tiny, 300 * tiny],  # beside the others: its own precision stays
        [largest] * 4,
    ]
    x = np.concatenate(
        [np.tile(np.array(g, dtype), 8) for g in groups] + [rng.uniform(-1, 1, 32) * largest]
    ).astype(dtype)[None, None, None]
    plain = KVCache()
    plain.update(x, x)
    for cache in (QuantizedKVCache(32, bits), plain.to_quantized(32, bits)):
        got = cache.update(x, x)[0][:, :, -1:]
        assert np.isfinite(got).all()
        assert within_the_bound(x, got, cache)


def within_the_bound(x, got, cache):
    """What the class says: half a scale, and what is rounded."""
    wide = np.longdouble
    scales = np.repeat(cache.quantized_state[0][1][:, :, -1:].astype(wide), cache.group_size, -1)
    groups = np.abs(x.astype(wide)).reshape(*x.shape[:-1], -1, cache.group_size)
    most = np.repeat(groups.max(-1), cache.group_size, -1)
    eps, tiny = (wide(getattr(np.finfo(x.dtype), n)) for n in ("eps", "smallest_subnormal"))
    rounded = most * eps * (wide(0.5) if x.dtype == np.float16 else 4) + tiny
    error = np.abs(x.astype(wide) - got.astype(wide))
    # What float64 cannot tell apart, where longdouble is no wider.
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


def test_a_caller_may_make_numpy_raise():
    """np.seterr(all="raise") is no reason to fail."""
    x = np.full((1, 1, 1, 64), 1e-45, np.float32)
    x[..., 0] = 3e38
    with np.errstate(all="raise"):
        got = QuantizedKVCache(64, 8).update(x, -x)
    assert np.isfinite(got).all()


def test_other_floats_are_refused_or_made_native():
    swapped = some(2).astype(">f4")
    cache = QuantizedKVCache(32, 4)
    cache.update(swapped, swapped)
    want = QuantizedKVCache(32, 4)
    want.update(some(2), some(2))
    assert snapshot(cache) == snapshot(want)
    assert snapshot(from_state("QuantizedKVCache", cache.state, cache.meta_state))
    if np.dtype(np.longdouble) != np.float64:
        with pytest.raises(CacheDTypeError):
            QuantizedKVCache().update(some(1).astype(np.longdouble), some(1))
