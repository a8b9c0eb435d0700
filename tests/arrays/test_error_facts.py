"""Errors of the array caches name the argument, its value and the limit as attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import arrays, errors


def rows(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def batch() -> arrays.BatchKVCache:
    return arrays.BatchKVCache([0, 0])


def slots() -> arrays.ArraysCache:
    return arrays.ArraysCache(2)


def causal() -> arrays.CausalCache:
    cache = arrays.CausalCache()
    cache.init("f32", 1, 8, 4)
    return cache


def busy() -> arrays.InputCache:
    inputs = arrays.InputCache(None, 8, 1, 4)
    inputs.load_slot([arrays.Input(1)], True)
    return inputs


SHAPE = rows(1, 2, 3, 4)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str, object, object]] = [
    (lambda: arrays.FlatKVCache(2, 2, 4).k(3), IndexError, "layer", 3, 1),
    (lambda: arrays.FlatKVCache(2, 2, 4).append(0, rows(3), rows(3)), ValueError, "k", (3,), (8,)),
    (lambda: arrays.FlatKVCache(2, 2, 4).advance(), RuntimeError, "layer", 0, None),
    (lambda: arrays.KVCache().update(rows(2), SHAPE), ValueError, "keys", (2,), 4),
    (lambda: arrays.KVCache().update("x", SHAPE), TypeError, "keys", "str", "ndarray"),
    (lambda: arrays.KVCache().trim(-1), ValueError, "n", -1, 0),
    (lambda: batch().update(SHAPE, SHAPE), ValueError, "rows of keys", 1, 2),
    (lambda: batch().extend(arrays.KVCache()), TypeError, "other", "KVCache", "BatchKVCache"),
    (
        lambda: arrays.ArraysCache(2).update(SHAPE, SHAPE),
        RuntimeError,
        "update",
        "ArraysCache",
        None,
    ),
    (lambda: arrays.KvCacheKind.parse("nonsense"), ValueError, "kind", "nonsense", None),
    (lambda: arrays.PromptTrie().get("m", [1, 2]), KeyError, "model and tokens", ("m", 2), None),
    (lambda: arrays.QuantizedKVCache(64, 5), ValueError, "bits", 5, None),
    (lambda: causal().set_layer(-1), IndexError, "layer", -1, 0),
    (lambda: causal().get(), RuntimeError, "start_forward", None, None),
    (lambda: causal().start_forward([0, 1], [0]), ValueError, "sequences", 1, 2),
    (lambda: arrays.EncoderCache().init("f32", 2, 8, 4), RuntimeError, "max_sequences", 2, 1),
    (lambda: arrays.InputCache(None, 4, 2, 4), ValueError, "kv_size", 4, 8),
    (lambda: busy().load_slot([arrays.Input(1)], True), errors.NoSlot, "slots", 1, 1),
]


@pytest.mark.parametrize(("call", "builtin", "what", "value", "limit"), REFUSED)
def test_errors_name_the_value_and_the_limit(
    call: Callable[[], Any], builtin: type[Exception], what: str, value: object, limit: object
) -> None:
    with pytest.raises(errors.DetailedError) as caught:
        call()
    error = caught.value
    assert isinstance(error, builtin)
    assert (error.what, error.value) == (what, value)
    if limit is not None:
        assert error.limit == limit
