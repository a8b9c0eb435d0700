"""Every cache alike: order of calls, closing, arguments, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ollama_support import assert_same, begun, made, one, pair, state

from pykvcache.arrays import (
    Cache,
    CacheConfig,
    CausalCache,
    EncoderCache,
    RecurrentCache,
    WrapperCache,
)
from pykvcache.errors import (
    CacheDTypeError,
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ClosedError,
    PositionError,
)

KINDS: dict[str, Callable[[], Any]] = {
    "CausalCache": CausalCache,
    "RecurrentCache": RecurrentCache,
    "EncoderCache": EncoderCache,
    "WrapperCache": lambda: WrapperCache(WrapperCache(CausalCache())),
}
every_kind = pytest.mark.parametrize("kind", KINDS)

#: Calls that need a cache that is set up.
CALLS: tuple[Callable[[Any], object], ...] = (
    lambda c: c.start_forward([0], [0]),
    lambda c: c.set_layer(0),
    lambda c: c.set_causal(),
    lambda c: c.remove(0, 0),
    lambda c: c.copy_prefix(0, 1, 1),
    lambda c: c.can_resume(0, 0),
    lambda c: c.get(),
    lambda c: c.put(one(1), one(1)),
)


@every_kind
def test_order_of_calls_is_checked(kind: str) -> None:
    cache = KINDS[kind]()
    assert isinstance(cache, Cache)
    for call in CALLS:
        with pytest.raises(CacheOrderError, match=r"Cache was not set up; call init first"):
            call(cache)
    assert cache.config is None
    for _ in range(2):
        made(cache)
        for wrong in (lambda c: c.put(one(1), "x"), lambda c: c.set_causal()):
            with pytest.raises(CacheOrderError, match="call start_forward first"):
                wrong(cache)
        cache.start_forward([0], [0])
        cache.set_causal([0])
        cache.close()
        cache.close()
        for call in CALLS:
            with pytest.raises(ClosedError, match="Cache was closed"):
                call(cache)


@every_kind
def test_set_config_works_once_and_before_init(kind: str) -> None:
    cache = KINDS[kind]()
    with pytest.raises(TypeError, match="must be a CacheConfig"):
        cache.set_config({})
    cache.set_config(CacheConfig(mask_batch_padding=4))
    for again in (CacheConfig(), CacheConfig(mask_batch_padding=4)):
        with pytest.raises(CacheOrderError, match="config cannot be changed"):
            cache.set_config(again)
    assert made(cache).config == CacheConfig(mask_batch_padding=4)
    with pytest.raises(CacheOrderError, match="config cannot be changed"):
        made(KINDS[kind]()).set_config(CacheConfig())


REFUSED: list[tuple[str, tuple[Any, ...], type, str]] = [
    ("init", (np.int32, 1, 8, 4), CacheDTypeError, "int32"),
    ("init", ("q8_0", 1, 8, 4), CacheDTypeError, "q8_0"),
    ("init", (None, 1, 8, 4), CacheDTypeError, "None"),
    ("init", (np.float32, 0, 8, 4), CacheValueError, r"max_sequences is 0: it must be in \[1,"),
    ("init", (np.float32, 1, 0, 4), CacheValueError, "capacity is 0"),
    ("init", (np.float32, 1, 8, -1), CacheValueError, "max_batch is -1"),
    ("init", (np.float32, 1, 8.0, 4), TypeError, "not float"),
    ("start_forward", ([], []), CacheValueError, "the batch has 0 tokens; it must have 1 to 4"),
    ("start_forward", (range(5), [0] * 5), CacheValueError, "the batch has 5 tokens"),
    ("start_forward", ([2, 3], [0]), CacheValueError, "2 positions, but 1 sequences"),
    ("start_forward", ([2, -3], [0, 0]), PositionError, "position -3 is outside"),
    ("start_forward", ([2**31 - 1], [0]), PositionError, "position 2147483647 is outside"),
    ("start_forward", ([2**64], [0]), CacheValueError, "outside int64"),
    ("start_forward", ([2], [-1]), CacheValueError, "sequence id -1 is negative"),
    ("start_forward", ([True], [0]), TypeError, r"positions\[0\] must be an integer, not bool"),
    ("start_forward", (np.array([2.0]), [0]), TypeError, "must hold integers, not float64"),
    ("start_forward", (np.array([[2]]), [0]), CacheValueError, "one dimension is needed"),
    ("start_forward", (np.array([2**63], np.uint64), [0]), CacheValueError, "below 2"),
    ("start_forward", ([2], [0], False, [1]), CacheValueError, "multimodal holds"),
    ("start_forward", ([2], [0], False, [-1]), CacheValueError, "multimodal holds"),
    ("set_layer", (-1,), CacheLayerError, "layer is -1"),
    ("set_layer", (True,), TypeError, "not bool"),
    ("set_causal", ([4],), CacheValueError, "4"),
    ("set_causal", ([-1],), CacheValueError, "-1"),
    ("remove", (0, 3, 2), PositionError, "begin is 3, above end, which is 2"),
    ("remove", (0, -1), PositionError, "begin is -1"),
    ("remove", (0, 0, 2**31), PositionError, "end is 2147483648"),
    ("remove", (-1, 0), CacheValueError, "seq is -1"),
    ("remove", (0, 1.0), TypeError, "not float"),
    ("copy_prefix", (-1, 0, 1), CacheValueError, "src_seq is -1"),
    ("copy_prefix", (0, -1, 1), CacheValueError, "dst_seq is -1"),
    ("copy_prefix", (0, 1, -1), CacheValueError, "n is -1"),
    ("can_resume", (-1, 0), CacheValueError, "seq is -1"),
    ("can_resume", (0, -1), PositionError, "pos is -1"),
]


@every_kind
def test_refused_arguments_change_nothing(kind: str) -> None:
    cache = made(KINDS[kind](), max_batch=4)
    cache.start_forward(range(4), [0] * 4, multimodal=[0])
    cache.put(np.ones((4, 2, 4), np.float32), np.ones((4, 2, 4), np.float32))
    before = state(cache)
    for method, arguments, error, message in REFUSED:
        with pytest.raises(error, match=message):
            getattr(cache, method)(*arguments)
        assert_same(before, state(cache))
    for array in cache.get():
        if array is not None:
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 5


@pytest.mark.parametrize("permuted", [False, True])
@every_kind
def test_arrays_of_get_may_be_put_the_other_way_round(kind: str, permuted: bool) -> None:
    cache = KINDS[kind]()
    cache.set_config(CacheConfig(permuted_v=permuted))
    begun(cache)
    for _ in range(2):
        cache.put(one(1), one(2))
        key, value, _ = cache.get()
        cache.put(value.reshape(1, 1, 1), key.reshape(1, 1, 1))
        assert pair(cache) == (2, 1)


@every_kind
def test_copies_are_independent(kind: str) -> None:
    for how in (copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))):
        cache = begun(KINDS[kind]())
        other = how(cache)
        before = pair(other)
        other.put(one(7), one(8))
        assert (pair(cache), before, pair(other)) == ((1, 2), (1, 2), (7, 8))
        other.remove(0, 0)
        other.start_forward([0], [0])
        cache.start_forward([1], [0])
