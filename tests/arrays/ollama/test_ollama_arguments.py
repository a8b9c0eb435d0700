"""Integers of thousands of digits and long names: refused by type, in short messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ollama_support import begun, made

from pykvcache.arrays import (
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
from pykvcache.errors import CacheValueError, KvCacheError

HUGE = 10**5000


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


def test_inputs_keep_plain_integers() -> None:
    number = np.array(5)
    item = Input(number, np.int8(-3), np.uint8(255))  # type: ignore[arg-type]
    number[...] = 6
    assert item == Input(5, -3, 255)
    assert {type(n) for n in (item.token, item.multimodal_hash, item.same_batch)} == {int}
    inputs = InputCache(None, kv_size=10, num_slots=1, batch_size=4)
    assert inputs.shift_discard([item, *[Input(2)] * 9], 0) == 10
