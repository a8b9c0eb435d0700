"""Several caches as one: the same as its caches side by side, and refused as one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama_support import add_shift, assert_same, made, seen, state, tokens, twin

from pykvcache.arrays import (
    Cache,
    CacheConfig,
    CausalCache,
    EncoderCache,
    InputCache,
    RecurrentCache,
    SWACache,
    SWAMemCache,
    WrapperCache,
)
from pykvcache.errors import (
    CacheLayerError,
    CacheOrderError,
    CacheValueError,
    ClosedError,
    KvCacheError,
    NotSupported,
    ReentryError,
)
from support.examples import examples


class Fault(Exception):
    """Raised by a foreign cache."""


class Foreign:
    """An implementation of `Cache` that is not ours: it records its calls and may fail."""

    def __init__(self, fails: str = "") -> None:
        self.inner = CausalCache(add_shift)
        self.fails = fails
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("inner", "fails", "calls"):
            return super().__getattribute__(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            if name == self.fails:
                raise Fault(name)
            return getattr(self.inner, name)(*arguments)

        return call

    def _unused(self, *arguments: Any) -> Any: ...

    init = set_config = close = set_layer = start_forward = put = get = _unused
    set_causal = copy_prefix = can_resume = remove = _unused


def put_all(wrapper: WrapperCache, values: Any, sequences: Any, positions: Any) -> None:
    """Store one number per token in layer 0 of every cache."""
    wrapper.start_forward(positions, sequences)
    numbers = np.array(values, np.float32).reshape(-1, 1, 1)
    wrapper.set_layer(0)
    for i in range(len(wrapper.caches)):
        wrapper.set_layer_type(i)
        wrapper.put(numbers, numbers)
    wrapper.set_layer_type(0)


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_a_wrapper_is_its_caches_side_by_side_or_refuses_as_one(data: st.DataObject) -> None:
    alone = [made(CausalCache(add_shift), 2, 6, 4), made(SWAMemCache(2, 3, add_shift), 2, 6, 4)]
    wrapped = [CausalCache(add_shift), SWAMemCache(2, 3, add_shift)]
    nested = data.draw(st.booleans(), label="nested")
    wrapper: Any = WrapperCache(wrapped[0], WrapperCache(wrapped[1]) if nested else wrapped[1])
    made(wrapper, 2, 6, 4)
    number = 0.0
    for _ in range(data.draw(st.integers(1, 15), label="steps")):
        seq = data.draw(st.integers(0, 2), label="seq")
        a, b = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 4)), label="numbers")
        kind = data.draw(st.sampled_from(["forward", "forward", "remove", "cut", "copy"]))
        if kind == "forward":
            count = max(b, 1)
            call: Any = ("start_forward", (list(range(a, a + count)), [seq] * count))
        elif kind == "copy":
            call = ("copy_prefix", (seq, b % 3, a))
        else:
            call = ("remove", (seq, a) if kind == "remove" else (seq, a, a + b))
        probes = [twin(cache) for cache in alone]
        try:
            for cache in probes:
                getattr(cache, call[0])(*call[1])
        except KvCacheError as error:
            with pytest.raises(type(error)):
                getattr(wrapper, call[0])(*call[1])
        else:
            alone = probes
            getattr(wrapper, call[0])(*call[1])
            if kind == "forward":
                assert wrapper.underlying_cache is wrapped[0]
                number += 1
                arrays = np.full((len(call[1][0]), 1, 1), number, np.float32)
                for i, cache in enumerate(alone):
                    cache.set_layer(0)
                    cache.put(arrays, arrays)
                    wrapper.set_layer_type(i)
                    wrapper.put(arrays, arrays)
                    assert_same([*cache.get()], [*wrapper.get()])
        for cache, other in zip(alone, wrapped, strict=True):
            assert_same(state(cache), state(other))
        for pos in range(9):
            assert wrapper.can_resume(seq, pos) == all(c.can_resume(seq, pos) for c in alone)


def test_life_cycle_and_layer_go_to_all_caches() -> None:
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


def test_a_layer_type_is_checked() -> None:
    wrapper = made(WrapperCache(CausalCache(), SWACache(1)))
    put_all(wrapper, range(3), [0] * 3, range(3))
    for wrong, error in ((2, CacheLayerError), (-1, CacheLayerError), (True, TypeError)):
        with pytest.raises(error):
            wrapper.set_layer_type(wrong)
    # A pass that the wrapper begins closes the fast path of put.
    wrapper.start_forward([3], [0])
    with pytest.raises(CacheValueError):
        wrapper.put(np.ones((3, 1, 1)), np.ones((3, 1, 1)))


def test_multimodal_and_set_causal_go_to_all_caches() -> None:
    encoder, foreign = EncoderCache(), Foreign()
    wrapper = made(WrapperCache(encoder, foreign, SWACache(1)))
    wrapper.start_forward(iter([4, 5, 6]), iter([0, 0, 0]), multimodal=iter([0, 1]))
    assert foreign.calls[-1] == ("start_forward", ([4, 5, 6], [0, 0, 0], False, [0, 1]))
    wrapper.put(np.ones(3), np.ones(3))
    wrapper.set_causal([0])
    assert foreign.calls[-1] == ("set_causal", ([0],))
    wrapper.set_layer_type(2)
    wrapper.put(np.ones((3, 1, 1)), np.ones((3, 1, 1)))
    assert wrapper.get()[2].tolist()[0] == [0, 0, 0]
    with pytest.raises(CacheValueError):
        wrapper.set_causal([3])
    assert encoder.encoder_cached
    wrapper.remove(0, 5)
    assert not encoder.encoder_cached
    with pytest.raises(CacheValueError, match="multimodal holds"):
        wrapper.start_forward([4], [0], multimodal=[1])


def test_init_config_and_copies_are_refused_as_one() -> None:
    causal = CausalCache()
    wrapper = made(WrapperCache(causal, EncoderCache()))
    put_all(wrapper, [1, 2], [0, 0], [0, 1])
    before = state(causal)
    with pytest.raises(NotSupported, match="requested: 2"):
        wrapper.init(np.float32, 2, 16, 4)
    with pytest.raises(NotSupported):
        wrapper.copy_prefix(0, 1, 2)
    assert_same(before, state(causal))
    assert seen(causal, 1, 2) == [0.5]
    failing = made(WrapperCache(CausalCache(), foreign := Foreign()))
    foreign.fails = "init"
    with pytest.raises(Fault):
        made(failing)
    with pytest.raises(CacheOrderError, match="WrapperCache was not set up"):
        failing.set_layer(0)
    fresh, configured = CausalCache(), CausalCache()
    configured.set_config(CacheConfig())
    with pytest.raises(CacheOrderError):
        WrapperCache(fresh, configured).set_config(CacheConfig(cache_padding=2))
    assert fresh.config is None
    with pytest.raises(NotSupported, match="continues at 0"):
        made(WrapperCache(RecurrentCache(), RecurrentCache())).start_forward([2], [0])


def test_caches_and_order_of_calls_are_checked() -> None:
    cache = CausalCache()
    inner = WrapperCache(cache)
    for caches in ((cache, cache), (cache, inner), (inner, WrapperCache(cache))):
        with pytest.raises(CacheValueError, match="each only once"):
            WrapperCache(*caches)
    with pytest.raises(CacheValueError, match="at least one"):
        WrapperCache()
    with pytest.raises(TypeError, match="not dict"):
        WrapperCache(cache, {})  # type: ignore[arg-type]


# Caches that fail half-way ---------------------------------------------------------------


@pytest.mark.parametrize("fails", ["start_forward", "remove", "copy_prefix"])
def test_a_sequence_that_differs_between_caches_is_refused(fails: str) -> None:
    failing = Foreign()
    wrapper = made(WrapperCache(CausalCache(), failing, CausalCache()), capacity=12)
    put_all(wrapper, [0, 1], [0, 1], [0, 0])
    failing.fails = fails
    call: dict[str, Any] = {
        "start_forward": lambda: wrapper.start_forward([1], [0]),
        "remove": lambda: wrapper.remove(0, 0, 1),
        "copy_prefix": lambda: wrapper.copy_prefix(1, 0, 1),
    }
    with pytest.raises(Fault, match=fails):
        call[fails]()
    failing.fails = ""
    for refused in (
        lambda: wrapper.start_forward([1], [0]),
        lambda: wrapper.remove(0, 1),
        lambda: wrapper.copy_prefix(0, 5, 1),
    ):
        with pytest.raises(CacheOrderError, match="only some of the caches"):
            refused()
    assert not wrapper.can_resume(0, 1)
    assert wrapper.can_resume(1, 1)
    wrapper.start_forward([1], [0], reserve=True)
    wrapper.remove(0, 0)
    wrapper.start_forward([0], [0])


# Callbacks and copies, of all caches ---------------------------------------------------------


def test_a_shift_fn_may_not_use_the_cache() -> None:
    refused: list[str] = []
    attempts: list[Any] = [
        lambda: cache.remove(0, 0),
        lambda: cache.put(np.ones((5, 1, 1), np.float32), np.ones((5, 1, 1), np.float32)),
        lambda: cache.get(),
        lambda: cache.start_forward([9], [0]),
        lambda: cache.close(),
        lambda: pickle.dumps(cache),
        lambda: wrapper.remove(0, 0),
        lambda: wrapper.start_forward([9], [0]),
    ]

    def shift_fn(layer: int, key: Any, shift: Any) -> Any:
        for attempt in attempts:
            with pytest.raises(ReentryError, match="from within one of its own calls") as caught:
                attempt()
            refused.append(str(caught.value))
        return key + shift[:, None, None]

    cache, other = CausalCache(shift_fn), CausalCache(add_shift)
    wrapper = made(WrapperCache(other, cache), capacity=8)
    put_all(wrapper, range(5), [0] * 5, range(5))
    wrapper.remove(0, 1, 2)
    assert len(refused) == len(attempts)
    assert_same(state(cache), state(other))


class Model:
    """Stands for a model, which must not be copied with the cache of its keys."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot copy a lock")

    def rotate(self, layer: int, key: Any, shift: Any) -> Any:
        return key


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda cache: cache,
        lambda cache: InputCache(WrapperCache(cache), 16, 1, 4),
    ],
)
def test_copies_share_the_shift_fn(wrapped: Any) -> None:
    for how in (copy.copy, copy.deepcopy):
        original = wrapped(CausalCache(Model().rotate))
        other = how(original)
        assert other is not original
        if isinstance(original, InputCache):
            other.load_slot(tokens(1, 2))
            assert other.cache is not original.cache
            assert not original.slots[0].in_use
