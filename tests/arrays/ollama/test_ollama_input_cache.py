"""Which slot serves which prompt."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from ollama_support import add_shift, evaluate, seen, tokens

from pykvcache.arrays import (
    CausalCache,
    EncoderCache,
    Input,
    InputCache,
    NoSlot,
    SWACache,
    WrapperCache,
)
from pykvcache.errors import CacheDTypeError, CacheValueError, KvCacheError, NotSupported


def slots(
    *contents: tuple[list[Input], float], multi_user: bool, in_use: tuple[int, ...] = ()
) -> InputCache:
    """Return slots of given inputs, used so many seconds ago, without a cache."""
    policy = InputCache(None, 100 * len(contents), len(contents), 1, multi_user, np.float16)
    for slot, (inputs, ago) in zip(policy.slots, contents, strict=True):
        slot.inputs, slot.last_used = inputs, time.monotonic() - ago
        slot.in_use = slot.id in in_use
    return policy


def use(policy: InputCache, *numbers: int, cache_prompt: bool = True) -> tuple[int, int]:
    """Load, evaluate and release; return the slot and how many inputs were left to evaluate."""
    slot, rest = policy.load_slot(tokens(*numbers), cache_prompt)
    assert slot.in_use
    evaluate(policy, slot, rest)
    slot.in_use = False
    return slot.id, len(rest)


# A.4b NewInputCache: numCtx = kvSize / numSlots, and the cache is set up for it.
def test_input_cache_splits_the_cells_between_slots() -> None:
    cache = CausalCache()
    policy = InputCache(cache, 50, 3, 16, False, np.float32)
    assert policy.num_ctx == 16
    assert cache.dtype == np.float32
    assert [(s.id, s.inputs, s.in_use, s.last_used) for s in policy.slots] == [
        (0, [], False, 0),
        (1, [], False, 0),
        (2, [], False, 0),
    ]
    policy.close()
    assert cache.dtype is None
    InputCache(None, 50, 3, 16, False, np.float32).close()


# A.4b NewInputCache: a context below the batch is an error; decided: so are zero slots.
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((47, 3, 16), CacheValueError),
        ((48, 0, 16), CacheValueError),
        ((48, -1, 16), CacheValueError),
        ((0, 1, 1), CacheValueError),
        ((48, 3, 0), CacheValueError),
        ((48.0, 3, 16), TypeError),
    ],
)
def test_input_cache_refuses_bad_sizes(arguments: Any, error: type) -> None:
    cache = CausalCache()
    with pytest.raises(error):
        InputCache(cache, *arguments, False, np.float16)
    assert cache.dtype is None
    with pytest.raises(TypeError, match="a cache is needed"):
        InputCache(object(), 48, 3, 16, False, np.float16)  # type: ignore[arg-type]


# A.4b NewInputCache: kv type f16 unless asked; the quantised ones have no NumPy dtype.
def test_input_cache_stores_f16_by_default() -> None:
    cache = CausalCache()
    InputCache(cache, 48, 3, 16)
    assert cache.dtype == np.float16
    InputCache(cache, 48, 3, 16, False, "f32")
    assert cache.dtype == np.float32
    for quantised in ("q8_0", "q4_0"):
        with pytest.raises(NotSupported, match=quantised):
            InputCache(cache, 48, 3, 16, False, quantised)
    with pytest.raises(CacheDTypeError):
        InputCache(cache, 48, 3, 16, False, "int8")


# A.4b prefix equality: token and multimodal hash, not the batch grouping.
@pytest.mark.parametrize(
    ("held", "prompt", "common"),
    [
        (tokens(1, 2, 3), tokens(1, 2, 3, 4), 3),
        (tokens(1), tokens(1, 2, 3), 1),
        (tokens(1, 2, 3), tokens(1, 5, 3), 1),
        ([Input(0, 7)], [Input(0, 7), Input(0, 8)], 1),
        ([Input(1), Input(0, 7)], [Input(1), Input(0, 8)], 1),
        ([Input(1), Input(0, 7)], [Input(1), Input(0, 7, 3), Input(2)], 2),
        ([], tokens(1, 2), 0),
    ],
)
def test_inputs_are_the_same_by_token_and_hash(held: Any, prompt: Any, common: int) -> None:
    policy = slots((held, 1.0), multi_user=False)
    slot, rest = policy.load_slot(prompt)
    assert slot.inputs == prompt[:common]
    assert rest == prompt[common:]


# A.4b LoadCacheSlot, single user: the longest common prefix among free slots, the first of equals.
@pytest.mark.parametrize(
    ("contents", "in_use", "prompt", "chosen", "past"),
    [
        ([[], []], (), (1,), 0, 0),
        ([[1], [1, 2]], (), (1, 2, 3), 1, 2),
        ([[1, 2], []], (), (2,), 0, 0),
        ([[1, 2], []], (), (1, 9), 0, 1),
        ([[1], [1, 2]], (), (2, 3), 0, 0),
        ([[1, 2], [1]], (0,), (1, 2), 1, 1),
    ],
    ids=["empty", "extend", "new", "cut", "evict", "in use"],
)
def test_single_user_takes_the_longest_free_prefix(
    contents: Any, in_use: Any, prompt: Any, chosen: int, past: int
) -> None:
    filled = [(tokens(*numbers), float(i + 1)) for i, numbers in enumerate(contents)]
    policy = slots(*filled, multi_user=False, in_use=in_use)
    slot, rest = policy.load_slot(tokens(*prompt))
    assert slot is policy.slots[chosen]
    assert [item.token for item in slot.inputs] == list(prompt[:past])
    assert [item.token for item in rest] == list(prompt[past:])


# A.4b LoadCacheSlot, several users: all of a free slot's inputs, else the oldest slot, forked.
@pytest.mark.parametrize(
    ("contents", "in_use", "prompt", "chosen", "past"),
    [
        ([([], 9), ([], 9)], (), (1,), 0, 0),
        ([([1], 1), ([1, 2], 2)], (), (1, 2, 3), 1, 2),
        ([([1, 2], 1), ([], 9)], (), (2,), 1, 0),
        ([([1, 2], 1), ([], 9)], (), (1, 9), 1, 1),
        ([([1], 1), ([1, 2], 2)], (), (2, 3), 1, 0),
        ([([1, 2], 1), ([1], 2)], (0,), (1, 2, 3), 1, 2),
        ([([7, 8], 1), ([1, 2, 3], 3), ([5], 2)], (), (1, 2, 9), 1, 2),
    ],
    ids=["empty", "extend", "new", "fork", "evict", "fork from one in use", "oldest is longest"],
)
def test_several_users_take_a_whole_prefix_or_fork_into_the_oldest(
    contents: Any, in_use: Any, prompt: Any, chosen: int, past: int
) -> None:
    filled = [(tokens(*numbers), float(ago)) for numbers, ago in contents]
    policy = slots(*filled, multi_user=True, in_use=in_use)
    before = [list(slot.inputs) for slot in policy.slots]
    slot, rest = policy.load_slot(tokens(*prompt))
    assert slot is policy.slots[chosen]
    assert [item.token for item in slot.inputs] == list(prompt[:past])
    assert [item.token for item in rest] == list(prompt[past:])
    for other, inputs in zip(policy.slots, before, strict=True):
        assert other is slot or other.inputs == inputs


# A.4b LoadCacheSlot: forking copies the prefix in the cache; both go on from it.
def test_fork_shares_the_prefix_in_the_cache() -> None:
    policy = InputCache(CausalCache(), 40, 2, 8, True, np.float32)
    assert use(policy, 1, 2, 3, 4) == (0, 4)
    assert use(policy, 1, 2, 9) == (1, 1)
    assert seen(policy.cache, 0, 4) == [0.5, 1, 2, 3, 4]
    assert seen(policy.cache, 1, 3) == [0.5, 1, 2, 9]
    policy.cache.remove(0, 4)
    policy.cache.remove(1, 3)
    assert use(policy, 1, 2, 9, 5) == (1, 1)
    # The oldest slot is 0 now; it keeps what it shares with the prompt.
    assert use(policy, 1, 7) == (0, 1)
    assert seen(policy.cache, 0, 2) == [0.5, 1, 7]


# A.4b LoadCacheSlot: the slot that was not used for longest is taken, in the order of the loads.
def test_oldest_slot_is_evicted_even_within_a_tick_of_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    policy = InputCache(None, 30, 3, 8, True, np.float32)
    for first in (1, 2, 3, 4, 5, 6):
        slot, _ = policy.load_slot(tokens(first, 0))
        slot.inputs, slot.in_use = tokens(first, 0), False
        assert slot.id == (first - 1) % 3
        assert slot.last_used == pytest.approx(5.0)


# A.4b LoadCacheSlot: a full match leaves one input to evaluate.
@pytest.mark.parametrize("multi_user", [False, True])
def test_full_match_leaves_one_input(multi_user: bool) -> None:
    policy = InputCache(CausalCache(), 20, 1, 8, multi_user, np.float32)
    use(policy, 1, 2, 3)
    slot, rest = policy.load_slot(tokens(1, 2, 3))
    assert (len(slot.inputs), rest) == (2, tokens(3))
    assert seen(policy.cache, 0, 2) == [0.5, 1, 2]


# A.4b LoadCacheSlot: cachePrompt = false starts from nothing.
@pytest.mark.parametrize("multi_user", [False, True])
def test_cache_prompt_false_evaluates_everything(multi_user: bool) -> None:
    policy = InputCache(CausalCache(), 20, 1, 8, multi_user, np.float32)
    use(policy, 1, 2, 3)
    assert use(policy, 1, 2, 3, cache_prompt=False) == (0, 3)
    assert seen(policy.cache, 0, 3) == [0.5, 1, 2, 3]


# A.4b LoadCacheSlot: CanResume decides, else 0.
def test_slot_whose_window_is_gone_starts_anew() -> None:
    policy = InputCache(SWACache(2), 32, 1, 8, False, np.float32)
    use(policy, *range(10))
    assert use(policy, *range(10), 10) == (0, 1)
    assert use(policy, *range(5), 99) == (0, 6)
    assert seen(policy.cache, 0, 6) == [0.5, 4, 99]


class Checkpoints(CausalCache):
    """A cache that is resumed only at multiples of 4."""

    def prepare_restore(self, seq: int, pos: int) -> int | None:
        return pos // 4 * 4 or None


# A.4b LoadCacheSlot: PrepareRestore decides where a cache has checkpoints.
def test_checkpoints_decide_where_to_resume() -> None:
    policy = InputCache(Checkpoints(), 32, 1, 8, False, np.float32)
    use(policy, *range(10))
    assert use(policy, *range(7), 50) == (0, 4)
    assert use(policy, 0, 1, 60) == (0, 3)
    assert seen(policy.cache, 0, 3) == [0, 0.5, 1, 60]


class Uncuttable(CausalCache):
    """A cache that can only be emptied."""

    def remove(self, seq: Any, begin: Any, end: Any = None) -> None:
        if begin != 0 or end is not None:
            raise NotSupported("cannot be cut")
        super().remove(seq, begin)


# A.4b LoadCacheSlot: Remove(slot, numPast, MAX), on failure a full clear.
def test_slot_that_cannot_be_cut_is_cleared() -> None:
    policy = InputCache(Uncuttable(), 32, 1, 8, False, np.float32)
    use(policy, 1, 2, 3)
    assert use(policy, 1, 2, 9) == (0, 3)
    assert seen(policy.cache, 0, 3) == [0.5, 1, 2, 9]


# A.4b no available slots; every slot in use, where the original dereferences nil.
@pytest.mark.parametrize("multi_user", [False, True])
def test_no_free_slot_is_an_error_that_changes_nothing(multi_user: bool) -> None:
    policy = InputCache(CausalCache(), 20, 2, 8, multi_user, np.float32)
    for numbers in ((1, 2), (3, 4)):
        slot, rest = policy.load_slot(tokens(*numbers))
        evaluate(policy, slot, rest)
    before = [(slot.inputs, slot.last_used) for slot in policy.slots]
    with pytest.raises(NoSlot, match="all 2 slots are in use") as caught:
        policy.load_slot(tokens(1, 2, 3))
    assert isinstance(caught.value, KvCacheError)
    assert [(slot.inputs, slot.last_used) for slot in policy.slots] == before
    policy.slots[1].in_use = False
    assert policy.load_slot(tokens(1, 2, 3))[0].id == 1


# Decided: the caller's prompt is never changed; an empty one is an error.
def test_prompt_is_never_changed() -> None:
    policy = InputCache(CausalCache(add_shift), 8, 1, 4, False, np.float32)
    prompt = tokens(1, 2, 3, 4, 5, 6)
    given = list(prompt)
    slot, rest = policy.load_slot(prompt)
    evaluate(policy, slot, rest)
    rest.clear()
    slot.inputs.append(Input(7))
    policy.shift_slot(slot, 1)
    assert prompt == given
    slot.in_use = False
    policy.load_slot(tuple(prompt))
    for bad, error in (([], CacheValueError), ([1, 2], TypeError), ([Input(1), None], TypeError)):
        with pytest.raises(error):
            policy.load_slot(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1.0,), TypeError),
        ((True,), TypeError),
        ((1, "a"), TypeError),
        ((1, 0, -1), CacheValueError),
    ],
)
def test_inputs_are_checked(arguments: Any, error: type) -> None:
    with pytest.raises(error):
        Input(*arguments)


# A.4b for caches that keep nothing, and for several at once.
def test_slots_are_managed_without_a_cache_and_over_wrappers() -> None:
    policy = InputCache(None, 10, 1, 4, False, np.float32)
    slot, rest = policy.load_slot(tokens(*range(10)))
    slot.inputs += rest
    policy.shift_slot(slot, 2)
    assert [item.token for item in slot.inputs] == [0, 1, 6, 7, 8, 9]
    wrapped = InputCache(WrapperCache(CausalCache(), SWACache(2)), 20, 2, 8, True, np.float32)
    assert use(wrapped, 1, 2, 3) == (0, 3)
    assert use(wrapped, 1, 2, 3, 4) == (0, 1)
    with pytest.raises(NotSupported):
        InputCache(EncoderCache(), 20, 2, 8, True, np.float32)
