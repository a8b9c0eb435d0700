"""Slots, wrappers and the encoder cache against plain models, over random use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama_support import add_shift, assert_same, forward, made, state, tokens, twin

from pykvcache.arrays import (
    CausalCache,
    EncoderCache,
    Input,
    InputCache,
    NoSlot,
    RecurrentCache,
    ReprocessInputs,
    Slot,
    SWAMemCache,
    WrapperCache,
)
from pykvcache.errors import KvCacheError, KvCacheFull

RANDOM = settings(max_examples=80, deadline=None, derandomize=True)


def no_shift(layer: int, key: Any, shift: Any) -> Any:
    """Leave keys as they are, so that they go on naming their tokens."""
    return key


def seen_by(cache: Any, slot: Slot) -> list[int]:
    """Return, by position, the tokens that the next token of a slot attends to."""
    probe = twin(cache)
    keys, mask = forward(probe, [-1], [slot.id], [len(slot.inputs)])
    assert probe.get()[1].ravel().tolist() == keys
    return [int(key) for key, hidden in zip(keys, mask[0], strict=True) if not hidden]


# A.4b: whatever the prompts, a slot's cache holds exactly the inputs that the slot claims.
@RANDOM
@given(data=st.data(), multi_user=st.booleans(), shifts=st.booleans(), kind=st.integers(0, 2))
def test_slots_always_hold_their_inputs(
    data: st.DataObject, multi_user: bool, shifts: bool, kind: int
) -> None:
    shift_fn, window = (no_shift if shifts else None), 3
    cache: Any = (
        CausalCache(shift_fn),
        SWAMemCache(window, 5, shift_fn),
        RecurrentCache(shift_fn, checkpoint_min_pos=0, checkpoint_interval=2),
    )[kind]
    # One token more per slot than its context, for the probe.
    num_slots = data.draw(st.integers(1, 3), label="slots")
    policy = InputCache(cache, 12 * num_slots, num_slots, 4, multi_user, np.float32)
    for _ in range(data.draw(st.integers(1, 8), label="turns")):
        prompt = tokens(*data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=10)))
        given_prompt = list(prompt)
        try:
            slot, rest = policy.load_slot(prompt, data.draw(st.booleans(), label="cache_prompt"))
        except NoSlot:
            assert all(slot.in_use for slot in policy.slots)
            policy.slots[0].in_use = False
            continue
        assert prompt == given_prompt
        assert slot.inputs + rest == prompt
        assert rest
        evaluate(policy, slot, rest)
        if data.draw(st.booleans(), label="shift"):
            keep = data.draw(st.integers(0, 4), label="keep")
            held = len(slot.inputs)
            discard = policy.shift_discard(slot.inputs, keep)
            expected = slot.inputs[:keep] + slot.inputs[keep + discard :]
            try:
                policy.shift_slot(slot, keep)
            except ReprocessInputs as error:
                assert slot.inputs == []
                slot_inputs = error.inputs
                evaluate(policy, slot, slot_inputs)
            assert slot.inputs == (expected if discard else slot.inputs)
            assert len(slot.inputs) == held - discard
        check(cache, slot, window if kind == 1 else 99)
        slot.in_use = data.draw(st.booleans(), label="in use")
        for other in policy.slots:
            if other.inputs and cache.can_resume(other.id, len(other.inputs)):
                check(cache, other, window if kind == 1 else 99)


def evaluate(policy: InputCache, slot: Slot, rest: list[Input]) -> None:
    """Put inputs into the cache, in batches as large as they may be."""
    for first in range(0, len(rest), 4):
        part = rest[first : first + 4]
        positions = range(len(slot.inputs), len(slot.inputs) + len(part))
        forward(policy.cache, [item.token for item in part], [slot.id] * len(part), positions)
        slot.inputs = slot.inputs + part


def check(cache: Any, slot: Slot, window: int) -> None:
    try:
        found = seen_by(cache, slot)
    except KvCacheFull:
        return
    reach = [item.token for item in slot.inputs[-window:]]
    assert sorted(found) == sorted([*reach, -1])


# A.4 WrapperCache: it is its caches side by side, and refuses where one of them would.
@RANDOM
@given(data=st.data())
def test_wrapper_equals_its_caches_or_changes_none(data: st.DataObject) -> None:
    alone = [made(CausalCache(add_shift), 2, 6, 4), made(SWAMemCache(2, 3, add_shift), 2, 6, 4)]
    wrapped = [CausalCache(add_shift), SWAMemCache(2, 3, add_shift)]
    wrapper = WrapperCache(*wrapped)
    made(wrapper, 2, 6, 4)
    number = 0.0
    for _ in range(data.draw(st.integers(1, 15), label="steps")):
        seq = data.draw(st.integers(0, 2), label="seq")
        a, b = data.draw(st.tuples(st.integers(0, 8), st.integers(0, 4)), label="numbers")
        kind = data.draw(st.sampled_from(["forward", "forward", "remove", "cut", "copy"]))
        if kind == "forward":
            count = max(b, 1)
            call = ("start_forward", (list(range(a, a + count)), [seq] * count))
        elif kind == "copy":
            call = ("copy_prefix", (seq, b % 3, a))
        else:
            call = ("remove", (seq, a) if kind == "remove" else (seq, a, a + b))
        probes = [twin(cache) for cache in alone]
        try:
            for cache in probes:
                getattr(cache, call[0])(*call[1])
        except KvCacheError as error:
            expected: type[Exception] | None = type(error)
        else:
            alone, expected = probes, None
        if expected is not None:
            with pytest.raises(expected):
                getattr(wrapper, call[0])(*call[1])
        else:
            getattr(wrapper, call[0])(*call[1])
            if kind == "forward":
                number += 1
                arrays = np.full((len(call[1][0]), 1, 1), number, np.float32)
                for i, cache in enumerate(alone):
                    cache.set_layer(0)
                    cache.put(arrays, arrays)
                    wrapper.set_layer_type(i)
                    wrapper.put(arrays, arrays)
        for cache, other in zip(alone, wrapped, strict=True):
            assert_same(state(cache), state(other))
            for pos in range(9):
                assert cache.can_resume(seq, pos) == other.can_resume(seq, pos)


# A.4 EncoderCache: the last item that was put, and whether its position is still there.
@RANDOM
@given(data=st.data())
def test_encoder_against_two_variables(data: st.DataObject) -> None:
    cache = made(EncoderCache())
    pos, cached, held, number = 0, None, [None, None], 0.0
    for _ in range(data.draw(st.integers(1, 20), label="steps")):
        kind = data.draw(st.sampled_from(["pass", "reserve", "remove"]))
        if kind == "remove":
            begin, count = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 6)))
            end = begin + count if data.draw(st.booleans(), label="bounded") else None
            cache.remove(0, begin, end)
            if cached is not None and begin <= cached and (end is None or cached < end):
                cached = None
        else:
            start = data.draw(st.integers(0, 9), label="start")
            items = data.draw(st.lists(st.integers(0, 3), max_size=3), label="multimodal")
            reserve = kind == "reserve"
            cache.start_forward(range(start, start + 4), [0] * 4, reserve, items)
            pos = start + items[-1] if items and not reserve else pos
            layer = data.draw(st.integers(0, 1), label="layer")
            if data.draw(st.booleans(), label="put"):
                number += 1
                cache.set_layer(layer)
                cache.put(np.full((2, 3), number), np.full(5, -number))
                if reserve:
                    held[layer] = held[layer] or 0.0
                else:
                    held[layer], cached = number, pos
        assert cache.encoder_cached is (cached is not None)
        for layer, content in enumerate(held):
            cache.set_layer(layer)
            key, value, mask = cache.get()
            assert mask is None
            if content is None:
                assert key is value is None
            else:
                assert key.tolist() == [[content] * 3] * 2
                assert value.tolist() == [-content] * 5
