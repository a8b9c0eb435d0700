"""What the tests of the Ollama family share: a forward pass, RoPE, attention, twins."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays import Input, InputCache, Slot

INF = float("inf")


def made(cache: Any, sequences: int = 1, capacity: int = 16, max_batch: int = 8) -> Any:
    """Return the cache, set up for float32."""
    cache.init(np.float32, sequences, capacity, max_batch)
    return cache


def forward(cache: Any, values: Any, sequences: Any, positions: Any, **options: Any) -> Any:
    """Store one number per token in layer 0; return what get gives as (keys, mask)."""
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


def rope(x: NDArray[Any], positions: Any) -> NDArray[Any]:
    """Rotate ``(n_tokens, n_heads, head_dim)`` by positions, pairs (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None, None] * 0.7 ** np.arange(half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), -1)


def rope_shift(layer: int, key: NDArray[Any], shift: NDArray[np.int32]) -> NDArray[Any]:
    return rope(key, shift)


def attend(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], mask: Any = 0.0) -> NDArray[Any]:
    """Attention per head: q (n, h, d), k (m, h, d), v (m, h, e), mask (n, m) -> (n, h, e)."""
    scores = np.einsum("nhd,mhd->hnm", q, k) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnm,mhe->nhe", weights, v)


def state(cache: Any) -> list[Any]:
    """Return everything that get gives in the current pass, layers 0 and 1."""
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


def twin(cache: Any) -> Any:
    return copy.deepcopy(cache)


def tokens(*numbers: int) -> list[Input]:
    return [Input(number) for number in numbers]


def evaluate(policy: InputCache, slot: Slot, rest: list[Input]) -> None:
    """Put the rest of a prompt into the cache, one number per token, and note it."""
    start = len(slot.inputs)
    for pos, item in enumerate(rest, start):
        forward(policy.cache, [item.token], [slot.id], [pos])
    slot.inputs = slot.inputs + rest
