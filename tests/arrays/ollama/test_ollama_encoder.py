"""The encoder cache: one item, any shape, no positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pykvcache.arrays import Cache, CacheConfig, EncoderCache
from pykvcache.errors import (
    CacheDTypeError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ClosedError,
    NotSupported,
    PositionError,
)


def made(**config: Any) -> EncoderCache:
    cache = EncoderCache()
    cache.set_config(CacheConfig(**config))
    cache.init(np.float16, 1, 16, 8)
    return cache


def stored(pos: int = 2) -> EncoderCache:
    """Return a cache whose item came with the token at `pos`."""
    cache = made()
    cache.start_forward([pos - 1, pos], [0, 0], multimodal=[1])
    cache.put(np.ones((3, 2)), np.ones((3, 2)))
    return cache


# A.4 EncoderCache: any shape comes back as it was stored; the mask is None.
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 2, 3), (1, 4, 2, 3)])
def test_encoder_returns_any_shape_as_it_was_stored(shape: tuple[int, ...]) -> None:
    cache = made()
    assert isinstance(cache, Cache)
    random = np.random.default_rng(1)
    key, value = random.normal(size=shape), random.normal(size=(*shape, 2)).astype(np.float32)
    cache.start_forward([0], [0], multimodal=[0])
    cache.set_layer(4)
    cache.put(key, value)
    got_key, got_value, mask = cache.get()
    assert mask is None
    assert got_key is not None
    assert got_value is not None
    assert np.array_equal(got_key, key)
    assert np.array_equal(got_value, value)
    assert (got_key.dtype, got_value.dtype) == (np.float64, np.float32)
    # Kept for passes without an item, whatever their positions.
    cache.start_forward([7, 8], [0, 0])
    assert np.array_equal(cache.get()[0], key)
    # Copied in, read-only out.
    key += 1
    assert not np.array_equal(cache.get()[0], key)
    assert not got_key.flags.writeable


# A.4 EncoderCache: Get of an empty layer is nil.
def test_encoder_get_of_an_empty_layer_is_none() -> None:
    cache = stored()
    cache.set_layer(1)
    assert cache.get() == (None, None, None)


# A.4 EncoderCache: Init refuses several sequences and padding.
def test_encoder_init_refuses_sequences_and_padding() -> None:
    cache = EncoderCache()
    with pytest.raises(NotSupported, match="multiple sequences; requested: 2"):
        cache.init(np.float32, 2, 16, 8)
    for padding in (0, 1):
        made(cache_padding=padding)
    with pytest.raises(NotSupported, match=r"requested cache_padding \(4\)"):
        made(cache_padding=4)
    for arguments in ((np.float32, 0, 1, 1), (np.float32, 1, 0, 1), (np.float32, 1, 1, 0)):
        with pytest.raises(CacheValueError, match="at least 1"):
            cache.init(*arguments)
    with pytest.raises(CacheDTypeError):
        cache.init(np.int32, 1, 1, 1)
    with pytest.raises(CacheOrderError, match="call init first"):
        cache.get()


# A.4 EncoderCache: SetConfig once and before Init.
def test_encoder_config_is_set_once() -> None:
    cache = made()
    with pytest.raises(CacheOrderError, match="config cannot be changed"):
        cache.set_config(CacheConfig())


# A.4 EncoderCache: StartForward takes the position of the last multimodal item.
def test_encoder_item_has_the_position_of_the_last_multimodal_index() -> None:
    cache = made()
    cache.start_forward([3, 4, 5, 6], [0] * 4, multimodal=[2, 0, 1])
    cache.put(np.ones(2), np.ones(2))
    cache.remove(0, 5)
    assert cache.encoder_cached
    cache.remove(0, 4, 5)
    assert not cache.encoder_cached


# A.4 EncoderCache: without an item, the position of the pass before is kept.
def test_encoder_keeps_the_position_of_the_last_item() -> None:
    cache = made()
    cache.start_forward([3], [0], multimodal=[0])
    cache.start_forward([9], [0])
    cache.put(np.ones(2), np.ones(2))
    cache.remove(0, 9)
    assert cache.encoder_cached
    cache.remove(0, 3)
    assert not cache.encoder_cached


# A.4 EncoderCache: Put sets encoderCached; a flag, no more: Remove keeps the arrays.
def test_encoder_cached_tells_whether_an_item_is_stored() -> None:
    cache = made()
    assert not cache.encoder_cached
    cache.start_forward([2], [0], multimodal=[0])
    assert not cache.encoder_cached
    cache.put(np.ones(2), np.ones(2))
    assert cache.encoder_cached
    cache.remove(0, 0)
    assert not cache.encoder_cached
    assert cache.get()[0] is not None
    cache.start_forward([5], [0], multimodal=[0])
    cache.put(np.full(2, 7), np.full(2, 7))
    assert cache.encoder_cached
    assert cache.get()[0].tolist() == [7, 7]


# A.4 EncoderCache: Remove clears the flag iff encoderPos is in [begin, end).
@pytest.mark.parametrize(
    ("begin", "end", "cached"),
    [(0, 2, True), (0, 3, False), (2, 3, False), (3, None, True), (2, None, False), (2, 2, True)],
)
def test_encoder_remove_forgets_an_item_in_the_range(
    begin: int, end: int | None, cached: bool
) -> None:
    cache = stored(2)
    cache.remove(0, begin, end)
    assert cache.encoder_cached is cached


# A.4 EncoderCache: reserve does not touch metadata; decided: put then stores nothing.
def test_encoder_reserve_pass_changes_nothing() -> None:
    cache = stored(2)
    cache.start_forward([5], [0], reserve=True, multimodal=[0])
    cache.put(np.full((3, 2), 9), np.full((3, 2), 9))
    assert cache.get()[0].tolist() == np.ones((3, 2)).tolist()
    cache.remove(0, 5)
    assert cache.encoder_cached
    cache.set_layer(1)
    cache.put(np.full(2, 9), np.full(2, 9))
    assert cache.get()[0].tolist() == [0, 0]
    cache.start_forward([8], [0])
    cache.put(np.full(2, 9), np.full(2, 9))
    cache.remove(0, 5)
    assert cache.encoder_cached
    fresh = made()
    fresh.start_forward([5], [0], reserve=True, multimodal=[0])
    fresh.put(np.ones(2), np.ones(2))
    assert not fresh.encoder_cached


# A.4 EncoderCache: the arrays are allocated once, with the first shape.
def test_encoder_keeps_the_first_shape_of_a_layer() -> None:
    cache = stored()
    for key, value, name in ((2, (3, 2), "key"), ((3, 2), (3,), "value")):
        with pytest.raises(CacheValueError, match=f"{name} has shape .* layer 0 holds"):
            cache.put(np.full(key, 9.0), np.full(value, 9.0))
    for strange in (np.full((3, 2), 9j), np.zeros((3, 2), "V4"), np.zeros((3, 2), [("a", "f4")])):
        with pytest.raises(CacheDTypeError):
            cache.put(np.full((3, 2), 9.0), strange)
    assert cache.get()[0].tolist() == cache.get()[1].tolist() == np.ones((3, 2)).tolist()


# A.4 EncoderCache: CopyPrefix is refused; CanResume is always true.
def test_encoder_cannot_copy_and_can_always_resume() -> None:
    cache = stored()
    with pytest.raises(NotSupported, match="multiple sequences"):
        cache.copy_prefix(0, 1, 2)
    assert cache.can_resume(0, 99)
    assert cache.can_resume(5, 0)
    assert cache.encoder_cached


# A.4 EncoderCache and decided: permuted_v applies to V.
def test_encoder_permutes_v() -> None:
    cache = made(permuted_v=True)
    value = np.arange(24.0).reshape(4, 2, 3)
    cache.start_forward([0], [0], multimodal=[0])
    with pytest.raises(CacheValueError, match="permuted_v needs 3 axes"):
        cache.put(value, value[0])
    cache.put(value, value)
    key, got, _ = cache.get()
    assert np.array_equal(key, value)
    assert np.array_equal(got, value.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.start_forward([0], [0], multimodal=[1]), CacheValueError),
        (lambda c: c.start_forward([0], [0], multimodal=[-1]), CacheValueError),
        (lambda c: c.start_forward([], []), CacheValueError),
        (lambda c: c.start_forward(range(9), [0] * 9), CacheValueError),
        (lambda c: c.start_forward([-1], [0]), PositionError),
        (lambda c: c.set_layer(-1), CacheLayerError),
        (lambda c: c.set_causal([7]), CacheValueError),
        (lambda c: c.remove(0, 2, 1), PositionError),
        (lambda c: c.remove(-1, 2), CacheValueError),
        (lambda c: c.can_resume(0, -1), PositionError),
    ],
)
def test_encoder_refuses_bad_arguments(call: Any, error: type) -> None:
    cache = stored()
    with pytest.raises(error):
        call(cache)
    assert cache.encoder_cached
    cache.set_causal([0])
    assert cache.get()[2] is None


# A.4 EncoderCache: Close; order of calls.
def test_encoder_closes() -> None:
    cache = made()
    with pytest.raises(CacheOrderError, match="start_forward"):
        cache.put(np.ones(2), np.ones(2))
    cache.close()
    cache.close()
    for call in (cache.get, lambda: cache.start_forward([0], [0]), lambda: cache.remove(0, 0)):
        with pytest.raises(ClosedError, match="EncoderCache was closed"):
            call()
    cache.init(np.float16, 1, 16, 8)
    assert cache.get() == (None, None, None)
