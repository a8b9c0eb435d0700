"""What is handed over: integers and arrays of any kind, and memory that is the cache's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ollama_support import (
    Foreign,
    begun,
    made,
    one,
    pair,
)

from pykvcache.arrays import (
    CacheConfig,
    CausalCache,
    CheckpointRing,
    EncoderCache,
    FlatKVCache,
    Input,
    InputCache,
    RecurrentCache,
    Slot,
    WrapperCache,
)
from pykvcache.errors import (
    CacheDTypeError,
    CacheOrderError,
    CacheValueError,
    KvCacheError,
)

HUGE = 10**5000


# Found: `put(value, key)` of what `get` returned left V in both.
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("kind", [CausalCache, EncoderCache])
def test_what_get_returned_may_be_put_the_other_way_round(kind: Any, permuted: bool) -> None:
    cache = kind()
    cache.set_config(CacheConfig(permuted_v=permuted))
    cache.init(np.float32, 1, 4, 4)
    cache.start_forward([0], [0])
    for _ in range(3):
        cache.put(one(1), one(2))
        key, value, _ = cache.get()
        cache.put(value.reshape(1, 1, 1), key.reshape(1, 1, 1))
        assert pair(cache) == (2, 1)


def test_a_flat_cache_takes_what_it_returned_the_other_way_round() -> None:
    cache = FlatKVCache(1, 1, 1)
    cache.append(0, np.array([1.0], "f4"), np.array([2.0], "f4"))
    cache.advance()
    key, value = cache.k(0), cache.v(0)
    cache.clear()
    cache.append(0, value, key)
    assert (cache.k(0).item(), cache.v(0).item()) == (2, 1)


# Found: the key of what is no array was stored before its value was looked at.
@pytest.mark.parametrize("kind", [CausalCache, EncoderCache])
def test_key_and_value_are_converted_before_one_is_stored(kind: Any) -> None:
    for _ in range(2):
        cache = begun(kind())
        with pytest.raises(TypeError):
            cache.put(one(7), Foreign(one(8), fails=True))
        with pytest.raises(TypeError):
            cache.put(Foreign(one(7)), Foreign(one(8), fails=True))
        assert pair(cache) == (1, 2)
        cache.put(Foreign(one(7)), Foreign(one(8)))
        assert pair(cache) == (7, 8)


# Found: under np.seterr(all="raise") a value too large was a FloatingPointError, after the key.
@pytest.mark.parametrize("kind", ["raise", "warn", "call"])
def test_a_value_too_large_is_infinite_whatever_seterr_says(kind: str) -> None:
    def call(*arguments: Any) -> None:
        raise AssertionError

    flat = FlatKVCache(1, 1, 1, dtype=np.float16)
    encoder = made(EncoderCache())
    encoder.start_forward([0], [0])
    encoder.put(one(1, np.float16), one(2, np.float16))
    causal = begun(CausalCache(lambda layer, key, shift: np.full_like(key, 1e30, np.float64)), "f2")
    with np.errstate(all=kind, call=call):
        causal.put(one(3), one(1e30, np.float64))
        encoder.put(one(3), one(1e30, np.float64))
        flat.append(0, np.array([3.0]), np.array([1e30]))
        assert pair(causal) == pair(encoder) == (3, np.inf)
        assert flat.v(0).tolist() == [np.inf]
        causal.start_forward([1], [0])
        causal.remove(0, 0, 1)
    causal.start_forward([1], [0])
    assert causal.get()[0].ravel().tolist()[1] == np.inf


# Found: the arrays of a checkpoint could be written to.
def test_what_a_checkpoint_holds_is_read_only() -> None:
    ring = CheckpointRing(2)
    ring.store(ring.record(3), "a", np.ones(2))
    array = ring.at(0)[1]["a"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 7
    given = np.ones(2)
    ring.store(0, "b", given)
    given[0] = 7
    assert ring.at(0)[1]["b"].tolist() == [1, 1]


# Integers -------------------------------------------------------------------------------


# Found: uint8(255) overflowed in a sum, and a 0-d array stayed the caller's.
def test_inputs_keep_plain_integers() -> None:
    number = np.array(5)
    item = Input(number, np.int8(-3), np.uint8(255))  # type: ignore[arg-type]
    number[...] = 6
    assert item == Input(5, -3, 255)
    assert {type(n) for n in (item.token, item.multimodal_hash, item.same_batch)} == {int}
    inputs = InputCache(None, kv_size=10, num_slots=1, batch_size=4)
    rest = [Input(2)] * 9
    counts = [
        inputs.shift_discard([Input(1, same_batch=n), *rest], 0) for n in (255, np.uint8(255))
    ]
    assert counts == [10, 10]


def calls() -> list[Callable[[], Any]]:
    causal, recurrent = begun(), begun(RecurrentCache())
    encoder, flat = made(EncoderCache()), FlatKVCache(1, 1, 1)
    wrapper = begun(WrapperCache(CausalCache()))
    inputs = InputCache(None, 8, 1, 1)
    every: list[Callable[[], Any]] = [
        call
        for cache in (causal, recurrent, encoder, wrapper)
        for call in (
            lambda cache=cache: cache.set_layer(-HUGE),
            lambda cache=cache: cache.remove(0, HUGE),
            lambda cache=cache: cache.remove(0, 0, -HUGE),
            lambda cache=cache: cache.remove(HUGE, 0),
            lambda cache=cache: cache.can_resume(0, HUGE),
            lambda cache=cache: cache.can_resume(-HUGE, 0),
            lambda cache=cache: cache.copy_prefix(-HUGE, 0, 1),
            lambda cache=cache: cache.start_forward([HUGE], [0]),
            lambda cache=cache: cache.start_forward([0], [HUGE]),
            lambda cache=cache: cache.set_causal([HUGE]),
        )
    ]
    return [
        *every,
        lambda: encoder.init(np.float32, HUGE, 1, 1),
        lambda: CausalCache().init(np.float32, HUGE, 1, 1),
        lambda: CausalCache().init(np.float32, 1, HUGE, 1),
        lambda: WrapperCache(CausalCache()).init(np.float32, 1, 1, HUGE),
        lambda: wrapper.set_layer_type(HUGE),
        lambda: recurrent.prepare_restore(0, HUGE),
        lambda: recurrent.get_state("s", (HUGE,)),
        lambda: RecurrentCache(checkpoint_count=HUGE),
        lambda: CheckpointRing(HUGE),
        lambda: InputCache(None, HUGE, 1, 1),
        lambda: InputCache(None, 8, HUGE, 1),
        lambda: inputs.shift_slot(Slot(0), HUGE),
        lambda: flat.append(HUGE, np.ones(1), np.ones(1)),
        lambda: flat.k(HUGE),
        lambda: flat.truncate(HUGE),
        lambda: FlatKVCache(HUGE, 1, 1),
        lambda: FlatKVCache(1, 1, HUGE),
        lambda: FlatKVCache.with_capacity(1, 1, 1, HUGE),
    ]


# Found: Python refuses to write such an integer, and its plain ValueError took the error's place.
@pytest.mark.parametrize("number", range(len(calls())))
def test_integers_of_5000_digits_are_refused_by_type(number: int) -> None:
    with pytest.raises(KvCacheError) as caught:
        calls()[number]()
    assert len(str(caught.value)) < 300


def test_messages_stay_short() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    cache = CausalCache()
    cache.init(np.float32, 1, 10, 10)
    with pytest.raises(CacheValueError) as caught:
        cache.start_forward([0], [0], multimodal=np.arange(10**5))
    assert len(str(caught.value)) < 200
    record = np.zeros(1, [("x" * 10**5, "f4")])
    for call in (lambda: cache.start_forward(record, [0]), lambda: begun().put(record, record)):
        with pytest.raises(TypeError) as wrong:
            call()
        assert len(str(wrong.value)) < 300
    recurrent = begun(RecurrentCache())
    for name in ("x" * 10**6, Bad()):
        recurrent.put_state(name, np.zeros((1, 2)))
        for call in (
            lambda name=name: recurrent.get_state(name, (3,)),
            lambda name=name: recurrent.put_state(name, np.zeros((2, 2))),
        ):
            with pytest.raises(CacheValueError) as caught:
                call()
            assert len(str(caught.value)) < 300


# Found: RecurrentCache(checkpoint_count=70_000) was accepted, and every pass took cells in vain.
def test_more_checkpoints_than_a_ring_has_are_refused_at_once() -> None:
    with pytest.raises(CacheValueError, match="checkpoint_count"):
        RecurrentCache(checkpoint_count=2**16 + 1)
    cache = RecurrentCache(checkpoint_count=2**16)
    cache.init(np.float32, 1, 2, 2)
    cache.start_forward([0], [0])


def test_types_of_errors_are_as_before() -> None:
    cache = begun()
    for wrong in (one(1)[0], np.ones((2, 1, 1))):
        with pytest.raises(CacheValueError):
            cache.put(wrong, wrong)
    with pytest.raises(CacheDTypeError):
        cache.put(one(1), np.array([[["x"]]]))
    assert pair(cache) == (1, 2)
    with pytest.raises(CacheOrderError):
        made(CausalCache()).put(one(1), "x")
