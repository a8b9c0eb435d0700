"""Several caches as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ollama_support import INF, add_shift, assert_same, fill, forward, picture, seen, state, twin

from pykvcache.arrays import (
    Cache,
    CacheConfig,
    CausalCache,
    EncoderCache,
    SWACache,
    SWAMemCache,
    WrapperCache,
)
from pykvcache.errors import (
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ClosedError,
    KvCacheFull,
    NotSupported,
)


class Fault(Exception):
    """What a cache from elsewhere raises."""


class Foreign:
    """A cache that is not ours: it follows the protocol, counts its calls and may fail."""

    def __init__(self, fails: str = "") -> None:
        self.inner = CausalCache(add_shift)
        self.fails = fails
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.calls.append((name, arguments))
        if name == self.fails:
            raise Fault(name)
        return getattr(self.inner, name)(*arguments, **options)

    def init(self, *arguments: Any) -> Any:
        return self._call("init", *arguments)

    def set_config(self, *arguments: Any) -> Any:
        return self._call("set_config", *arguments)

    def close(self) -> Any:
        return self._call("close")

    def set_layer(self, *arguments: Any) -> Any:
        return self._call("set_layer", *arguments)

    def start_forward(self, *arguments: Any, **options: Any) -> Any:
        return self._call("start_forward", *arguments, **options)

    def put(self, *arguments: Any) -> Any:
        return self._call("put", *arguments)

    def get(self) -> Any:
        return self._call("get")

    def set_causal(self, *arguments: Any) -> Any:
        return self._call("set_causal", *arguments)

    def copy_prefix(self, *arguments: Any) -> Any:
        return self._call("copy_prefix", *arguments)

    def can_resume(self, *arguments: Any) -> Any:
        return self._call("can_resume", *arguments)

    def remove(self, *arguments: Any) -> Any:
        return self._call("remove", *arguments)


def put_all(wrapper: WrapperCache, values: Any, sequences: Any, positions: Any) -> None:
    """Store one number per token in layer 0 of every cache."""
    wrapper.start_forward(positions, sequences)
    numbers = np.array(values, np.float32).reshape(-1, 1, 1)
    wrapper.set_layer(0)
    for i in range(len(wrapper.caches)):
        wrapper.set_layer_type(i)
        wrapper.put(numbers, numbers)
    wrapper.set_layer_type(0)


# A.4 WrapperCache broadcasts Init, SetConfig, Close and SetLayer.
def test_wrapper_broadcasts_life_cycle() -> None:
    foreign, causal, window = Foreign(), CausalCache(), SWACache(2)
    wrapper = WrapperCache(foreign, causal, WrapperCache(window))
    assert isinstance(wrapper, Cache)
    wrapper.set_config(CacheConfig(cache_padding=4))
    wrapper.init(np.float16, 1, 9, 4)
    wrapper.set_layer(3)
    assert foreign.calls == [
        ("set_config", (CacheConfig(cache_padding=4),)),
        ("init", (np.float16, 1, 9, 4)),
        ("set_layer", (3,)),
    ]
    for cache in (causal, window):
        assert cache.config == CacheConfig(cache_padding=4)
        assert cache.dtype == np.float16
    with pytest.raises(CacheOrderError, match="config cannot be changed"):
        wrapper.set_config(CacheConfig())
    wrapper.close()
    assert foreign.calls[-1] == ("close", ())
    for cache in (wrapper, causal, window):
        with pytest.raises(ClosedError):
            cache.start_forward([0], [0])


# A.4 WrapperCache: SetLayerType chooses the cache for Get and Put; UnderlyingCache.
def test_wrapper_puts_and_gets_in_the_chosen_cache() -> None:
    caches = CausalCache(), SWACache(1)
    wrapper = WrapperCache(*caches)
    wrapper.init(np.float32, 1, 16, 4)
    wrapper.start_forward(range(3), [0] * 3)
    for i, cache in enumerate(caches):
        wrapper.set_layer_type(i)
        assert wrapper.underlying_cache is cache
        numbers = np.arange(3.0).reshape(3, 1, 1) + 10 * i
        wrapper.put(numbers, numbers)
    assert wrapper.get()[0].ravel().tolist() == [10, 11, 12]
    assert wrapper.get()[2].tolist()[2] == [-INF, 0, 0]
    wrapper.set_layer_type(0)
    assert wrapper.get()[0].ravel().tolist() == [0, 1, 2]
    assert wrapper.get()[2].tolist()[2] == [0, 0, 0]
    for wrong, error in ((2, CacheLayerError), (-1, CacheLayerError), (True, TypeError)):
        with pytest.raises(error):
            wrapper.set_layer_type(wrong)
    assert wrapper.underlying_cache is caches[0]


# A.4 WrapperCache: StartForward resets the type to 0.
def test_wrapper_start_forward_resets_the_layer_type() -> None:
    wrapper = WrapperCache(CausalCache(), SWACache(1))
    wrapper.init(np.float32, 1, 16, 4)
    wrapper.set_layer_type(1)
    wrapper.start_forward([0], [0])
    assert wrapper.underlying_cache is wrapper.caches[0]


# A.4 WrapperCache: what can be known before is refused with nothing changed in any cache.
def test_wrapper_start_forward_is_all_or_nothing() -> None:
    roomy, tight = CausalCache(), SWACache(2)
    wrapper = WrapperCache(roomy, tight)
    wrapper.init(np.float32, 1, 12, 2)
    for seq, first in ((0, 0), (0, 2), (1, 0)):
        put_all(wrapper, [first, first + 1], [seq, seq], [first, first + 1])
    others = [twin(cache) for cache in (roomy, tight)]
    # A third sequence fits the first cache and not the second.
    with pytest.raises(KvCacheFull, match="cache: 4 batch: 2"):
        wrapper.start_forward([0, 1], [2, 2])
    for cache, other in zip((roomy, tight), others, strict=True):
        assert_same(state(cache), state(other))
        cache.remove(1, 0)
        other.remove(1, 0)
        assert seen(cache, 0, 4) == seen(other, 0, 4)


# A.4 WrapperCache: StartForward unwinds the caches already started and returns the error.
@pytest.mark.parametrize("reserve", [False, True])
def test_wrapper_unwinds_when_a_foreign_cache_fails(reserve: bool) -> None:
    first, second, failing = CausalCache(), Foreign(), Foreign()
    wrapper = WrapperCache(first, second, failing)
    wrapper.init(np.float32, 1, 12, 4)
    put_all(wrapper, [0, 1], [0, 1], [0, 0])
    second.calls.clear()
    failing.fails = "start_forward"
    wrapper.set_layer_type(1)
    with pytest.raises(Fault):
        wrapper.start_forward([2, 1, 1], [0, 0, 1], reserve=reserve)
    removed = [arguments for name, arguments in second.calls if name == "remove"]
    assert removed == ([] if reserve else [(0, 1), (1, 1)])
    # The type is reset by a pass that began, not by one that failed.
    assert wrapper.underlying_cache is second
    assert seen(first, 0, 1) == [0, 0.5]
    assert seen(second.inner, 1, 1) == [0.5, 1]


# Found: the caches before a foreign one that could not be cut stayed started, and nothing said so.
@pytest.mark.parametrize("nested", [False, True])
def test_wrapper_marks_what_it_cannot_unwind(nested: bool) -> None:
    first, second, last, failing = CausalCache(), Foreign(), Foreign(), Foreign()
    inner = WrapperCache(second) if nested else second
    wrapper = WrapperCache(first, inner, last, failing)
    wrapper.init(np.float32, 1, 12, 4)
    put_all(wrapper, [0, 1], [0, 1], [0, 0])
    before = picture(first)
    second.fails, failing.fails = "remove", "start_forward"
    with pytest.raises(Fault, match="start_forward"):
        wrapper.start_forward([2, 1, 1], [0, 0, 1])
    assert picture(first) == before
    assert [arguments for name, arguments in last.calls if name == "remove"] == [(0, 1), (1, 1)]
    second.fails = failing.fails = ""
    for seq in (0, 1):
        assert not wrapper.can_resume(seq, 1)
        with pytest.raises(CacheOrderError, match="only some of the caches"):
            wrapper.start_forward([1], [seq])
        wrapper.remove(seq, 0)
        wrapper.start_forward([0], [seq])


# A pass that the wrapper begins takes the short way through put from the layer before.
def test_a_layer_of_the_pass_before_does_not_take_its_number_of_tokens() -> None:
    cache = CausalCache()
    wrapper = WrapperCache(cache)
    wrapper.init(np.float32, 1, 16, 4)
    put_all(wrapper, [0], [0], [0])
    wrapper.start_forward([1, 2, 3], [0] * 3)
    with pytest.raises(CacheValueError):
        wrapper.put(np.ones((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32))


# Decided: the wrapper passes multimodal on.
def test_wrapper_passes_multimodal_on() -> None:
    encoder, foreign = EncoderCache(), Foreign()
    wrapper = WrapperCache(encoder, foreign)
    wrapper.init(np.float32, 1, 12, 4)
    wrapper.start_forward(iter([4, 5, 6]), iter([0, 0, 0]), multimodal=iter([0, 1]))
    assert foreign.calls[-1] == ("start_forward", ([4, 5, 6], [0, 0, 0], False, [0, 1]))
    wrapper.put(np.ones(3), np.ones(3))
    assert encoder.encoder_cached
    wrapper.remove(0, 5)
    assert not encoder.encoder_cached
    with pytest.raises(CacheValueError, match="multimodal holds"):
        wrapper.start_forward([4], [0], multimodal=[1])


# A.4 WrapperCache broadcasts CopyPrefix.
def test_wrapper_copies_prefixes_in_all_caches() -> None:
    wrapper = WrapperCache(CausalCache(), SWAMemCache(2, 8))
    wrapper.init(np.float32, 2, 16, 4)
    put_all(wrapper, [0, 1, 2], [0] * 3, range(3))
    wrapper.copy_prefix(0, 1, 2)
    for cache in wrapper.caches:
        assert seen(cache, 1, 2) == [0, 0.5, 1]
    with pytest.raises(CacheValueError):
        wrapper.copy_prefix(0, 1, -1)
    # An encoder cache cannot copy: then none does.
    causal = CausalCache()
    mixed = WrapperCache(causal, EncoderCache())
    mixed.init(np.float32, 1, 16, 4)
    put_all(mixed, [0, 1], [0, 0], [0, 1])
    with pytest.raises(NotSupported):
        mixed.copy_prefix(0, 1, 2)
    assert seen(causal, 1, 2) == [0.5]


# A.4 WrapperCache: CanResume is the AND of all.
def test_wrapper_can_resume_if_all_can() -> None:
    wrapper = WrapperCache(CausalCache(), SWACache(2))
    wrapper.init(np.float32, 1, 16, 1)
    for pos in range(6):
        put_all(wrapper, [pos], [0], [pos])
    assert [wrapper.can_resume(0, pos) for pos in range(8)] == [False] * 5 + [True] * 2 + [False]


# A.4 WrapperCache: Remove stops at the first error; asked before, so that none has acted.
def test_wrapper_remove_is_all_or_nothing() -> None:
    first, second = CausalCache(add_shift), SWACache(3, add_shift)
    wrapper = WrapperCache(first, second)
    wrapper.init(np.float32, 1, 16, 1)
    for pos in range(8):
        put_all(wrapper, [pos], [0], [pos])
    others = [twin(cache) for cache in wrapper.caches]
    with pytest.raises(NotSupported, match="dropped"):
        wrapper.remove(0, 5, 7)
    for cache, other in zip(wrapper.caches, others, strict=True):
        assert_same(state(cache), state(other))
    wrapper.remove(0, 5, 6)
    assert seen(first, 0, 7) == [0, 0.5, 1, 2, 3, 4, 5, 6]
    assert seen(second, 0, 7) == [0.5, 4, 5, 6]
    wrapper.remove(0, 0)
    assert seen(first, 0, 0) == seen(second, 0, 0) == [0.5]


# A.4 WrapperCache: Remove stops at the first error, of a foreign cache.
def test_wrapper_remove_stops_at_the_first_error() -> None:
    first, failing, last = Foreign(), Foreign("remove"), Foreign()
    wrapper = WrapperCache(first, failing, last)
    wrapper.init(np.float32, 1, 16, 4)
    with pytest.raises(Fault):
        wrapper.remove(0, 1, 2)
    assert ("remove", (0, 1, 2)) in first.calls
    assert "remove" not in [name for name, _ in last.calls]


# Decided: set_causal is part of the protocol; here it goes to every cache.
def test_wrapper_set_causal_reaches_every_cache() -> None:
    wrapper = WrapperCache(CausalCache(), SWACache(1), EncoderCache())
    wrapper.init(np.float32, 1, 16, 4)
    put_all(wrapper, range(3), [0] * 3, range(3))
    wrapper.set_causal([0])
    for i in (0, 1):
        wrapper.set_layer_type(i)
        assert wrapper.get()[2].tolist()[0] == [0, 0, 0]
    with pytest.raises(CacheValueError):
        wrapper.set_causal([3])


# Init and SetConfig: one cache that refuses keeps the others as they were.
def test_wrapper_init_and_config_are_all_or_nothing() -> None:
    causal, encoder = CausalCache(), EncoderCache()
    wrapper = WrapperCache(causal, encoder)
    wrapper.init(np.float32, 1, 16, 4)
    put_all(wrapper, [1, 2], [0, 0], [0, 1])
    before = state(causal)
    with pytest.raises(NotSupported, match="requested: 2"):
        wrapper.init(np.float32, 2, 16, 4)
    assert_same(before, state(causal))
    fresh, configured = CausalCache(), CausalCache()
    configured.set_config(CacheConfig())
    with pytest.raises(CacheOrderError):
        WrapperCache(fresh, configured).set_config(CacheConfig(cache_padding=2))
    assert fresh.config is None


def test_wrapper_refuses_what_it_cannot_wrap() -> None:
    with pytest.raises(CacheValueError, match="at least one"):
        WrapperCache()
    cache = CausalCache()
    with pytest.raises(CacheValueError, match="none twice"):
        WrapperCache(cache, CausalCache(), cache)
    with pytest.raises(TypeError, match="not dict"):
        WrapperCache(cache, {})  # type: ignore[arg-type]
    wrapper = WrapperCache(cache)
    for call in (
        lambda: wrapper.start_forward([0], [0]),
        lambda: wrapper.set_layer(0),
        lambda: wrapper.remove(0, 0),
        lambda: wrapper.can_resume(0, 0),
        lambda: wrapper.copy_prefix(0, 1, 1),
        lambda: wrapper.set_causal(),
    ):
        with pytest.raises(CacheOrderError, match="WrapperCache was not set up"):
            call()


# A.4 a wrapper of one cache behaves as that cache.
def test_wrapper_of_one_cache_is_that_cache() -> None:
    plain, wrapper = SWACache(2, add_shift), WrapperCache(SWACache(2, add_shift))
    for cache in (plain, wrapper):
        cache.init(np.float32, 2, 16, 2)
        fill(cache, 5, step=2)
        cache.copy_prefix(0, 1, 5)
        cache.remove(0, 0)
    assert forward(plain, [9], [1], [5]) == forward(wrapper, [9], [1], [5])
