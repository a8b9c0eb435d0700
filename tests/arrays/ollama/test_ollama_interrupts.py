"""Ctrl-C at every place of a call: the cache is what it was, or what it becomes, or says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ollama_support import (
    LARGE_CALLS,
    add_shift,
    copies_of,
    made,
    picture,
    recurrent,
    tokens,
    two,
)

from pykvcache.arrays import (
    CausalCache,
    EncoderCache,
    FlatKVCache,
    InputCache,
    RecurrentCache,
    SWACache,
    WrapperCache,
)
from pykvcache.errors import CacheOrderError, KvCacheError, NotSupported
from support.interrupts import InterruptAnywhere

OURS = ("pykvcache/arrays/ollama/", "pykvcache/arrays/flat.py")
SEQUENCES = (0, 1, 9)


def interrupted(make: Callable[[], Any], call: Callable[[Any], Any]) -> list[Any]:
    """Return what a cache is after each place at which its call can be interrupted."""
    again, found = copies_of(make()), []
    for at in range(1, 10_000):
        cache = again()
        if not InterruptAnywhere(at, OURS).run(lambda cache=cache: call(cache)):
            break
        found.append(cache)
    assert found
    return found


CALLS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (two, lambda cache: cache.start_forward([5, 6], [0, 0])),
    (two, lambda cache: cache.start_forward([5, 0], [0, 9])),
    (two, lambda cache: cache.remove(0, 1, 2)),
    (two, lambda cache: cache.remove(0, 2)),
    (two, lambda cache: cache.remove(0, 0)),
    (two, lambda cache: cache.copy_prefix(0, 1, 2)),
    (two, lambda cache: cache.copy_prefix(0, 9, 2)),
    (recurrent, lambda cache: cache.start_forward([0], [9])),
    *LARGE_CALLS,
]


# Found: positions were moved without their keys, cells were taken for a batch that never began.
@pytest.mark.parametrize(("make", "call"), CALLS)
def test_an_interrupt_leaves_what_was_or_what_becomes(
    make: Callable[[], Any], call: Callable[[Any], Any]
) -> None:
    done = make()
    call(done)
    whole = picture(make(), SEQUENCES), picture(done, SEQUENCES)
    for cache in interrupted(make, call):
        if picture(cache, SEQUENCES) in whole:
            continue
        # The one thing in between: a sequence whose state is gone, and that does not go on.
        assert isinstance(cache, RecurrentCache)
        torn = [seq for seq in SEQUENCES if not goes_on(cache, seq)]
        assert torn
        for seq in torn:
            cache.remove(seq, 0)
            cache.start_forward([0], [seq])
            assert cache.get_state("sum", (1,)).tolist() == [[0]]


def goes_on(cache: Any, seq: int) -> bool:
    """Tell whether a sequence can be continued at the position that its cells lead to."""
    cells = cache._setup.cells
    cache = copy.deepcopy(cache)
    try:
        cache.start_forward([int(cells.last[cells.row(seq)]) + 1], [seq])
    except NotSupported:
        return False
    return True


def slots(multi_user: bool) -> Any:
    inputs = InputCache(CausalCache(add_shift), 10, 2, 5, multi_user, np.float32)
    for prompt in (tokens(1, 2, 3, 4, 5), tokens(7, 8)):
        slot, rest = inputs.load_slot(prompt)
        past = len(slot.inputs)
        cache: Any = inputs.cache
        cache.start_forward(range(past, past + len(rest)), [slot.id] * len(rest))
        cache.put(*[np.array([one.token for one in rest], np.float32).reshape(-1, 1, 1)] * 2)
        slot.inputs.extend(rest)
    for slot in inputs.slots:
        slot.in_use = False
    return inputs


# Found: a slot listed inputs that the cache no longer held, and the next prompt skipped them.
@pytest.mark.parametrize("multi_user", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda inputs: inputs.load_slot(tokens(1, 2, 9)),
        lambda inputs: inputs.load_slot(tokens(9)),
        lambda inputs: inputs.load_slot(tokens(1, 2, 3, 4, 5), cache_prompt=False),
        lambda inputs: inputs.shift_slot(inputs.slots[0], 1),
    ],
)
def test_no_slot_lists_what_the_cache_does_not_hold(
    call: Callable[[Any], Any], multi_user: bool
) -> None:
    for inputs in interrupted(lambda: slots(multi_user), call):
        for slot in inputs.slots:
            cache = copy.deepcopy(inputs.cache)
            for pos in range(len(slot.inputs)):
                cache.start_forward([pos], [slot.id], reserve=True)
                cache.set_layer(0)
                _, value, mask = cache.get()
                seen = value[mask[0] == 0].ravel().tolist()
                assert sorted(seen) == sorted(item.token for item in slot.inputs[: pos + 1])


def test_caches_of_a_wrapper_that_differ_are_not_used() -> None:
    def make() -> Any:
        wrapper = made(WrapperCache(CausalCache(add_shift), SWACache(8, add_shift)), 2, 6, 5)
        wrapper.start_forward(range(5), [0] * 5)
        for kind in (0, 1):
            wrapper.set_layer_type(kind)
            wrapper.put(*[np.arange(5.0).reshape(5, 1, 1)] * 2)
        return wrapper

    def pictures(wrapper: Any) -> list[str]:
        return [picture(cache, positions=(8,)) for cache in wrapper.caches]

    for call in (
        lambda wrapper: wrapper.remove(0, 1, 2),
        lambda wrapper: wrapper.copy_prefix(0, 1, 2),
        lambda wrapper: wrapper.start_forward([5], [0]),
    ):
        done = make()
        call(done)
        whole = pictures(make()), pictures(done)
        for wrapper in interrupted(make, call):
            if pictures(wrapper) in whole:
                continue
            torn = [seq for seq in (0, 1) if seq in wrapper._torn]
            assert len(torn) == 1
            (seq,) = torn
            for refused in (
                lambda wrapper=wrapper, seq=seq: wrapper.start_forward([7], [seq]),
                lambda wrapper=wrapper, seq=seq: wrapper.remove(seq, 1),
                lambda wrapper=wrapper, seq=seq: wrapper.copy_prefix(seq, 5, 1),
            ):
                with pytest.raises(CacheOrderError, match="only some of the caches"):
                    refused()
            assert not wrapper.can_resume(seq, 1)
            wrapper.remove(seq, 0)
            wrapper.start_forward([0], [seq])


# A cache that is not ours may have begun, or not, when Ctrl-C comes in its own code.
@pytest.mark.parametrize("begins", [False, True])
def test_a_foreign_cache_that_is_interrupted_does_not_go_on(begins: bool) -> None:
    class Interrupted(CausalCache):
        def start_forward(self, *args: Any, **options: Any) -> None:
            if begins:
                super().start_forward(*args, **options)
            raise KeyboardInterrupt

    first = CausalCache()
    wrapper = made(WrapperCache(first, Interrupted()), 1, 8, 8)
    before = picture(first)
    with pytest.raises(KeyboardInterrupt):
        wrapper.start_forward([0, 1], [0, 0])
    assert picture(first) == before
    assert not wrapper.can_resume(0, 1)
    with pytest.raises(CacheOrderError, match="only some of the caches"):
        wrapper.start_forward([0, 1], [0, 0])
    wrapper.remove(0, 0)
    with pytest.raises(KeyboardInterrupt):
        wrapper.start_forward([0, 1], [0, 0])


def test_half_an_item_of_an_encoder_is_none() -> None:
    def make() -> Any:
        cache = made(EncoderCache())
        cache.start_forward([0], [0], multimodal=[0])
        cache.put(np.full((1, 1), 1.0), np.full((1, 1), 2.0))
        return cache

    def call(cache: Any) -> None:
        cache.put(np.full((1, 1), 3.0), np.full((1, 1), 4.0))

    for cache in interrupted(make, call):
        key, value, _ = cache.get()
        pair = key.item(), value.item()
        assert pair in ((1, 2), (3, 4)) or not cache.encoder_cached


def test_a_flat_cache_holds_whole_tokens() -> None:
    def make() -> Any:
        cache = FlatKVCache(1, 1, 1)
        for n in (1.0, 2.0):
            cache.append(0, np.array([n], "f4"), np.array([-n], "f4"))
            cache.advance()
        return cache

    def both(cache: Any) -> tuple[list[float], list[float], int]:
        return cache.k(0).tolist(), cache.v(0).tolist(), len(cache)

    one = np.array([3.0], "f4")
    for call in (lambda cache: cache.append(0, one, -one), lambda cache: cache.truncate(1)):
        done = make()
        call(done)
        for cache in interrupted(make, call):
            assert both(cache) in (both(make()), both(done))


def test_what_is_interrupted_says_so_by_type() -> None:
    cache = recurrent()
    cache._states.pop(0)
    with pytest.raises(KvCacheError, match="its K and V end at 5"):
        cache.start_forward([0], [0])


# A slot over caches that differ is emptied when it is loaded, and nothing is forked from it.
@pytest.mark.parametrize("multi_user", [False, True])
def test_slots_of_a_wrapper_recover_by_themselves(multi_user: bool) -> None:
    def make() -> Any:
        wrapper = WrapperCache(CausalCache(), CausalCache())
        inputs = InputCache(wrapper, 16, 2, 8, multi_user, np.float32)
        slot, rest = inputs.load_slot(tokens(1, 2, 3, 4))
        wrapper.start_forward(range(4), [slot.id] * 4)
        slot.inputs.extend(rest)
        slot.in_use = False
        return inputs

    for inputs in interrupted(make, lambda inputs: inputs.load_slot(tokens(1, 2, 9))):
        for slot in inputs.slots:
            slot.in_use = False
        for prompt in (tokens(1, 2, 9), tokens(1, 2, 3, 4, 5)):
            slot, rest = inputs.load_slot(prompt)
            past = len(slot.inputs)
            inputs.cache.start_forward(range(past, len(prompt)), [slot.id] * len(rest))
            for cache in inputs.cache.caches:
                cells = cache._setup.cells
                held = cells.pos[cells.member[cells.row(slot.id)]]
                assert sorted(held.tolist()) == list(range(len(prompt)))
            slot.inputs.extend(rest)
            slot.in_use = False
