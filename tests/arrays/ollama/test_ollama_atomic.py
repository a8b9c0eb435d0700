"""All or nothing: what raises leaves the cache exactly as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ollama_support import add_shift, assert_same, fill, forward, seen, state, twin

from pykvcache.arrays import CausalCache, ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.errors import CacheDTypeError, CacheValueError, KvCacheFull, NotSupported


class Fault(Exception):
    """What a test's shift_fn raises."""


def assert_twins(cache: Any, other: Any, sequences: tuple[int, ...] = (0, 1)) -> None:
    """Compare two caches by what every later call gives."""
    assert_same(state(cache), state(other))
    for seq in sequences:
        for pos in range(20):
            assert cache.can_resume(seq, pos) == other.can_resume(seq, pos)
        numbers = [twins.start_forward([19], [seq], reserve=True) for twins in (cache, other)]
        assert numbers == [None, None]
        assert_same(state(cache), state(other))
    # Both evict, defragment and place alike from here on.
    for seq in sequences:
        for one in (cache, other):
            one.remove(seq, 12)
        assert forward(cache, [70], [seq], [12]) == forward(other, [70], [seq], [12])


# Decided: KvCacheFull happens before any defragmentation.
def test_full_cache_is_not_defragmented() -> None:
    cache = CausalCache()
    cache.init(np.float32, 1, 10, 10)
    fill(cache, 10, step=10)
    cache.copy_prefix(0, 1, 4)
    cache.remove(0, 0)
    forward(cache, [50, 51], [2, 2], [0, 1])
    cache.remove(1, 1, 4)
    # Free: cells 1 to 3 and 6 to 9, so that 8 tokens do not fit even after defragmenting.
    other = twin(cache)
    with pytest.raises(KvCacheFull):
        cache.start_forward(range(8), [0] * 8)
    assert_twins(cache, other, (0, 1, 2))


# Decided: KvCacheFull happens before anything is evicted.
def test_full_cache_evicts_nothing() -> None:
    cache = SWACache(2)
    cache.init(np.float32, 1, 16, 4)
    for seq in (0, 1, 2):
        fill(cache, 2, sequence=seq, step=2)
    cache.remove(2, 0)
    forward(cache, [2, 3], [0, 0], [2, 3])
    # Sequence 0 will lose tokens 0 and 1 in the next pass; that makes room for 2, not for 3.
    other = twin(cache)
    with pytest.raises(KvCacheFull, match="cache: 6 batch: 3"):
        cache.start_forward([0, 1, 2], [3, 3, 3])
    assert cache.can_resume(0, 2)
    assert_twins(cache, twin(other))
    other.start_forward([0, 1], [3, 3])
    assert not other.can_resume(0, 2)


# Decided: a pass that was refused leaves get() as it was, and put goes to the pass before.
def test_get_and_put_go_on_with_the_pass_before_a_refused_one() -> None:
    cache = CausalCache()
    cache.init(np.float32, 1, 4, 4)
    forward(cache, [1, 2, 3], [0] * 3, range(3))
    cache.set_causal([0])
    key, value, mask = cache.get()
    with pytest.raises(KvCacheFull):
        cache.start_forward([3, 4], [0, 0])
    assert cache.get()[2] is mask
    assert np.shares_memory(cache.get()[0], key)
    cache.put(np.full((3, 1, 1), 8), np.full((3, 1, 1), 8))
    assert cache.get()[1].ravel().tolist() == value.ravel().tolist() == [8, 8, 8]


def refused(kind: str) -> tuple[Any, tuple[int, int]]:
    if kind == "no shift_fn":
        cache: Any = CausalCache()
    elif kind == "window":
        cache = SWAMemCache(3, 5, add_shift)
    elif kind == "chunks":
        cache = ChunkedAttentionCache(4)
    else:
        cache = CausalCache(add_shift)
    cache.init(np.float32, 2, 16, 4)
    fill(cache, 10, step=2)
    if kind == "shared":
        cache.copy_prefix(0, 1, 10)
    return cache, (4, 9)


# Decided: every refused remove leaves the cache exactly as it was.
@pytest.mark.parametrize("kind", ["no shift_fn", "window", "chunks", "shared"])
def test_refused_remove_changes_nothing(kind: str) -> None:
    cache, span = refused(kind)
    other = twin(cache)
    with pytest.raises(RuntimeError):
        cache.remove(0, *span)
    assert_twins(cache, other)
    # What the caller has to do after an error works.
    cache.remove(0, 0)
    assert seen(cache, 0, 0) == [0.5]


# Decided: a raising shift_fn propagates; other sequences are intact and remove(seq, 0) recovers.
@pytest.mark.parametrize("failing_call", [0, 1, 2, 3])
def test_raising_shift_fn_changes_nothing(failing_call: int) -> None:
    calls = []

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        calls.append(layer)
        key += shift[:, None, None]
        if len(calls) > failing_call:
            raise Fault
        return key

    cache = CausalCache(shift_fn)
    cache.init(np.float32, 2, 16, 4)
    for first in range(0, 12, 4):
        cache.start_forward(range(first, first + 4), [0, 1, 0, 1])
        for layer in (0, 1):
            cache.set_layer(layer)
            numbers = np.arange(first, first + 4, dtype=np.float32).reshape(4, 1, 1)
            cache.put(numbers, numbers)
    other = twin(cache)
    with pytest.raises(Fault):
        cache.remove(0, 2, 4)
    assert len(calls) == failing_call + 1
    assert_twins(cache, other)
    cache.remove(0, 0)
    assert seen(cache, 0, 0) == [0.5]
    assert seen(cache, 1, 12) == seen(other, 1, 12)


# What a shift_fn returns is checked like what put is given.
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda key: key[:1], CacheValueError),
        (lambda key: key[..., None], CacheValueError),
        (lambda key: key.astype(complex), CacheDTypeError),
        (lambda key: None, CacheDTypeError),
    ],
)
def test_shift_fn_must_return_keys(wrong: Any, error: type) -> None:
    cache = CausalCache(lambda layer, key, shift: wrong(key))
    cache.init(np.float32, 2, 16, 4)
    fill(cache, 6, step=3)
    other = twin(cache)
    with pytest.raises(error, match="shift_fn"):
        cache.remove(0, 1, 2)
    assert_twins(cache, other)


# Decided: what lies over dropped tokens is NotSupported, and the message says what is missing.
def test_window_refusal_says_what_is_missing() -> None:
    cache, span = refused("window")
    with pytest.raises(NotSupported, match="attends back to 2, but the tokens below 3"):
        cache.remove(0, *span)
