"""A forward pass on small numbers and comparisons of caches, for the Ollama family."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays import CausalCache, Input, InputCache, Slot

INF = float("inf")


def made(cache: Any, sequences: int = 1, capacity: int = 16, max_batch: int = 8) -> Any:
    """Return the cache, set up for float32."""
    cache.init(np.float32, sequences, capacity, max_batch)
    return cache


def forward(cache: Any, values: Any, sequences: Any, positions: Any, **options: Any) -> Any:
    """Store one number per token in layer 0; return keys and mask of ``get`` as lists."""
    cache.start_forward(positions, sequences, **options)
    cache.set_layer(0)
    numbers = np.array(values, np.float32).reshape(-1, 1, 1)
    cache.put(numbers, numbers)
    key, value, mask = cache.get()
    assert key.shape == value.shape == (mask.shape[1], 1, 1)
    return key.ravel().tolist(), mask.tolist()


def fill(cache: Any, count: int, sequence: int = 0, start: int = 0, step: int = 1) -> None:
    """Store tokens whose value is their position, `step` at a time."""
    for first in range(start, start + count, step):
        positions = range(first, min(first + step, start + count))
        forward(cache, list(positions), [sequence] * len(positions), positions)


def seen(cache: Any, sequence: int, position: int) -> list[float]:
    """Return, sorted, the numbers that a new token sees, its own 0.5 included."""
    numbers, mask = forward(cache, [0.5], [sequence], [position])
    return sorted(n for n, m in zip(numbers, mask[0], strict=True) if m == 0)


def add_shift(layer: int, key: NDArray[Any], shift: NDArray[np.int32]) -> NDArray[Any]:
    """Shift a key that is its position."""
    return key + shift[:, None, None]


def state(cache: Any) -> list[Any]:
    """Return the arrays of ``get`` in the current pass, of layers 0 and 1."""
    arrays = []
    for layer in (0, 1):
        try:
            cache.set_layer(layer)
            arrays += [np.array(array) for array in cache.get()]
        except RuntimeError as error:
            arrays.append(str(error))
    cache.set_layer(0)
    return arrays


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x == y if isinstance(x, str) else np.array_equal(x, y)


def assert_twins(cache: Any, other: Any, sequences: tuple[int, ...] = (0, 1)) -> None:
    """Compare two caches by the results of later calls."""
    assert_same(state(cache), state(other))
    for seq in sequences:
        for pos in range(20):
            assert cache.can_resume(seq, pos) == other.can_resume(seq, pos)
        for one in (cache, other):
            one.start_forward([19], [seq], reserve=True)
        assert_same(state(cache), state(other))
    # Both evict, defragment and place alike from here on.
    for seq in sequences:
        for one in (cache, other):
            one.remove(seq, 12)
        assert forward(cache, [70], [seq], [12]) == forward(other, [70], [seq], [12])


def twin(cache: Any) -> Any:
    return copy.deepcopy(cache)


def tokens(*numbers: int) -> list[Input]:
    return [Input(number) for number in numbers]


def evaluate(policy: InputCache, slot: Slot, rest: list[Input]) -> None:
    """Put the rest of a prompt into the cache, one number per token, and into the slot."""
    for pos, item in enumerate(rest, len(slot.inputs)):
        forward(policy.cache, [item.token], [slot.id], [pos])
    slot.inputs = slot.inputs + rest


def one(number: float, dtype: Any = np.float32) -> Any:
    return np.full((1, 1, 1), number, dtype)


def begun(cache: Any = None, dtype: Any = np.float32) -> Any:
    """Return a cache with one token, whose K is 1 and whose V is 2."""
    cache = cache or CausalCache()
    cache.init(dtype, 1, 8, 4)
    cache.start_forward([0], [0])
    cache.put(one(1), one(2))
    return cache


def pair(cache: Any) -> tuple[float, float]:
    key, value, _ = cache.get()
    return key.item(), value.item()
