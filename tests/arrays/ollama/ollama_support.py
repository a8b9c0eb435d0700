"""What the tests of the Ollama family share: a forward pass, RoPE, attention, twins."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays import CausalCache, Input, InputCache, RecurrentCache, Slot, SWACache
from pykvcache.errors import CacheOrderError, KvCacheFull, NotSupported

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


def copies_of(cache: Any) -> functools.partial[Any]:
    """Return what makes copies of a cache as it is now, many at a fifth of what `twin` costs."""
    try:
        saved = pickle.dumps(cache, -1)
    except (AttributeError, pickle.PicklingError):  # what a test has defined in itself
        return functools.partial(copy.deepcopy, copy.deepcopy(cache))
    return functools.partial(pickle.loads, saved)


def tokens(*numbers: int) -> list[Input]:
    return [Input(number) for number in numbers]


def evaluate(policy: InputCache, slot: Slot, rest: list[Input]) -> None:
    """Put the rest of a prompt into the cache, one number per token, and note it."""
    start = len(slot.inputs)
    for pos, item in enumerate(rest, start):
        forward(policy.cache, [item.token], [slot.id], [pos])
    slot.inputs = slot.inputs + rest


def picture(cache: Any, sequences: Any = (0, 1), positions: Any = range(9)) -> str:
    """Return all that later calls can find out: who sees what, and how much room is left.

    The state "sum" that a recurrent layer goes on from belongs to it.
    """
    copied = copies_of(cache)
    if copied.func is pickle.loads:
        return _picture_of(*copied.args, tuple(sequences), tuple(positions))
    return _picture(copied, tuple(sequences), tuple(positions))


@functools.lru_cache(64)
def _picture_of(saved: bytes, sequences: tuple[int, ...], positions: tuple[int, ...]) -> str:
    """An interrupt leaves one of few caches, wherever it comes."""
    return _picture(functools.partial(pickle.loads, saved), sequences, positions)


def _picture(
    copied: Callable[[], Any], sequences: tuple[int, ...], positions: tuple[int, ...]
) -> str:
    found: list[Any] = []
    cache, other = copied(), copied()
    for seq in sequences:
        for pos in positions:
            other.start_forward([pos], [seq], reserve=True)
            for layer in (0, 1):
                other.set_layer(layer)
                try:
                    key, value, mask = other.get()
                except CacheOrderError:
                    continue
                own = mask[0] == 0
                found.append((seq, pos, sorted(zip(key[own, 0, 0], value[own, 0, 0], strict=True))))
        found.append([cache.can_resume(seq, pos) for pos in positions])
    room = 0
    with contextlib.suppress(KvCacheFull):
        for room in range(1000):
            other.start_forward([0], [100 + room])
    found.append(room)
    if isinstance(cache, RecurrentCache):
        for seq in sequences:
            other = copied()
            for pos in positions:
                # What is refused changes nothing, and one position at most is not.
                with contextlib.suppress(NotSupported, KvCacheFull):
                    other.start_forward([pos], [seq])
                    found.append((seq, pos, other.get_state("sum", (1,)).tolist()))
                    break
            found += [cache.prepare_restore(seq, pos) for pos in positions]
    return repr(found)


def distinct(cache: Any, sequence: int, count: int, layers: int = 2) -> Any:
    """Store tokens of which no two K or V are the same."""
    cache.start_forward(range(count), [sequence] * count)
    for layer in range(layers):
        cache.set_layer(layer)
        numbers = np.arange(count, dtype=np.float32) + 100 * sequence + 1000 * layer
        cache.put(numbers.reshape(-1, 1, 1), -numbers.reshape(-1, 1, 1))
    return cache


def fragmented(cache: Any = None) -> Any:
    """Return a cache of 12 cells whose free ones are no block: the next batch defragments it."""
    cache = made(cache or CausalCache(), 6, 2, 12)
    for seq in range(6):
        distinct(cache, seq, 2)
    for seq in (0, 2, 4):
        cache.remove(seq, 0)
    return cache


class Foreign:
    """An array of another package: `number` may be what NumPy cannot have."""

    def __init__(self, array: Any, fails: bool = False, call: Any = None) -> None:
        self.array, self.fails, self.call = array, fails, call
        self.shape, self.dtype, self.ndim, self.base = array.shape, array.dtype, array.ndim, None

    def __array__(self, *args: Any, **options: Any) -> Any:
        if self.call is not None:
            self.call()
        if self.fails:
            raise TypeError("no implicit conversion")
        return self.array


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


def two(cache: Any = None) -> Any:
    """Return a cache of 16 cells with five tokens in sequence 0 and three in sequence 1."""
    cache = CausalCache(add_shift) if cache is None else cache
    return distinct(distinct(made(cache, 2, 8, 8), 0, 5), 1, 3)


def sliding() -> Any:
    """Return a cache with a window of 2 and five tokens."""
    return distinct(made(SWACache(2), 1, 16, 8), 0, 5)


def recurrent() -> Any:
    """Return a recurrent cache of five tokens, with a checkpoint after each."""
    cache = made(RecurrentCache(add_shift, checkpoint_min_pos=0, checkpoint_interval=1), 2, 8, 8)
    for pos in range(5):
        cache.start_forward([pos], [0])
        cache.put(np.full((1, 1, 1), pos), np.full((1, 1, 1), -pos))
        cache.put_state("sum", cache.get_state("sum", (1,)) + pos)
    return cache


def back(cache: Any) -> None:
    """Take a recurrent cache back to its third token."""
    cache.remove(0, cache.prepare_restore(0, 3))


#: Calls that change much of a cache, and how it is made before.
LARGE_CALLS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (sliding, lambda cache: cache.start_forward([5, 6], [0, 0])),
    (fragmented, lambda cache: cache.start_forward([0, 1, 2], [9] * 3)),
    (recurrent, lambda cache: cache.start_forward([5], [0])),
    (recurrent, lambda cache: cache.copy_prefix(0, 1, 3)),
    (recurrent, lambda cache: cache.remove(0, 1, 2)),
    (recurrent, back),
]
