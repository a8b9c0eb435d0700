"""Recurrent states and their checkpoints: the ring, and the cache that goes back to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama_support import add_shift, made, one, seen

from pykvcache.arrays import CausalCache, CheckpointRing, RecurrentCache, WrapperCache
from pykvcache.errors import CacheValueError, NotSupported
from support.examples import examples

# The ring ----------------------------------------------------------------------------------


def ring(count: int, *positions: int) -> CheckpointRing:
    checkpoints = CheckpointRing(count)
    for pos in positions:
        checkpoints.record(pos)
    return checkpoints


def best_pos(checkpoints: CheckpointRing, target: int) -> int:
    place = checkpoints.best(target)
    return -1 if place is None else checkpoints.at(place)[0]


@settings(max_examples=examples(80), deadline=None)
@given(
    count=st.integers(0, 4),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(1, 5), st.just(0)),
            st.tuples(st.just("record"), st.integers(1, 5), st.just(0)),
            st.tuples(st.just("prune"), st.integers(0, 25), st.just(0)),
            st.tuples(st.just("shift"), st.integers(0, 20), st.integers(0, 6)),
        ),
        max_size=20,
    ),
)
def test_a_ring_is_the_end_of_a_list(count: int, steps: list[tuple[str, int, int]]) -> None:
    checkpoints, kept, top = CheckpointRing(count), [], 0
    for kind, a, b in steps:
        if kind == "record":
            top += a
            place = checkpoints.record(top)
            kept = [*kept, top][-count:] if count else []
            assert place == -1 if not count else checkpoints.at(place) == (top, {})
            assert checkpoints.last_pos == (top if count else -1)
        elif kind == "prune":
            checkpoints.prune_after(a)
            kept = [pos for pos in kept if pos <= a]
            assert checkpoints.last_pos == (a if kept else -1)
        else:
            checkpoints.shift_range(a, a + b)
            kept = [pos - b * (pos >= a) for pos in kept if not a <= pos < a + b]
            assert checkpoints.last_pos == max(kept, default=-1)
        top = max([0, *kept])
        assert checkpoints.positions == sorted(kept)
        assert checkpoints.size == len(kept)
        for target in range(30):
            below = [pos for pos in kept if pos < target]
            assert best_pos(checkpoints, target) == max(below, default=-1)


def test_a_checkpoint_holds_read_only_copies_of_its_own_arrays() -> None:
    checkpoints, given_array = CheckpointRing(2), np.full(3, 1.0)
    for pos in (1, 2):
        checkpoints.store(checkpoints.record(pos), "a", given_array)
    given_array[:] = 9
    read = checkpoints.at(0)[1]["a"]
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 7
    place = checkpoints.record(3)
    assert checkpoints.at(place) == (3, {})
    checkpoints.store(place, "a", np.full(4, 5.0))
    assert checkpoints.at(place)[1]["a"].tolist() == [5, 5, 5, 5]
    assert read.tolist() == [1, 1, 1]


def test_numbers_of_checkpoints_are_checked() -> None:
    for call in (
        lambda: CheckpointRing(-1),
        lambda: CheckpointRing(2**16 + 1),
        lambda: ring(2).at(2),
        lambda: ring(2).at(-3),
        lambda: ring(2).store(2, "name", np.ones(2)),
        lambda: ring(2).record(2**64 - 1),
        lambda: RecurrentCache(checkpoint_min_pos=-1),
        lambda: RecurrentCache(checkpoint_interval=-1),
    ):
        with pytest.raises(CacheValueError):
            call()


# States against folds over the tokens --------------------------------------------------------

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
        st.tuples(st.just("reserve")),
    ),
    min_size=8,
    max_size=40,
)


def fold(tokens: list[int], layer: int) -> list[float]:
    """Return a state that every token and its place change."""
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
        self.count, self.min_pos, self.interval = count, min_pos, interval
        self.tokens: dict[int, list[int]] = {}
        self.checkpoints: dict[int, list[int]] = {}
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
                assert state[row].tolist() == (fold(held, layer) if held else [0.0, 0.0])
            after = [fold(self.tokens.get(seq, []) + new[seq], layer) for seq in rows]
            self.cache.put_state("s", np.array(after))
        for seq in rows:
            self.tokens[seq] = self.tokens.get(seq, []) + new[seq]
            newest, marks = len(self.tokens[seq]) - 1, self.checkpoints.setdefault(seq, [])
            if newest >= self.min_pos and (not marks or newest - marks[-1] >= self.interval):
                marks.append(newest)

    def best(self, seq: int, pos: int) -> int | None:
        """Return where a sequence can go back to: after a checkpoint below pos that is left."""
        left = self.checkpoints.get(seq, [])[-self.count :] if self.count else []
        return max((mark + 1 for mark in left if mark < pos), default=None)

    def go_back(self, seq: int, pos: int) -> None:
        held = self.tokens.get(seq, [])
        if not 0 < pos <= len(held):
            return
        expected = pos if pos == len(held) else self.best(seq, pos)
        assert self.cache.can_resume(seq, pos) is (expected == pos)
        if pos < len(held):
            with pytest.raises(NotSupported, match="cannot go back"):  # nothing was prepared
                self.cache.remove(seq, pos)
        assert self.cache.prepare_restore(seq, pos) == expected
        if expected is not None:
            self.cut(seq, expected)

    def cut(self, seq: int, pos: int) -> None:
        self.cache.remove(seq, pos)
        self.tokens[seq] = self.tokens[seq][:pos]
        self.checkpoints[seq] = [m for m in self.checkpoints[seq][-self.count :] if m < pos]

    def copy(self, src: int, dst: int, n: int) -> None:
        held = self.tokens.get(src, [])
        if src == dst:
            return
        self.cache.copy_prefix(src, dst, n)
        self.tokens[dst] = held[:n]
        self.checkpoints[dst] = [*self.checkpoints.get(src, [])]
        if not held or not n:
            self.tokens.pop(dst), self.checkpoints.pop(dst)
        elif n < len(held):
            with pytest.raises(NotSupported):
                self.cache.start_forward([n], [dst])
            restored = self.cache.prepare_restore(dst, n)
            assert restored == self.best(dst, n)
            self.clear(dst) if restored is None else self.cut(dst, restored)

    def clear(self, seq: int) -> None:
        self.cache.remove(seq, 0)
        self.tokens.pop(seq, None), self.checkpoints.pop(seq, None)

    def reserve(self) -> None:
        self.cache.start_forward([0], [0], reserve=True)
        self.cache.put_state("s", np.ones((1, 2)))


@settings(max_examples=examples(120), deadline=None)
@given(calls=CALLS, count=st.integers(0, 4), min_pos=st.integers(0, 4), interval=st.integers(0, 4))
def test_states_are_those_of_the_tokens(
    calls: list[tuple[Any, ...]], count: int, min_pos: int, interval: int
) -> None:
    model = Recurrent(count, min_pos, interval)
    for name, *arguments in calls:
        getattr(model, name)(*arguments)
    model.forward({0: 1, 1: 1, 2: 1})


# By example ----------------------------------------------------------------------------------


class Model:
    """A model with one attention layer and two recurrent ones: a state is a sum of tokens."""

    def __init__(self, **options: Any) -> None:
        options = {"checkpoint_min_pos": 0, "checkpoint_interval": 4, **options}
        self.cache = made(RecurrentCache(add_shift, **options), 2, 64)

    def feed(self, seq: int, tokens: list[int], start: int) -> list[float]:
        """Evaluate tokens one by one; return the state of layer 1."""
        out: list[float] = []
        for pos, token in enumerate(tokens, start):
            self.cache.start_forward([pos], [seq])
            self.cache.set_layer(0)
            self.cache.put(one(pos), one(pos))
            for layer in (1, 2):
                self.cache.set_layer(layer)
                state = np.add(self.cache.get_state("sum", (2,)), [token * layer, 1])
                self.cache.put_state("sum", state)
                if layer == 1:
                    out = state[0].tolist()
        return out


def test_states_belong_to_sequences() -> None:
    model = Model()
    assert model.feed(0, [5, 6, 7], 0) == [18, 3]
    assert model.feed(1, [1], 0) == [1, 1]
    cache = model.cache
    cache.start_forward([1, 3], [1, 0])
    assert cache.batch_sequences == [0, 1]
    cache.set_layer(1)
    assert cache.get_state("sum", (2,)).tolist() == [[18, 3], [1, 1]]
    for wrong in (np.ones((3, 2)), np.ones(()), np.ones((1, 2))):
        with pytest.raises(CacheValueError, match="2 rows are needed"):
            cache.put_state("sum", wrong)
    for shape in ((3,), (-1,), (2**62,), (2**40, 2**40, 0)):
        with pytest.raises(CacheValueError):
            cache.get_state("sum", shape)


def test_an_incomplete_checkpoint_is_refused() -> None:
    model = Model()
    model.feed(0, list(range(4)), 0)
    cache = model.cache
    cache.start_forward([4], [0])
    cache.set_layer(1)
    cache.put_state("sum", np.ones((1, 2)))
    model.feed(0, [5, 6], 5)
    assert cache.prepare_restore(0, 7) == 7
    assert cache.prepare_restore(0, 6) == 5
    with pytest.raises(NotSupported, match="complete checkpoint"):
        cache.remove(0, 5)
    assert seen(cache, 0, 7)[-1] == 6


def test_removing_from_the_middle_shifts_checkpoints_and_forgets_a_prepared_restore() -> None:
    model = Model()
    model.feed(0, list(range(14)), 0)
    cache = model.cache
    assert cache.prepare_restore(0, 10) == 9
    cache.remove(0, 20, 30)  # nothing there: the restore stays prepared
    cache.remove(0, 1, 3)
    for pos in (9, 7):
        with pytest.raises(NotSupported):
            cache.remove(0, pos)
    # Taken at 0, 4, 8 and 12, which are 0, 2, 6 and 10 now.
    assert [pos for pos in range(13) if cache.can_resume(0, pos)] == [0, 1, 3, 7, 11, 12]
    assert cache.prepare_restore(0, 8) == 7
    with pytest.raises(NotSupported, match="cannot go back to 3"):
        cache.remove(0, 3)  # another checkpoint than the prepared one
    cache.remove(0, 7)
    assert model.feed(0, [0], 7) == [sum(range(9)), 10]


def test_another_batch_or_target_forgets_a_prepared_restore() -> None:
    model = Model()
    model.feed(0, list(range(7)), 0)
    for forget in (lambda: model.feed(0, [7], 7), lambda: model.cache.prepare_restore(0, 0)):
        assert model.cache.prepare_restore(0, 6) == 5
        forget()
        with pytest.raises(NotSupported, match="cannot go back to 5"):
            model.cache.remove(0, 5)


def test_a_batch_must_begin_where_the_state_is() -> None:
    model = Model()
    model.feed(0, [1, 2, 3], 0)
    for positions in ([2], [4], [3, 5], [3, 3]):
        with pytest.raises(NotSupported, match="continues at 3"):
            model.cache.start_forward(positions, [0] * len(positions))
    assert model.feed(0, [4], 3) == [10, 4]


def test_a_copied_prefix_continues_from_a_checkpoint_only() -> None:
    cache = made(RecurrentCache(add_shift, checkpoint_min_pos=0, checkpoint_interval=2), 2)
    for pos in range(6):
        cache.start_forward([pos], [0])
        cache.put(one(pos), one(pos))
        cache.put_state("s", cache.get_state("s", (1,)) + pos)
    cache.copy_prefix(0, 1, 3)  # K and V of 0 to 2, and the state of 0 to 5
    assert [pos for pos in range(9) if cache.can_resume(1, pos)] == [0, 1, 3]
    assert [cache.prepare_restore(1, pos) for pos in range(7)] == [None, 1, 1, 3, 3, 3, 3]
    for pos in (3, 6):
        with pytest.raises(NotSupported):
            cache.start_forward([pos], [1])
    for _ in range(4):  # positions without K and V cannot be removed from the state
        cache.remove(1, 3, 4)
        assert not cache.can_resume(1, 2)
    cache.remove(1, 3)
    cache.start_forward([3], [1])
    assert cache.get_state("s", (1,)).item() == 0 + 1 + 2
    with pytest.raises(NotSupported):
        cache.copy_prefix(0, 0, 2)
    wrapper = made(WrapperCache(RecurrentCache(checkpoint_min_pos=99), CausalCache()), 2)
    wrapper.start_forward(range(4), [0] * 4)
    wrapper.copy_prefix(0, 1, 2)
    with pytest.raises(NotSupported, match="its K and V end at 2"):
        wrapper.start_forward([4], [1])
