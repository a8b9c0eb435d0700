"""The slot policy: which slot a prompt gets, what of it is reused, how it is shifted."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pykvcache.arrays import CausalCache, Input, InputCache, SWACache
from pykvcache.errors import KvCacheError, NoSlot, ReprocessInputs


def prompt(*tokens: int) -> list[Input]:
    return [Input(token) for token in tokens]


def keep(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
    return key


class Runner:
    """Evaluates what `load_slot` leaves over, as a model runner would."""

    def __init__(self, cache: Any = None, **options: Any) -> None:
        sizes: dict[str, Any] = {
            "kv_size": 48,
            "num_slots": 3,
            "batch_size": 16,
            "multi_user": False,
            "dtype": np.float32,
        }
        self.cache = CausalCache(keep) if cache is None else cache
        self.inputs = InputCache(self.cache, **{**sizes, **options})

    def run(self, *tokens: int, release: bool = True) -> tuple[Any, list[int]]:
        slot, rest = self.inputs.load_slot(prompt(*tokens))
        self.evaluate(slot, rest)
        if release:
            slot.in_use = False
        return slot, [item.token for item in rest]

    def evaluate(self, slot: Any, rest: list[Input]) -> None:
        for item in rest:
            self.cache.start_forward([len(slot.inputs)], [slot.id])
            self.cache.set_layer(0)
            stored = np.full((1, 1, 1), item.token, np.float32)
            self.cache.put(stored, stored)
            slot.inputs.append(item)
            key, _, mask = self.cache.get()
            seen = key[mask[0] == 0][:, 0, 0]
            assert sorted(seen.tolist()) == sorted(one.token for one in slot.inputs)


def tokens_of(slot: Any) -> list[int]:
    return [item.token for item in slot.inputs]


def test_slots_have_what_a_runner_needs() -> None:
    slots = Runner().inputs.slots
    assert [slot.id for slot in slots] == [0, 1, 2]
    for slot in slots:
        assert list(slot.inputs) == []
        assert slot.in_use is False
    before = time.monotonic()
    slot, _ = Runner().inputs.load_slot(prompt(1))
    assert slot.in_use is True
    assert before <= slot.last_used <= time.monotonic()


@pytest.mark.parametrize("multi_user", [False, True])
def test_a_new_prompt_is_evaluated_whole_and_again_from_its_last_input(multi_user: bool) -> None:
    runner = Runner(multi_user=multi_user)
    given = prompt(1, 2, 3)
    slot, rest = runner.inputs.load_slot(given)
    assert [item.token for item in rest] == [1, 2, 3]
    assert list(slot.inputs) == []
    runner.evaluate(slot, rest)
    slot.in_use = False
    assert given == prompt(1, 2, 3)  # the caller's prompt is never changed
    again, rest = runner.inputs.load_slot(given)
    assert again.id == slot.id
    assert tokens_of(again) == [1, 2]
    assert [item.token for item in rest] == [3]
    assert given == prompt(1, 2, 3)


def test_a_returned_rest_is_the_callers_own() -> None:
    runner = Runner()
    given = prompt(1, 2, 3)
    slot, rest = runner.inputs.load_slot(given)
    rest.clear()
    slot.inputs.append(Input(9))
    assert given == prompt(1, 2, 3)


def test_a_single_user_gets_the_free_slot_with_the_longest_prefix() -> None:
    runner = Runner()
    held = [runner.run(1, 2, 3, release=False)[0], runner.run(1, 2, 7, 8, release=False)[0]]
    assert held[0].id != held[1].id
    for slot in held:
        slot.in_use = False
    slot, rest = runner.run(1, 2, 7, 9)
    assert slot.id == held[1].id
    assert rest == [9]
    assert tokens_of(slot) == [1, 2, 7, 9]
    slot, rest = runner.run(1, 2, 3, 4, release=False)
    assert (slot.id, rest) == (held[0].id, [4])
    # The best slot is taken now: the next best free one serves.
    slot, rest = runner.run(1, 2, 3, 4)
    assert (slot.id, rest) == (held[1].id, [3, 4])


def test_several_users_fork_the_longest_prefix_into_the_oldest_slot() -> None:
    runner = Runner(multi_user=True)
    first, _ = runner.run(1, 2, 3, 4)
    second, rest = runner.run(1, 2, 9)
    assert second.id != first.id
    assert rest == [9]  # two inputs came from the other slot without being evaluated
    assert tokens_of(first) == [1, 2, 3, 4]
    assert tokens_of(second) == [1, 2, 9]
    third, rest = runner.run(50, 51)
    assert third.id not in (first.id, second.id)
    assert rest == [50, 51]
    # Wholly a prefix of the prompt, and free: used as it is.
    slot, rest = runner.run(1, 2, 3, 4, 5)
    assert (slot.id, rest) == (first.id, [5])
    # Now the second slot is the oldest, and is evicted.
    slot, rest = runner.run(70)
    assert (slot.id, rest) == (second.id, [70])
    assert tokens_of(first) == [1, 2, 3, 4, 5]


def test_a_slot_in_use_is_forked_from_and_never_handed_out() -> None:
    runner = Runner(multi_user=True)
    first, _ = runner.run(1, 2, 3, release=False)
    second, rest = runner.run(1, 2, 3, 4, release=False)
    assert second.id != first.id
    assert rest == [4]
    runner.evaluate(first, prompt(8))  # the original goes on undisturbed
    assert tokens_of(second) == [1, 2, 3, 4]


@pytest.mark.parametrize("multi_user", [False, True])
def test_no_slot_is_left(multi_user: bool) -> None:
    runner = Runner(multi_user=multi_user)
    for token in (1, 2, 3):
        runner.run(token, release=False)
    before = [(tokens_of(slot), slot.in_use, slot.last_used) for slot in runner.inputs.slots]
    with pytest.raises(NoSlot):
        runner.inputs.load_slot(prompt(1, 5))
    after = [(tokens_of(slot), slot.in_use, slot.last_used) for slot in runner.inputs.slots]
    assert after == before
    assert issubclass(NoSlot, KvCacheError)


@pytest.mark.parametrize("multi_user", [False, True])
def test_nothing_is_reused_without_cache_prompt(multi_user: bool) -> None:
    runner = Runner(multi_user=multi_user)
    runner.run(1, 2, 3)
    slot, rest = runner.inputs.load_slot(prompt(1, 2, 3, 4), cache_prompt=False)
    assert [item.token for item in rest] == [1, 2, 3, 4]
    assert list(slot.inputs) == []
    runner.evaluate(slot, rest)


def test_equal_inputs_have_equal_tokens_and_equal_images() -> None:
    runner = Runner()
    image = [Input(1), Input(0, multimodal_hash=77), Input(0, multimodal_hash=77), Input(2)]
    slot, rest = runner.inputs.load_slot(image)
    runner.evaluate(slot, rest)
    slot.in_use = False
    other = [Input(1), Input(0, multimodal_hash=78), Input(0, multimodal_hash=77), Input(2)]
    _, rest = runner.inputs.load_slot(other)
    assert rest == other[1:]


def test_a_cache_that_cannot_resume_begins_again() -> None:
    runner = Runner(SWACache(2), kv_size=300, num_slots=1, batch_size=4)
    slot, rest = runner.inputs.load_slot(prompt(*range(20)))
    for item in rest:
        runner.cache.start_forward([len(slot.inputs)], [slot.id])
        runner.cache.put(np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32))
        slot.inputs.append(item)
    slot.in_use = False
    slot, rest = runner.inputs.load_slot(prompt(0, 1, 2, 99))
    assert len(rest) == 4  # the window before position 3 is lost
    assert list(slot.inputs) == []


def test_sizes_that_cannot_work_are_refused() -> None:
    for options in (
        {"num_slots": 0},
        {"num_slots": -1},
        {"kv_size": 47},  # 15 inputs per slot, and batches of 16
        {"kv_size": 0},
        {"batch_size": 0},
        {"num_slots": True},
        {"kv_size": 48.0},
    ):
        with pytest.raises((KvCacheError, TypeError)):
            Runner(**options)
    with pytest.raises(KvCacheError):
        Runner().inputs.load_slot([])


def test_element_types() -> None:
    for dtype in ("f16", "f32", np.float64):
        runner = Runner(dtype=dtype)
        runner.run(1, 2, 3)
    with pytest.raises(KvCacheError):
        Runner(dtype="q8_0")


# Shifting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "keeping", "discard"),
    [
        (16, 4, 6),  # half of what is not kept comes free
        (14, 4, 4),  # ... counting what is free already
        (10, 4, 0),
        (16, 15, 1),  # at least one
        (16, 0, 8),
        (0, 0, 0),
    ],
)
def test_how_much_a_shift_discards(held: int, keeping: int, discard: int) -> None:
    runner = Runner()  # 16 inputs per slot
    assert runner.inputs.shift_discard(prompt(*range(held)), keeping) == discard


def test_groups_that_need_one_batch_are_discarded_together() -> None:
    runner = Runner()
    inputs = prompt(*range(16))
    inputs[8] = Input(8, same_batch=5)  # with the five that follow
    assert runner.inputs.shift_discard(inputs, 4) == 10
    inputs[8], inputs[9] = Input(8), Input(9, same_batch=2)
    assert runner.inputs.shift_discard(inputs, 4) == 8


def test_a_shift_moves_inputs_and_cells() -> None:
    runner = Runner(num_slots=1, kv_size=16)
    slot, _ = runner.run(*range(16), release=False)
    runner.inputs.shift_slot(slot, 4)
    assert tokens_of(slot) == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15]
    runner.evaluate(slot, prompt(16, 17))


def test_a_shift_that_is_not_needed_does_nothing() -> None:
    runner = Runner()
    slot, _ = runner.run(*range(8), release=False)
    runner.inputs.shift_slot(slot, 2)
    assert tokens_of(slot) == list(range(8))


@pytest.mark.parametrize("keeping", [16, 17, -1, True, 1.0])
def test_keeping_the_whole_context_is_refused(keeping: Any) -> None:
    runner = Runner()
    slot, _ = runner.run(*range(16), release=False)
    with pytest.raises((KvCacheError, TypeError)):
        runner.inputs.shift_slot(slot, keeping)
    assert tokens_of(slot) == list(range(16))


def test_what_cannot_be_shifted_is_handed_back_for_evaluation() -> None:
    runner = Runner(CausalCache(None))
    slot, _ = runner.run(*range(16), release=False)
    with pytest.raises(ReprocessInputs) as caught:
        runner.inputs.shift_slot(slot, 4)
    assert [item.token for item in caught.value.inputs] == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15]
    assert list(slot.inputs) == []
    assert issubclass(ReprocessInputs, KvCacheError)
    runner.evaluate(slot, list(caught.value.inputs))
