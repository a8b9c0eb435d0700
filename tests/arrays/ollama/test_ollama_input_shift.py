"""How a slot makes room: what it discards, and what has to be evaluated again."""

from __future__ import annotations

import numpy as np
import pytest
from ollama_support import add_shift, evaluate, seen, tokens

from pykvcache.arrays import CausalCache, Input, InputCache, ReprocessInputs
from pykvcache.errors import CacheValueError, NotSupported


# A.4b ShiftDiscard: half of what is not kept is to be free, at least one.
@pytest.mark.parametrize(
    ("keep", "count", "discard"),
    [
        (5, 2048, 1021),
        (2047, 2048, 1),
        (0, 2048, 1024),
        (5, 5000, 3973),
        (2047, 5000, 2953),
        (5, 512, 0),
        (9, 3, 0),
    ],
)
def test_shift_discard_frees_half(keep: int, count: int, discard: int) -> None:
    policy = InputCache(None, 2048, 1, 1, False, np.float32)
    assert policy.shift_discard(tokens(*range(count)), keep) == discard


# A.4b ShiftDiscard: groups that must stay in one batch go together.
@pytest.mark.parametrize(
    ("same_batch", "discard"),
    [
        ({}, 5),
        ({4: 3}, 8),
        ({5: 3}, 5),
        ({0: 4}, 5),
        ({0: 9}, 10),
        ({2: 5, 7: 1}, 9),
        # An inner group does not shorten the outer one.
        ({2: 7, 4: 1}, 10),
    ],
)
def test_shift_discard_keeps_groups_together(same_batch: dict[int, int], discard: int) -> None:
    policy = InputCache(None, 10, 1, 1, False, np.float32)
    inputs = [Input(i, same_batch=same_batch.get(i, 0)) for i in range(10)]
    assert policy.shift_discard(inputs, 0) == discard
    with pytest.raises(CacheValueError, match="keep is -1"):
        policy.shift_discard(inputs, -1)


# A.4b ShiftCacheSlot: the slot and the cache lose the same inputs.
def test_shift_slot_discards_in_the_slot_and_the_cache() -> None:
    policy = InputCache(CausalCache(add_shift), 10, 1, 4, False, np.float32)
    slot, rest = policy.load_slot(tokens(*range(10)))
    evaluate(policy, slot, rest)
    policy.shift_slot(slot, 2)
    assert [item.token for item in slot.inputs] == [0, 1, 6, 7, 8, 9]
    # add_shift makes the key of a shifted token its position.
    assert seen(policy.cache, 0, 6) == [0, 0.5, 1, 2, 3, 4, 5]
    policy.cache.remove(0, 6)
    policy.shift_slot(slot, 2)
    assert len(slot.inputs) == 6


# A.4b ShiftCacheSlot: keep >= context is an error.
@pytest.mark.parametrize("keep", [10, 11, -1])
def test_shift_slot_refuses_to_keep_everything(keep: int) -> None:
    policy = InputCache(CausalCache(add_shift), 10, 1, 4, False, np.float32)
    slot, rest = policy.load_slot(tokens(*range(10)))
    evaluate(policy, slot, rest)
    with pytest.raises(CacheValueError, match="keep"):
        policy.shift_slot(slot, keep)
    assert len(slot.inputs) == 10


# A.4b ShiftCacheSlot: a failed Remove clears, empties the slot and returns what to reprocess.
def test_shift_slot_that_fails_says_what_to_reprocess() -> None:
    policy = InputCache(CausalCache(), 10, 1, 4, False, np.float32)
    slot, rest = policy.load_slot(tokens(*range(10)))
    evaluate(policy, slot, rest)
    held = slot.inputs
    with pytest.raises(ReprocessInputs, match="6 inputs need reprocessing") as caught:
        policy.shift_slot(slot, 2)
    assert caught.value.inputs == tokens(0, 1, 6, 7, 8, 9)
    assert isinstance(caught.value.__cause__, NotSupported)
    assert slot.inputs == []
    assert held == tokens(*range(10))
    evaluate(policy, slot, caught.value.inputs)
    assert seen(policy.cache, 0, 6) == [0, 0.5, 1, 6, 7, 8, 9]
