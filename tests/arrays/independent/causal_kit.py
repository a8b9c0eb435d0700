"""Batches and what they see, for the caches of shared cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvcache.errors import KvCacheError

NINF = -np.inf


def add_shift(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(key + shift[:, None, None])


def started(cache: Any, sequences: int = 1, capacity: int = 16, batch: int = 16) -> Any:
    cache.init(np.float32, sequences, capacity, batch)
    return cache


def numbers(values: list[float], dim: int = 1) -> NDArray[np.float32]:
    return np.repeat(np.array(values, np.float32), dim).reshape(len(values), 1, dim)


def forward(
    cache: Any, positions: list[int], sequences: list[int] | None = None, base: int = 100
) -> tuple[list[float], NDArray[Any]]:
    """Store ``base + position`` as V, its negative as K; returns V of the history and the mask."""
    sequences = [0] * len(positions) if sequences is None else sequences
    cache.start_forward(positions, sequences)
    cache.set_layer(0)
    stored = numbers([base + pos for pos in positions])
    cache.put(-stored, stored)
    _, value, mask = cache.get()
    return value[:, 0, 0].tolist(), mask


def seen(cache: Any, positions: list[int], sequences: list[int] | None = None) -> list[set[float]]:
    """Which stored numbers each row of a new batch sees."""
    key, mask = forward(cache, positions, sequences)
    return [{k for k, m in zip(key, row, strict=True) if m == 0} for row in mask]


def snapshot(cache: Any) -> list[Any]:
    return [None if array is None else np.array(array) for array in cache.get()]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def refused(cache: Any, call: Callable[..., object], *errors: type[BaseException]) -> None:
    """`call` must raise one of `errors` and change nothing that can be seen."""
    before = snapshot(cache)
    with pytest.raises(errors or KvCacheError):
        call()
    assert_same(before, snapshot(cache))
