"""Copies of a cache, forks of recurrent sequences, and caches within caches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from ollama_support import (
    add_shift,
    begun,
    evaluate,
    one,
    pair,
    tokens,
)

from pykvcache.arrays import (
    CausalCache,
    CheckpointRing,
    EncoderCache,
    InputCache,
    RecurrentCache,
    WrapperCache,
)
from pykvcache.errors import (
    CacheValueError,
    NotSupported,
)


# Found: a cache in a wrapper and in a wrapper beside it stored every token twice.
def test_no_cache_is_wrapped_twice_at_any_depth() -> None:
    cache = CausalCache()
    inner = WrapperCache(cache)
    for caches in ((cache, inner), (inner, WrapperCache(cache)), (WrapperCache(inner), cache)):
        with pytest.raises(CacheValueError, match="none twice"):
            WrapperCache(*caches)
    WrapperCache(inner, CausalCache())


# Found: copy.copy shared the cells, and each of the two counted them for itself.
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
@pytest.mark.parametrize("kind", [CausalCache, RecurrentCache, EncoderCache, WrapperCache])
def test_copies_are_independent(kind: Any, copied: Any) -> None:
    cache: Any = WrapperCache(CausalCache()) if kind is WrapperCache else kind()
    begun(cache)
    other = copied(cache)
    before = pair(other)
    other.put(one(7), one(8))
    assert (pair(cache), before, pair(other)) == ((1, 2), (1, 2), (7, 8))
    if kind is not EncoderCache:
        other.remove(0, 0)
        other.start_forward([0], [0])
        cache.start_forward([1], [0])


def test_copies_share_the_shift_fn_and_nothing_else() -> None:
    class Shift:
        def __call__(self, layer: int, key: Any, shift: Any) -> Any:
            return key

    shift_fn = Shift()
    cache = begun(CausalCache(shift_fn))
    assert copy.copy(cache)._shared.function is shift_fn
    inputs = InputCache(CausalCache(), 8, 2, 4, dtype=np.float32)
    other = copy.copy(inputs)
    slot, rest = other.load_slot(tokens(1, 2))
    evaluate(other, slot, rest)
    assert inputs.slots[0].inputs == []
    assert not inputs.slots[0].in_use
    ring = CheckpointRing(2)
    twin = copy.copy(ring)
    twin.store(twin.record(3), "a", np.ones(1))
    assert (ring.positions, twin.positions) == ([], [3])


# Found: copies of a wrapper and of an InputCache copied the model, or failed on its locks.
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda cache: WrapperCache(cache, CausalCache()),
        lambda cache: WrapperCache(WrapperCache(EncoderCache(), cache)),
        lambda cache: InputCache(cache, 16, 1, 4),
        lambda cache: InputCache(WrapperCache(cache), 16, 1, 4),
        lambda cache: InputCache(None, 16, 1, 4),
    ],
)
def test_copies_of_what_wraps_a_cache_share_its_model(wrapped: Any) -> None:
    class Model:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a lock")

        def rotate(self, layer: int, key: Any, shift: Any) -> Any:
            return key

    model = Model()
    made = wrapped(CausalCache(model.rotate))
    other = copy.copy(made)
    inner = made.cache if isinstance(made, InputCache) else made
    again = other.cache if isinstance(other, InputCache) else other
    assert other is not made
    assert inner is None or inner is not again


# Recurrent states -----------------------------------------------------------------------


def forked() -> Any:
    """Return a cache whose sequence 1 has K and V of 0 to 2, and a state of 0 to 5."""
    cache = RecurrentCache(add_shift, checkpoint_min_pos=0, checkpoint_interval=2)
    cache.init(np.float32, 2, 16, 16)
    for pos in range(6):
        cache.start_forward([pos], [0])
        cache.put(one(pos), one(pos))
        cache.put_state("s", cache.get_state("s", (1,)) + pos)
    cache.copy_prefix(0, 1, 3)
    return cache


# Found: after copy_prefix(0, 1, 3) sequence 1 went on at 6 with the keys of three tokens.
def test_a_prefix_goes_on_from_a_checkpoint_alone() -> None:
    cache = forked()
    assert [pos for pos in range(9) if cache.can_resume(1, pos)] == [0, 1, 3]
    assert [cache.prepare_restore(1, pos) for pos in range(7)] == [None, 1, 1, 3, 3, 3, 3]
    for pos in (3, 6):
        with pytest.raises(NotSupported):
            cache.start_forward([pos], [1])
    wrapper = WrapperCache(RecurrentCache(checkpoint_min_pos=99), CausalCache())
    wrapper.init(np.float32, 2, 8, 8)
    wrapper.start_forward(range(4), [0] * 4)
    wrapper.copy_prefix(0, 1, 2)
    with pytest.raises(NotSupported, match="its K and V end at 2"):
        wrapper.start_forward([4], [1])
    assert cache.prepare_restore(1, 3) == 3
    cache.remove(1, 3)
    cache.start_forward([3], [1])
    assert cache.get_state("s", (1,)).item() == 0 + 1 + 2


# Found: such a state could be shortened, until it seemed to be that of the prefix.
@pytest.mark.parametrize("first", [3, 4])
def test_what_a_prefix_lacks_cannot_be_removed_from_its_state(first: int) -> None:
    cache = forked()
    for _ in range(4):
        cache.remove(1, first, first + 1)
        assert not cache.can_resume(1, 2)
        with pytest.raises(NotSupported):
            cache.start_forward([3], [1])
    cache.remove(1, 1, 5)
    with pytest.raises(NotSupported):
        cache.start_forward([1], [1])
    cache.remove(1, 0)
    cache.start_forward([0], [1])
    assert cache.get_state("s", (1,)).item() == 0
