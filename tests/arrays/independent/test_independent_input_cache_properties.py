"""The slot policy over random prompts: the slots chosen, and what every token then sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pykvcache.arrays import (
    CausalCache,
    ChunkedAttentionCache,
    Input,
    InputCache,
    SWACache,
    SWAMemCache,
    WrapperCache,
)
from pykvcache.errors import NoSlot, ReprocessInputs

CONTEXT, BATCH, WINDOW = 12, 4, 3


def unmoved(layer: int, key: NDArray[Any], shift: NDArray[Any]) -> NDArray[Any]:
    return key


CACHES: dict[str, Any] = {
    "causal": lambda: CausalCache(unmoved),
    "causal without shift": CausalCache,
    "swa": lambda: SWACache(WINDOW, unmoved),
    "swamem": lambda: SWAMemCache(WINDOW, 6, unmoved),
    "chunked": lambda: ChunkedAttentionCache(WINDOW, unmoved),
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
    """One slot as the policy has it."""

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
    """A model runner with three slots, and the policy slot by slot."""

    def __init__(self, kind: str, multi_user: bool) -> None:
        self.kind, self.multi_user = kind, multi_user
        self.cache = CACHES[kind]()
        self.inputs = InputCache(self.cache, 3 * CONTEXT, 3, BATCH, multi_user, np.float32)
        self.slots = [Expected(number) for number in range(3)]
        self.clock = 0

    def choose(self, prompt: list[int]) -> tuple[Expected, int] | None:
        """Slot and number of inputs to reuse; forks as a side effect."""
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
        # A cache that lost what the window needs begins anew; a plain one always resumes.
        assert got == count or (got == 0 and self.kind not in ("causal", "causal without shift"))
        assert [item.token for item in slot.inputs] + [item.token for item in rest] == prompt
        self.clock += 1
        expected.used, expected.in_use, expected.tokens = self.clock, True, prompt[:got]
        self.evaluate(expected, [item.token for item in rest])

    def evaluate(self, expected: Expected, tokens: list[int]) -> None:
        """Run `tokens` in batches; every one must see its own history and nothing else."""
        slot = self.inputs.slots[expected.id]
        for start in range(0, len(tokens), BATCH):
            batch = tokens[start : start + BATCH]
            first = len(expected.tokens)
            self.cache.start_forward(range(first, first + len(batch)), [slot.id] * len(batch))
            for kind in range(2 if self.kind == "wrapper" else 1):
                if self.kind == "wrapper":
                    self.cache.set_layer_type(kind)
                self.cache.set_layer(0)
                # The place in the history at the time of evaluation stays in the second number.
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
        """Make room as a runner does when the context is full."""
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
        # Cells may be shared after a fork; otherwise a plain cache with a shift function shifts.
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
@settings(max_examples=30, deadline=None, derandomize=True)
@given(calls=CALLS)
def test_random_prompts(kind: str, multi_user: bool, calls: list[tuple[Any, ...]]) -> None:
    runners = Runners(kind, multi_user)
    for name, *arguments in calls:
        getattr(runners, name)(*arguments)
        for slot, expected in zip(runners.inputs.slots, runners.slots, strict=True):
            assert [item.token for item in slot.inputs] == expected.tokens
            assert slot.in_use is expected.in_use
