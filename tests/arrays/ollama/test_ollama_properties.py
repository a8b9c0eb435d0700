"""Each cache against lists of tokens: what is visible, what is refused, what attention gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ollama_support import assert_same, attend, rope, rope_shift, state, twin

from pykvcache.arrays import (
    CacheConfig,
    CausalCache,
    ChunkedAttentionCache,
    SWACache,
    SWAMemCache,
)
from pykvcache.errors import KvCacheFull, NotSupported, SharedCellsError
from support.examples import examples

SEQUENCES = (0, 1, 7, 10**12)
HEADS, DIM, VALUE_DIM = 2, 4, 3
FOREVER = 10**9


class Token:
    """What was put for one token, before rotation, in two layers."""

    def __init__(self, random: np.random.Generator) -> None:
        self.key = random.normal(size=(2, HEADS, DIM))
        self.value = random.normal(size=(2, HEADS, VALUE_DIM))


class CausalMachine(RuleBasedStateMachine):
    """The whole past, as a list of tokens per sequence, next to the cache.

    `gone` counts the tokens at the start of each list that the window may have dropped. A token
    in two lists is shared.
    """

    chunk = 0
    slides = False

    def build(self, data: Any) -> Any:
        self.window, self.memory = FOREVER, FOREVER
        return CausalCache(self.shift_fn)

    @initialize(
        data=st.data(),
        seed=st.integers(0, 2**32 - 1),
        max_sequences=st.integers(1, 3),
        capacity=st.integers(1, 12),
        max_batch=st.integers(1, 6),
        padding=st.integers(0, 4),
        rows=st.integers(0, 3),
        permuted_v=st.booleans(),
        can_shift=st.sampled_from((True, True, True, False)),
    )
    def start(
        self,
        data: Any,
        seed: int,
        max_sequences: int,
        capacity: int,
        max_batch: int,
        padding: int,
        rows: int,
        permuted_v: bool,
        can_shift: bool,
    ) -> None:
        self.shift_fn = rope_shift if can_shift else None
        # A window that is larger than the capacity never slides; that should stay the exception.
        capacity += 8 if self.slides else 0
        cache = self.build(data)
        cache.set_config(CacheConfig(padding, rows, np.float64, permuted_v))
        if self.slides and max_sequences > 1:
            self.memory = max(self.memory, self.window + 1)
        if self.memory >= capacity:
            self.memory = FOREVER
        cache.init(np.float64, max_sequences, capacity, max_batch)
        cells = max_sequences * capacity
        if self.memory < FOREVER:
            cells = max_sequences * self.memory + max_batch
        padding = padding or 1
        self.cells = (cells + padding - 1) // padding * padding
        self.cache, self.max_batch, self.rows = cache, max_batch, rows or 1
        self.padding, self.permuted_v = padding, permuted_v
        self.random = np.random.default_rng(seed)
        self.lists: dict[int, list[Token]] = {}
        self.gone: dict[int, int] = {}

    def held(self, lists: dict[int, list[Token]], gone: dict[int, int]) -> set[Token]:
        return {token for seq, tokens in lists.items() for token in tokens[gone[seq] :]}

    def slide(self, lowest: dict[int, int]) -> dict[int, int]:
        """Return `gone` once the window has moved on for a batch."""
        gone = {}
        for seq, tokens in self.lists.items():
            limit = lowest.get(seq, len(tokens)) - self.memory
            gone[seq] = min(max(self.gone[seq], limit), len(tokens))
        return gone

    @rule(
        sequences=st.lists(st.sampled_from(SEQUENCES), min_size=1, max_size=6),
        shuffle=st.booleans(),
        ahead=st.sets(st.integers(0, 5)),
    )
    def forward(self, sequences: list[int], shuffle: bool, ahead: set[int]) -> None:
        sequences = sequences[: self.max_batch]
        counts = {seq: len(self.lists.get(seq, [])) for seq in sequences}
        lowest, positions = dict(counts), []
        for seq in sequences:
            positions.append(counts[seq])
            counts[seq] += 1
        order = self.random.permutation(len(sequences)) if shuffle else range(len(sequences))
        batch = [(sequences[i], positions[i], Token(self.random)) for i in order]
        gone = self.slide(lowest)
        before = state(self.cache) if self.lists else None
        arguments = [pos for _, pos, _ in batch], [seq for seq, _, _ in batch]
        if len(self.held(self.lists, gone)) + len(batch) > self.cells:
            with pytest.raises(KvCacheFull, match=f"cache: {self.cells} batch: {len(batch)}"):
                self.cache.start_forward(*arguments)
            if before is not None:
                assert_same(before, state(self.cache))
            return
        self.cache.start_forward(*arguments)
        self.gone = {**dict.fromkeys(sequences, 0), **gone}
        for seq, pos, token in sorted(batch, key=lambda entry: entry[1]):
            self.lists.setdefault(seq, []).append(token)
            assert len(self.lists[seq]) == pos + 1
        self.check(batch, frozenset())
        rows = frozenset(row for row in ahead if row < len(batch))
        self.cache.set_causal(rows)
        self.check(batch, rows)

    def check(self, batch: list[tuple[int, int, Token]], ahead: frozenset[int]) -> None:
        """Compare attention through the cache with attention over the lists."""
        q = self.random.normal(size=(len(batch), HEADS, DIM))
        positions = [pos for _, pos, _ in batch]
        q = rope(q, positions)
        # All of the lists one after the other, and which of it each row sees.
        past: list[Token] = []
        at: list[int] = []
        begins = {}
        for seq in {seq: None for seq, _, _ in batch}:
            begins[seq] = len(past)
            past += self.lists[seq]
            at += range(len(self.lists[seq]))
        visible = np.full((len(batch), len(past)), -np.inf)
        for row, (seq, pos, _) in enumerate(batch):
            seen = self.visible(self.lists[seq], pos, row in ahead)
            visible[row, begins[seq] + seen.start : begins[seq] + seen.stop] = 0
        n_visible = (visible == 0).sum(1)
        for layer in (0, 1):
            self.cache.set_layer(layer)
            keys = np.array([token.key[layer] for _, _, token in batch])
            values = np.array([token.value[layer] for _, _, token in batch])
            self.cache.put(rope(keys, positions), values)
            key, value, mask = self.cache.get()
            if self.permuted_v:
                value = value.transpose(2, 0, 1)
            assert len(mask) % self.rows == 0
            assert len(mask) - len(batch) < self.rows
            assert len(key) == len(value) == mask.shape[1]
            assert len(key) % self.padding == 0
            assert (mask[len(batch) :] == -np.inf).all()
            mask = mask[: len(batch)]
            assert ((mask == 0).sum(1) == n_visible).all()
            assert ((mask == -np.inf).sum(1) == len(key) - n_visible).all()
            expected = attend(
                q,
                rope(np.array([token.key[layer] for token in past]), at),
                np.array([token.value[layer] for token in past]),
                visible,
            )
            np.testing.assert_allclose(attend(q, key, value, mask), expected, rtol=1e-9, atol=1e-12)

    def visible(self, tokens: list[Token], pos: int, ahead: bool) -> range:
        start = pos - pos % self.chunk if self.chunk else max(0, pos - self.window)
        return range(start, len(tokens) if ahead else pos + 1)

    @rule(seq=st.sampled_from(SEQUENCES), count=st.integers(1, 8))
    def generate(self, seq: int, count: int) -> None:
        for _ in range(count):
            self.forward([seq], False, set())

    @rule(seq=st.sampled_from(SEQUENCES), share=st.floats(0.5, 1.2))
    def rewind(self, seq: int, share: float) -> None:
        self.go_back(seq, int(share * len(self.lists.get(seq, []))))

    def go_back(self, seq: int, pos: int) -> None:
        """Go back as InputCache does: where the window is gone, start again."""
        tokens = self.lists.get(seq, [])
        unknown = self.gone.get(seq, 0) >= len(tokens)
        first = max(0, pos - self.window)
        can = self.memory == FOREVER or (
            not unknown and first >= self.gone[seq] and pos <= len(tokens)
        )
        assert self.cache.can_resume(seq, pos) is can
        keep = min(pos, len(tokens)) if can else 0
        self.cache.remove(seq, keep)
        self.cut(seq, keep, len(tokens))

    def cut(self, seq: int, begin: int, end: int) -> None:
        if seq not in self.lists:
            return
        self.gone[seq] -= max(0, min(self.gone[seq], end) - begin)
        del self.lists[seq][begin:end]
        if not self.lists[seq]:
            del self.lists[seq], self.gone[seq]

    @rule(seq=st.sampled_from(SEQUENCES), share=st.floats(0, 1), count=st.integers(0, 6))
    def remove(self, seq: int, share: float, count: int) -> None:
        tokens = self.lists.get(seq, [])
        begin = int(share * len(tokens))
        end = begin + count
        later = tokens[max(end, self.gone.get(seq, 0)) :]
        error = None
        if later and begin < end:
            others = {
                token
                for other, past in self.lists.items()
                if other != seq
                for token in past[self.gone[other] :]
            }
            left = list(range(len(tokens)))
            del left[begin:end]
            reach = left[max(0, len(left) - self.window) :]
            if others.intersection(later):
                error = SharedCellsError
            elif self.shift_fn is None or any(i < self.gone[seq] for i in reach):
                error = NotSupported
        if error is None:
            self.cache.remove(seq, begin, end)
            self.cut(seq, begin, end)
            if not later:
                self.go_back(seq, len(self.lists.get(seq, [])))
            return
        before, other = state(self.cache), twin(self.cache)
        with pytest.raises(error):
            self.cache.remove(seq, begin, end)
        assert_same(before, state(self.cache))
        # What comes next is as if the refused call had not been.
        for cache in (self.cache, other):
            cache.start_forward([0], [99], reserve=True)
        assert_same(state(self.cache), state(other))

    @rule(src=st.sampled_from(SEQUENCES), dst=st.sampled_from(SEQUENCES), n=st.integers(0, 14))
    def copy(self, src: int, dst: int, n: int) -> None:
        self.cache.copy_prefix(src, dst, n)
        tokens, gone = self.lists.get(src, [])[:n], min(self.gone.get(src, 0), n)
        for store in (self.lists, self.gone):
            store.pop(dst, None)
        if gone < len(tokens):
            self.lists[dst], self.gone[dst] = tokens, gone
        # A prefix whose end was dropped, or what its last tokens attend to, cannot go on.
        self.go_back(dst, len(tokens))

    @precondition(lambda self: self.lists)
    @rule()
    def reserve(self) -> None:
        """A reserve pass changes nothing that later passes see."""
        self.cache.start_forward([0] * self.max_batch, [5] * self.max_batch, reserve=True)
        self.cache.set_layer(0)
        self.cache.put(
            np.ones((self.max_batch, HEADS, DIM)), np.ones((self.max_batch, HEADS, VALUE_DIM))
        )


class ChunkedMachine(CausalMachine):
    def build(self, data: Any) -> Any:
        self.window, self.memory = FOREVER, FOREVER
        self.chunk = data.draw(st.integers(1, 5), label="chunk_size")
        return ChunkedAttentionCache(self.chunk, self.shift_fn)


class SlidingMachine(CausalMachine):
    slides = True

    def build(self, data: Any) -> Any:
        self.window = self.memory = data.draw(st.integers(1, 5), label="window_size")
        return SWACache(self.window, self.shift_fn)


class SlidingMemoryMachine(CausalMachine):
    slides = True

    def build(self, data: Any) -> Any:
        self.window = data.draw(st.integers(1, 4), label="window_size")
        self.memory = self.window + data.draw(st.integers(0, 4), label="more memory")
        return SWAMemCache(self.window, self.memory, self.shift_fn)


SETTINGS = settings(
    max_examples=examples(100), stateful_step_count=25, deadline=None, derandomize=True
)

TestCausalAgainstLists = CausalMachine.TestCase
TestCausalAgainstLists.settings = SETTINGS
TestChunkedAgainstLists = ChunkedMachine.TestCase
TestChunkedAgainstLists.settings = SETTINGS
TestSlidingAgainstLists = SlidingMachine.TestCase
TestSlidingAgainstLists.settings = SETTINGS
TestSlidingMemoryAgainstLists = SlidingMemoryMachine.TestCase
TestSlidingMemoryAgainstLists.settings = SETTINGS
