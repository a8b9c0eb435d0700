"""Code of the caller's that uses a cache in the middle of a call of that cache."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ollama_support import (
    add_shift,
    distinct,
    made,
    one,
    picture,
)

from pykvcache.arrays import (
    CacheConfig,
    CausalCache,
    EncoderCache,
    FlatKVCache,
    SWACache,
    WrapperCache,
)
from pykvcache.errors import (
    CacheValueError,
    KvCacheError,
    ReentryError,
)


class Calling:
    """An integer that does something when it is read."""

    def __init__(self, number: int, call: Callable[[], Any]) -> None:
        self.number, self.call = number, call

    def __index__(self) -> int:
        self.call()
        return self.number


# Found: a shift_fn that removed tokens left cells that minus one sequences had.
def test_a_shift_fn_may_not_use_the_cache() -> None:
    refused: list[str] = []
    attempts: list[Callable[[], Any]] = [
        lambda: cache.remove(0, 0),
        lambda: cache.put(one(9), one(9)),
        lambda: cache.get(),
        lambda: cache.set_layer(0),
        lambda: cache.start_forward([9], [0]),
        lambda: cache.copy_prefix(0, 1, 2),
        lambda: cache.can_resume(0, 1),
        lambda: cache.set_causal([0]),
        lambda: cache.init(np.float32, 1, 8, 8),
        lambda: cache.close(),
        lambda: cache.set_config(CacheConfig()),
        lambda: copy.copy(cache),
        lambda: copy.deepcopy(cache),
        lambda: pickle.dumps(cache),
        lambda: wrapper.remove(0, 0),
        lambda: wrapper.set_layer(1),
        lambda: wrapper.start_forward([9], [0]),
        lambda: wrapper.init(np.float32, 1, 8, 8),
        lambda: wrapper.close(),
    ]

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        for attempt in attempts:
            with pytest.raises(ReentryError, match="from within one of its own calls") as caught:
                attempt()
            refused.append(str(caught.value))
        return key + shift[:, None, None]

    cache, other = CausalCache(shift_fn), CausalCache(add_shift)
    wrapper = WrapperCache(other, cache)
    wrapper.init(np.float32, 1, 8, 8)
    wrapper.start_forward(range(5), [0] * 5)
    for kind in (0, 1):
        wrapper.set_layer_type(kind)
        wrapper.set_layer(0)
        wrapper.put(np.arange(5.0).reshape(5, 1, 1), np.arange(5.0).reshape(5, 1, 1))
    wrapper.remove(0, 1, 2)
    assert len(refused) == len(attempts)
    assert picture(copy.copy(other)) == picture(copy.copy(cache))
    cache.put(*[np.arange(5.0).reshape(5, 1, 1)] * 2)


def test_a_shift_fn_that_raises_for_it_leaves_the_cache_as_it_was() -> None:
    cache = CausalCache(lambda layer, key, shift: cache.remove(0, 0))  # type: ignore[arg-type]
    distinct(made(cache), 0, 5)
    before = picture(cache)
    with pytest.raises(ReentryError):
        cache.remove(0, 1, 2)
    assert picture(cache) == before
    cache.remove(0, 3)


# Found: truncate compared with the length before the integer had changed it.
def test_integers_that_use_the_cache_are_read_first() -> None:
    flat = FlatKVCache(1, 1, 1)

    def store(number: float) -> None:
        flat.append(0, np.array([number], "f4"), np.array([number], "f4"))
        flat.advance()

    for number in (1, 2, 3):
        store(number)

    def other() -> None:
        flat.clear()
        store(9)

    with pytest.raises(CacheValueError, match="length is 3"):
        flat.truncate(Calling(3, other))
    assert flat.k(0).tolist() == [9]
    cache = CausalCache()
    cache.init(np.float32, 1, 8, 4)
    cache.start_forward([0, 1], [0, 0])
    cache.put(*[np.ones((2, 1, 1))] * 2)
    with pytest.raises(CacheValueError, match="rows 0 to 0"):
        cache.set_causal([Calling(1, lambda: cache.start_forward([2], [0]))])
    cache.set_causal([Calling(0, lambda: cache.start_forward([3], [0]))])
    assert cache.get()[2].shape == (1, 4)
    # What was set up anew meanwhile has its own limits, and is what the batch goes into.
    for kind in (CausalCache, EncoderCache, lambda: WrapperCache(SWACache(2))):
        again: Any = kind()
        again.init(np.float32, 1, 8, 4)
        small = Calling(0, lambda again=again: again.init(np.float32, 1, 8, 1))
        with pytest.raises(CacheValueError, match="1 to 1 are possible"):
            again.start_forward([small, 1], [0, 0])
        closing = Calling(0, again.close)
        with pytest.raises(KvCacheError, match="closed"):
            again.start_forward([closing], [0])
