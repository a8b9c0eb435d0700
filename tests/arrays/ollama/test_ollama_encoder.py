"""The encoder cache: one item, any shape, no positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache.arrays import Cache, CacheConfig, EncoderCache
from pykvcache.errors import CacheDTypeError, CacheValueError, NotSupported
from support.examples import examples


def made(**config: Any) -> Any:
    cache = EncoderCache()
    cache.set_config(CacheConfig(**config))
    cache.init(np.float16, 1, 16, 8)
    return cache


def stored(pos: int = 2) -> Any:
    """Return a cache whose item came with the token at `pos`."""
    cache = made()
    cache.start_forward([pos - 1, pos], [0, 0], multimodal=[1])
    cache.put(np.ones((3, 2)), np.ones((3, 2)))
    return cache


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_the_cache_is_its_last_item_and_a_position(data: st.DataObject) -> None:
    cache = made()
    pos, cached, held, number = 0, None, [None, None], 0.0
    for _ in range(data.draw(st.integers(1, 20), label="steps")):
        kind = data.draw(st.sampled_from(["pass", "pass", "reserve", "remove", "remove", "anew"]))
        if kind == "anew":
            cache.close()
            cache.init(np.float16, 1, 16, 8)
            pos, cached, held = 0, None, [None, None]
        elif kind == "remove":
            begin, count = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 6)))
            end = begin + count if data.draw(st.booleans(), label="bounded") else None
            cache.remove(0, begin, end)
            if cached is not None and begin <= cached and (end is None or cached < end):
                cached = None
        else:
            start = data.draw(st.integers(0, 9), label="start")
            items = data.draw(st.lists(st.integers(0, 3), max_size=3), label="multimodal")
            reserve = kind == "reserve"
            cache.start_forward(range(start, start + 4), [0] * 4, reserve, items)
            pos = start + items[-1] if items and not reserve else pos
            layer = data.draw(st.integers(0, 1), label="layer")
            if data.draw(st.booleans(), label="put"):
                number += 1
                cache.set_layer(layer)
                cache.put(np.full((2, 3), number), np.full(5, -number))
                if reserve:
                    held[layer] = held[layer] or 0.0
                else:
                    held[layer], cached = number, pos
        assert cache.encoder_cached is (cached is not None)
        for layer, content in enumerate(held):
            cache.set_layer(layer)
            key, value, mask = cache.get()
            assert mask is None
            if content is None:
                assert key is value is None
            else:
                assert key.tolist() == [[content] * 3] * 2
                assert value.tolist() == [-content] * 5


@pytest.mark.parametrize("shape", [(), (5,), (1, 4, 2, 3)])
def test_any_shape_comes_back_in_its_own_dtype(shape: tuple[int, ...]) -> None:
    cache = made()
    assert isinstance(cache, Cache)
    random = np.random.default_rng(1)
    key, value = random.normal(size=shape), random.normal(size=(*shape, 2)).astype(np.float32)
    cache.start_forward([0], [0], multimodal=[0])
    cache.set_layer(4)
    cache.put(key, value)
    got_key, got_value, _ = cache.get()
    assert np.array_equal(got_key, key)
    assert np.array_equal(got_value, value)
    assert (got_key.dtype, got_value.dtype) == (np.float64, np.float32)
    key += 1  # copied in, read-only out
    assert not np.array_equal(cache.get()[0], key)
    assert not got_key.flags.writeable
    assert not got_value.flags.writeable
    cache.put(key.astype(np.float32), value.astype(np.float64))
    assert cache.get()[0].dtype == np.float64


def test_the_first_shape_of_a_layer_stays() -> None:
    cache = stored()
    for key, value, name in ((2, (3, 2), "key"), ((3, 2), (3,), "value")):
        with pytest.raises(CacheValueError, match=f"{name} has shape .* layer 0 holds"):
            cache.put(np.full(key, 9.0), np.full(value, 9.0))
    for strange in (np.full((3, 2), 9j), np.zeros((3, 2), "V4"), np.zeros((3, 2), [("a", "f4")])):
        with pytest.raises(CacheDTypeError):
            cache.put(np.full((3, 2), 9.0), strange)
    assert cache.get()[0].tolist() == cache.get()[1].tolist() == np.ones((3, 2)).tolist()


def test_permuted_v_moves_an_axis_of_v() -> None:
    cache = made(permuted_v=True)
    value = np.arange(24.0).reshape(4, 2, 3)
    cache.start_forward([0], [0], multimodal=[0])
    with pytest.raises(CacheValueError, match="permuted_v needs 3 axes"):
        cache.put(value, value[0])
    cache.put(value, value)
    key, got, _ = cache.get()
    assert np.array_equal(key, value)
    assert np.array_equal(got, value.transpose(1, 2, 0))


def test_init_refuses_sequences_and_padding() -> None:
    cache = EncoderCache()
    with pytest.raises(NotSupported, match="multiple sequences; requested: 2"):
        cache.init(np.float32, 2, 16, 8)
    for padding in (0, 1):
        made(cache_padding=padding)
    with pytest.raises(NotSupported, match=r"requested cache_padding \(4\)"):
        made(cache_padding=4)


def test_sequences_and_positions_do_not_matter() -> None:
    cache = stored()
    with pytest.raises(NotSupported):
        cache.copy_prefix(0, 1, 2)
    cache.set_causal([0])
    assert cache.get()[2] is None
    assert cache.encoder_cached
    assert cache.can_resume(0, 99)
    assert cache.can_resume(5, 0)
