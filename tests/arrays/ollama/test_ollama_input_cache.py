"""The slots of an InputCache: which one serves which prompt, and how it makes room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama_support import add_shift, evaluate, seen, tokens

from pykvcache.arrays import (
    CausalCache,
    ChunkedAttentionCache,
    Input,
    InputCache,
    NoSlot,
    RecurrentCache,
    ReprocessInputs,
    SWACache,
    SWAMemCache,
    WrapperCache,
)
from pykvcache.errors import CacheDTypeError, CacheValueError, KvCacheError, NotSupported
from support.examples import examples

CONTEXT, BATCH, WINDOW = 12, 4, 3


def unmoved(layer: int, key: Any, shift: Any) -> Any:
    """Leave keys unchanged, so that they identify their tokens."""
    return key


CACHES: dict[str, Any] = {
    "causal": lambda: CausalCache(unmoved),
    "causal without shift": CausalCache,
    "swa": lambda: SWACache(WINDOW, unmoved),
    "swamem": lambda: SWAMemCache(WINDOW, 6, unmoved),
    "chunked": lambda: ChunkedAttentionCache(WINDOW, unmoved),
    "recurrent": lambda: RecurrentCache(
        unmoved, checkpoint_min_pos=0, checkpoint_interval=2, checkpoint_count=4
    ),
    "wrapper": lambda: WrapperCache(CausalCache(unmoved), SWACache(WINDOW, unmoved)),
}
PROMPTS = st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=CONTEXT)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), PROMPTS, st.booleans()),
        st.tuples(st.just("load"), PROMPTS, st.just(True)),
        st.tuples(st.just("go_on"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("generate"), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("release"), st.integers(0, 2)),
        st.tuples(st.just("release"), st.integers(0, 2)),
    ),
    min_size=5,
    max_size=30,
)


@dataclass
class Expected:
    """One slot as the policy should have it."""

    id: int
    tokens: list[int] = field(default_factory=list)
    in_use: bool = False
    used: int = 0

    def common(self, prompt: list[int]) -> int:
        count = 0
        for mine, theirs in zip(self.tokens, prompt, strict=False):
            if mine != theirs:
                break
            count += 1
        return count


class Runners:
    """A model runner with three slots, and a model of the policy."""

    def __init__(self, kind: str, multi_user: bool) -> None:
        self.kind, self.multi_user = kind, multi_user
        self.cache = CACHES[kind]()
        self.inputs = InputCache(self.cache, 3 * CONTEXT, 3, BATCH, multi_user, np.float32)
        self.slots = [Expected(number) for number in range(3)]
        self.clock = 0

    def choose(self, prompt: list[int]) -> tuple[Expected, int] | None:
        """Return the slot and the number of inputs to reuse; forks as a side effect."""
        free = [slot for slot in self.slots if not slot.in_use]
        if not free:
            return None
        if not self.multi_user:
            best = max(free, key=lambda slot: slot.common(prompt))
            return best, best.common(prompt)
        longest = max(self.slots, key=lambda slot: slot.common(prompt))
        count = longest.common(prompt)
        if count == len(longest.tokens) and not longest.in_use:
            return longest, count
        oldest = min(free, key=lambda slot: slot.used)
        if count > 0 and longest is not oldest:
            oldest.tokens = longest.tokens[:count]
        return oldest, count

    def load(self, prompt: list[int], cache_prompt: bool) -> None:
        given = [Input(token) for token in prompt]
        chosen = self.choose(prompt)
        if chosen is None:
            with pytest.raises(NoSlot):
                self.inputs.load_slot(given, cache_prompt)
            return
        expected, count = chosen
        slot, rest = self.inputs.load_slot(given, cache_prompt)
        assert given == [Input(token) for token in prompt]
        assert slot.id == expected.id
        count = min(count, len(prompt) - 1) if cache_prompt else 0
        got = len(prompt) - len(rest)
        # A cache without the tokens of the window begins anew, a recurrent one goes back.
        if self.kind == "recurrent":
            assert got <= count
        else:
            assert got == count or (got == 0 and not self.kind.startswith("causal"))
        assert [item.token for item in slot.inputs] + [item.token for item in rest] == prompt
        self.clock += 1
        expected.used, expected.in_use, expected.tokens = self.clock, True, prompt[:got]
        self.evaluate(expected, [item.token for item in rest])

    def evaluate(self, expected: Expected, tokens: list[int]) -> None:
        """Run `tokens` in batches; each must see its own history only."""
        slot = self.inputs.slots[expected.id]
        for start in range(0, len(tokens), BATCH):
            batch = tokens[start : start + BATCH]
            first = len(expected.tokens)
            self.cache.start_forward(range(first, first + len(batch)), [slot.id] * len(batch))
            for kind in range(2 if self.kind == "wrapper" else 1):
                if self.kind == "wrapper":
                    self.cache.set_layer_type(kind)
                self.cache.set_layer(0)
                stored = np.array(batch, np.float32).reshape(-1, 1, 1)
                self.cache.put(stored, stored)
                key, _, mask = self.cache.get()
                history = expected.tokens + batch
                for row in range(len(batch)):
                    last = first + row
                    begin = 0
                    if self.kind in ("swa", "swamem") or kind == 1:
                        begin = max(0, last - WINDOW)
                    elif self.kind == "chunked":
                        begin = last - last % WINDOW
                    seen = key[mask[row] == 0][:, 0, 0].astype(int).tolist()
                    assert sorted(seen) == sorted(history[begin : last + 1])
            expected.tokens = expected.tokens + batch
            slot.inputs.extend(Input(token) for token in batch)

    def go_on(self, number: int, keep: int) -> None:
        """Make room as a runner does with a full context."""
        expected, slot = self.slots[number], self.inputs.slots[number]
        if not expected.in_use:
            return
        discard = self.inputs.shift_discard(slot.inputs, keep)
        target = max((CONTEXT - keep) // 2, 1)
        assert discard == max(
            0, min(target - (CONTEXT - len(slot.inputs)), len(slot.inputs) - keep)
        )
        kept = expected.tokens[:keep] + expected.tokens[keep + discard :]
        reprocess = None
        try:
            self.inputs.shift_slot(slot, keep)
        except ReprocessInputs as error:
            reprocess = [item.token for item in error.inputs]
        if reprocess is None:
            expected.tokens = kept
            return
        # Cells may be shared after a fork; otherwise a cache with a shift function shifts.
        assert self.multi_user or self.kind not in ("causal", "chunked")
        assert reprocess == kept
        assert list(slot.inputs) == []
        expected.tokens = []
        self.evaluate(expected, kept)

    def generate(self, number: int, count: int) -> None:
        expected = self.slots[number]
        if expected.in_use:
            count = min(count, CONTEXT - len(expected.tokens))
            self.evaluate(expected, [4 + number] * count)

    def release(self, number: int) -> None:
        self.slots[number].in_use = self.inputs.slots[number].in_use = False


@pytest.mark.parametrize("multi_user", [False, True])
@pytest.mark.parametrize("kind", CACHES)
@settings(max_examples=examples(25), deadline=None)
@given(calls=CALLS)
def test_random_prompts_get_the_slots_of_the_policy_and_see_their_history(
    kind: str, multi_user: bool, calls: list[tuple[Any, ...]]
) -> None:
    runners = Runners(kind, multi_user)
    for name, *arguments in calls:
        getattr(runners, name)(*arguments)
        for slot, expected in zip(runners.inputs.slots, runners.slots, strict=True):
            assert [item.token for item in slot.inputs] == expected.tokens
            assert slot.in_use is expected.in_use


# By example -----------------------------------------------------------------------------------


def use(policy: InputCache, *numbers: int, cache_prompt: bool = True) -> tuple[int, int]:
    """Load, evaluate and release; return the slot and how many inputs were left to evaluate."""
    slot, rest = policy.load_slot(tokens(*numbers), cache_prompt)
    assert slot.in_use
    evaluate(policy, slot, rest)
    slot.in_use = False
    return slot.id, len(rest)


def test_input_cache_splits_the_cells_between_slots() -> None:
    cache = CausalCache()
    policy = InputCache(cache, 50, 3, 16, False, "f32")
    assert policy.num_ctx == 16
    assert cache.dtype == np.float32
    slots = [(s.id, s.inputs, s.in_use, s.last_used) for s in policy.slots]
    assert slots == [(i, [], False, 0) for i in range(3)]
    cache.start_forward([0], [0], reserve=True)
    cache.put(np.ones((1, 1, 1)), np.ones((1, 1, 1)))
    assert cache.get()[2].shape == (1, 3 * 16)
    policy.close()
    assert cache.dtype is None
    InputCache(None, 50, 3, 16, False, np.float32).close()


def test_input_cache_checks_sizes_and_dtype() -> None:
    cache: Any = CausalCache()
    for arguments, error in (
        *[((*sizes,), CacheValueError) for sizes in ((47, 3, 16), (48, 0, 16), (48, 3, 0))],
        ((48, -1, 16), CacheValueError),
        ((48.0, 3, 16), TypeError),
        *[((48, 3, 16, False, kind), NotSupported) for kind in ("q8_0", "q4_0")],
        ((48, 3, 16, False, "int8"), CacheDTypeError),
    ):
        with pytest.raises(error):
            InputCache(cache, *arguments)
    assert cache.dtype is None
    with pytest.raises(TypeError):
        InputCache(object(), 48, 3, 16)  # type: ignore[arg-type]
    InputCache(cache, 48, 3, 16)
    assert cache.dtype == np.float16


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
    policy = InputCache(None, 100, 1, 1)
    policy.slots[0].inputs = held
    slot, rest = policy.load_slot(prompt)
    assert slot.inputs == prompt[:common]
    assert rest == prompt[common:]


class Uncuttable(CausalCache):
    """A cache that can only be emptied."""

    def remove(self, seq: Any, begin: Any, end: Any = None) -> None:
        if begin != 0 or end is not None:
            raise NotSupported("cannot be cut")
        super().remove(seq, begin)


def test_slot_that_cannot_be_cut_is_cleared() -> None:
    policy = InputCache(Uncuttable(), 32, 1, 8, False, np.float32)
    use(policy, 1, 2, 3)
    assert use(policy, 1, 2, 9) == (0, 3)
    assert seen(policy.cache, 0, 3) == [0.5, 1, 2, 9]


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


def test_inputs_are_integers() -> None:
    for arguments, error in (
        ((1.0,), TypeError),
        ((True,), TypeError),
        ((1, "a"), TypeError),
        ((1, 0, -1), CacheValueError),
    ):
        with pytest.raises(error):
            Input(*arguments)  # type: ignore[arg-type]
    item = Input(np.int64(5), np.int8(-3), np.uint8(255))  # type: ignore[arg-type]
    assert {type(n) for n in (item.token, item.multimodal_hash, item.same_batch)} == {int}


def test_shift_discard_leaves_room_for_an_input_at_least() -> None:
    policy = InputCache(None, 2048, 1, 1, False, np.float32)
    for keep, count, discard in ((2047, 2048, 1), (2047, 5000, 2953), (5, 512, 0), (9, 3, 0)):
        assert policy.shift_discard(tokens(*range(count)), keep) == discard


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


def test_shift_slot_that_fails_says_what_to_reprocess() -> None:
    policy = InputCache(CausalCache(), 10, 1, 4, False, np.float32)
    slot, rest = policy.load_slot(tokens(*range(10)))
    evaluate(policy, slot, rest)
    held = slot.inputs
    for keep in (10, -1):
        with pytest.raises(CacheValueError, match="keep"):
            policy.shift_slot(slot, keep)
    with pytest.raises(ReprocessInputs, match="6 inputs need reprocessing") as caught:
        policy.shift_slot(slot, 2)
    assert caught.value.inputs == tokens(0, 1, 6, 7, 8, 9)
    assert isinstance(caught.value.__cause__, NotSupported)
    assert slot.inputs == []
    assert held == tokens(*range(10))
    evaluate(policy, slot, caught.value.inputs)
    assert seen(policy.cache, 0, 6) == [0, 0.5, 1, 6, 7, 8, 9]
