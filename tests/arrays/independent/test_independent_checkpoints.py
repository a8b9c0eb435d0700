"""Recurrent states against folds over lists of tokens, wherever a sequence goes back to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache.arrays import CheckpointRing, RecurrentCache
from pykvcache.errors import NotSupported

SEQUENCES = st.sampled_from([0, 0, 1, 2])
FORWARD = st.tuples(
    st.just("forward"), st.dictionaries(SEQUENCES, st.integers(1, 4), min_size=1, max_size=3)
)
CALLS = st.lists(
    st.one_of(
        FORWARD,
        FORWARD,
        FORWARD,
        st.tuples(st.just("go_back"), SEQUENCES, st.integers(0, 30)),
        st.tuples(st.just("copy"), SEQUENCES, SEQUENCES, st.integers(0, 30)),
        st.tuples(st.just("clear"), SEQUENCES),
    ),
    min_size=8,
    max_size=40,
)


def fold(tokens: list[int], layer: int) -> list[float]:
    """A state that every token and its place change."""
    first, second = float(layer), 1.0
    for token in tokens:
        first = (first * 31 + token) % 9973
        second = (second * 7 + token) % 8191
    return [first, second]


class Recurrent:
    """A model of two recurrent layers, and the tokens of each sequence."""

    def __init__(self, count: int, min_pos: int, interval: int) -> None:
        self.cache = RecurrentCache(
            checkpoint_count=count, checkpoint_min_pos=min_pos, checkpoint_interval=interval
        )
        self.cache.init(np.float32, 3, 200, 12)
        self.tokens: dict[int, list[int]] = {}
        self.clock = 0

    def forward(self, counts: dict[int, int]) -> None:
        positions: list[int] = []
        sequences: list[int] = []
        new: dict[int, list[int]] = {}
        for seq, count in counts.items():
            start = len(self.tokens.get(seq, []))
            if start + count > 150:
                return
            positions += range(start, start + count)
            sequences += [seq] * count
            new[seq] = list(range(self.clock, self.clock + count))
            self.clock += count
        self.cache.start_forward(positions, sequences)
        rows = list(self.cache.batch_sequences)
        assert rows == sorted(counts)
        for layer in (0, 1):
            self.cache.set_layer(layer)
            state = self.cache.get_state("s", (2,), np.float64)
            for row, seq in enumerate(rows):
                held = self.tokens.get(seq, [])
                expected = fold(held, layer) if held else [0.0, 0.0]
                assert state[row].tolist() == expected
            after = [fold(self.tokens.get(seq, []) + new[seq], layer) for seq in rows]
            self.cache.put_state("s", np.array(after))
        for seq in rows:
            self.tokens[seq] = self.tokens.get(seq, []) + new[seq]

    def go_back(self, seq: int, pos: int) -> None:
        held = self.tokens.get(seq, [])
        if not 0 < pos <= len(held):
            return
        can = self.cache.can_resume(seq, pos)
        if pos < len(held):
            with pytest.raises(NotSupported):  # nothing was prepared
                self.cache.remove(seq, pos)
        restored = self.cache.prepare_restore(seq, pos)
        if restored is None:
            assert not can
            return
        assert 0 < restored <= pos
        assert can is (restored == pos)
        self.cache.remove(seq, restored)
        self.tokens[seq] = held[:restored]

    def copy(self, src: int, dst: int, n: int) -> None:
        held = self.tokens.get(src, [])
        if src == dst:
            return
        self.cache.copy_prefix(src, dst, n)
        self.tokens[dst] = held[:n]
        if n < len(held):
            restored = self.cache.prepare_restore(dst, n)
            if restored is None:
                self.clear(dst)
                return
            self.cache.remove(dst, restored)
            self.tokens[dst] = held[:restored]

    def clear(self, seq: int) -> None:
        self.cache.remove(seq, 0)
        self.tokens.pop(seq, None)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(calls=CALLS, count=st.integers(0, 4), min_pos=st.integers(0, 4), interval=st.integers(0, 4))
def test_states_are_those_of_the_tokens(
    calls: list[tuple[Any, ...]], count: int, min_pos: int, interval: int
) -> None:
    model = Recurrent(count, min_pos, interval)
    for name, *arguments in calls:
        getattr(model, name)(*arguments)
    model.forward({0: 1, 1: 1, 2: 1})


def ring_at(*positions: int, count: int = 8) -> CheckpointRing:
    ring = CheckpointRing(count)
    for position in positions:
        ring.record(position)
    return ring


def test_the_best_checkpoint_lies_below_the_target() -> None:
    ring = ring_at(5, 9, 15)
    for target, expected in ((12, 9), (9, 5), (16, 15), (15, 9), (6, 5)):
        place = ring.best(target)
        assert place is not None
        assert ring.at(place)[0] == expected
    assert ring.best(5) is None


def test_rings_forget_shift_and_wrap() -> None:
    ring = ring_at(10, 20, 30)
    ring.prune_after(20)
    assert (ring.size, ring.last_pos) == (2, 20)
    ring.prune_after(5)
    assert (ring.size, ring.last_pos) == (0, -1)
    ring = ring_at(1, 4, 7, 10)
    ring.shift_range(2, 6)
    assert (sorted(ring.positions), ring.last_pos) == ([1, 3, 6], 6)
    assert sorted(ring_at(1, 2, 3, 4, count=3).positions) == [2, 3, 4]
    assert CheckpointRing(0).record(7) == -1
