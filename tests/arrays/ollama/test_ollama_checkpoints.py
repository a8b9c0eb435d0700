"""Checkpoints of recurrent states: the ring, and the cache that goes back to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama_support import add_shift, seen

from pykvcache.arrays import CheckpointRing, Input, InputCache, RecurrentCache, WrapperCache
from pykvcache.errors import CacheOrderError, CacheValueError, NotSupported


def ring(count: int, *positions: int) -> CheckpointRing:
    made = CheckpointRing(count)
    for pos in positions:
        made.record(pos)
    return made


def best_pos(checkpoints: CheckpointRing, target: int) -> int:
    place = checkpoints.best(target)
    return -1 if place is None else checkpoints.at(place)[0]


# A.1 checkpoints: the best one is the largest position strictly below the target.
def test_ring_best_is_strictly_below_the_target() -> None:
    made = ring(3, 5, 9, 15)
    assert [best_pos(made, target) for target in (5, 6, 9, 10, 15, 16, 99)] == [
        -1, 5, 5, 9, 9, 15, 15,
    ]  # fmt: skip


# A.1 checkpoints: a ring of n places, the oldest of which is overwritten; size 0 stores nothing.
def test_ring_overwrites_the_oldest() -> None:
    made = ring(2, 10, 20)
    assert (made.size, made.last_pos, made.positions) == (2, 20, [10, 20])
    assert made.record(30) == 0
    assert best_pos(made, 15) == -1
    assert best_pos(made, 40) == 30
    empty = ring(0)
    assert empty.record(10) == -1
    assert (best_pos(empty, 15), empty.size, empty.last_pos) == (-1, 0, -1)
    empty.prune_after(3)
    empty.shift_range(1, 2)
    with pytest.raises(CacheValueError):
        CheckpointRing(-1)


# A.1 checkpoints: pruneAfter(20) leaves lastPos 20; of all, size 0 and lastPos -1.
def test_ring_prune_after() -> None:
    made = ring(3, 10, 20, 30)
    made.prune_after(20)
    assert (made.size, made.last_pos, made.positions) == (2, 20, [10, 20])
    assert best_pos(made, 35) == 20
    made.record(25)
    assert made.positions == [10, 20, 25]
    made.record(40)
    assert made.positions == [20, 25, 40]
    made.prune_after(5)
    assert (made.size, made.last_pos) == (0, -1)
    assert best_pos(made, 100) == -1


# A.1 checkpoints: shiftRange(2, 6) of 1, 4, 7, 10 gives 1, 3, 6 with lastPos 6.
def test_ring_shift_range() -> None:
    made = ring(4, 1, 4, 7, 10)
    made.shift_range(2, 6)
    assert (made.positions, made.last_pos, made.size) == ([1, 3, 6], 6, 3)
    # The free place is taken before any checkpoint is overwritten.
    made.record(8)
    assert made.positions == [1, 3, 6, 8]


# A.1 checkpoints: a place that is used again holds only what is new, and what was read stays.
def test_ring_place_that_is_used_again_holds_only_what_is_new() -> None:
    made = CheckpointRing(2)
    for pos in (1, 2):
        made.store(made.record(pos), "a", np.full(3, float(pos)))
    read = made.at(0)[1]["a"]
    place = made.record(3)
    assert made.at(place) == (3, {})
    made.store(place, "a", np.full(3, 3.0))
    assert made.at(place)[1]["a"].tolist() == [3, 3, 3]
    assert read.tolist() == [1, 1, 1]
    made.store(place, "a", np.full(4, 5.0))
    assert made.at(place)[1]["a"].tolist() == [5, 5, 5, 5]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(0, 4),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(1, 5), st.just(0)),
            st.tuples(st.just("prune"), st.integers(0, 25), st.just(0)),
            st.tuples(st.just("shift"), st.integers(0, 20), st.integers(0, 6)),
        ),
        max_size=20,
    ),
)
def test_ring_against_a_list(count: int, steps: list[tuple[str, int, int]]) -> None:
    made, kept, top = CheckpointRing(count), [], 0
    for kind, a, b in steps:
        if kind == "record":
            top += a
            made.record(top)
            kept = [*kept, top][-count:] if count else []
        elif kind == "prune":
            made.prune_after(a)
            kept = [pos for pos in kept if pos <= a]
        else:
            made.shift_range(a, a + b)
            kept = [pos - b * (pos >= a) for pos in kept if not a <= pos < a + b]
        top = max([0, *kept])
        assert sorted(kept) == made.positions
        assert made.size == len(kept)
        for target in range(30):
            assert best_pos(made, target) == max([pos for pos in kept if pos < target], default=-1)


class Model:
    """A model with one attention layer and two recurrent ones: a state is a sum of tokens."""

    def __init__(self, **options: Any) -> None:
        options = {"checkpoint_min_pos": 0, "checkpoint_interval": 4, **options}
        self.cache = RecurrentCache(add_shift, **options)
        self.cache.init(np.float32, 2, 64, 8)

    def feed(self, seq: int, tokens: list[int], start: int) -> list[float]:
        """Evaluate tokens one by one; return the state of layer 1."""
        out: list[float] = []
        for pos, token in enumerate(tokens, start):
            self.cache.start_forward([pos], [seq])
            self.cache.set_layer(0)
            self.cache.put(np.full((1, 1, 1), float(pos)), np.full((1, 1, 1), float(pos)))
            for layer in (1, 2):
                self.cache.set_layer(layer)
                state = np.add(self.cache.get_state("sum", (2,)), [token * layer, 1])
                self.cache.put_state("sum", state)
                if layer == 1:
                    out = state[0].tolist()
        return out


# A.1 checkpoints: the state of a sequence grows with it, zeros at first; rows per sequence.
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
    with pytest.raises(CacheValueError, match="has shape"):
        cache.get_state("sum", (3,))
    cache.start_forward([0], [0], reserve=True)
    cache.put_state("sum", np.ones((1, 2)))
    cache.start_forward([4], [0])
    assert cache.get_state("sum", (2,)).tolist() == [[18, 3]]


# A.1 checkpoints: PrepareRestore(1, 12) with checkpoints at 5, 9, 15 gives 10; Remove goes there.
def test_prepare_restore_goes_back_to_the_best_checkpoint() -> None:
    model = Model(checkpoint_min_pos=5, checkpoint_interval=4)
    tokens = list(range(100, 116))
    model.feed(1, tokens, 0)
    cache = model.cache
    assert cache.prepare_restore(1, 12) == 10
    cache.remove(1, 10)
    # The state is the one after tokens 0 to 9, and the sequence goes on from there.
    assert model.feed(1, [7], 10) == [sum(tokens[:10]) + 7, 11]
    # The checkpoint at 15 is of tokens that are gone; the next one after 9 is taken at 13.
    model.feed(1, [1] * 9, 11)
    assert cache.prepare_restore(1, 17) == 14
    cache.remove(1, 14)
    assert model.feed(1, [0], 14) == [sum(tokens[:10]) + 10, 15]
    assert seen(cache, 1, 15)[-1] == 14
    cache.remove(1, 0)
    assert model.feed(1, [3], 0) == [3, 1]


# A.1 checkpoints: none below the minimum position, none closer than the interval.
def test_checkpoints_are_taken_at_intervals() -> None:
    model = Model(checkpoint_min_pos=6, checkpoint_interval=5)
    model.feed(0, list(range(20)), 0)
    resumable = [pos for pos in range(22) if model.cache.can_resume(0, pos)]
    assert resumable == [0, 7, 12, 17, 20]
    assert [model.cache.prepare_restore(0, pos) for pos in (0, 6, 7, 11, 19, 20)] == [
        None, None, 7, 7, 17, 20,
    ]  # fmt: skip


# A.1 checkpoints: a partial Remove without a prepared checkpoint is NotSupported.
def test_partial_remove_needs_a_prepared_checkpoint() -> None:
    model = Model()
    model.feed(0, list(range(10)), 0)
    cache = model.cache
    with pytest.raises(NotSupported, match="cannot go back to 9"):
        cache.remove(0, 9)
    assert cache.prepare_restore(0, 9) == 9
    with pytest.raises(NotSupported, match="cannot go back to 5"):
        cache.remove(0, 5)
    assert cache.prepare_restore(0, 7) == 5
    cache.remove(0, 10)
    cache.remove(0, 5)
    assert model.feed(0, [1], 5) == [sum(range(5)) + 1, 6]
    assert cache.prepare_restore(7, 3) is None


# A.1 checkpoints: one that lacks the state of a layer is NotSupported.
def test_incomplete_checkpoint_is_not_gone_back_to() -> None:
    model = Model()
    model.feed(0, list(range(4)), 0)
    cache = model.cache
    cache.start_forward([4], [0])
    cache.set_layer(1)
    cache.put_state("sum", np.ones((1, 2)))
    model.feed(0, [5, 6], 5)
    assert cache.prepare_restore(0, 6) == 5
    with pytest.raises(NotSupported, match="complete checkpoint"):
        cache.remove(0, 5)
    assert seen(cache, 0, 7)[-1] == 6


# A.1 checkpoints: a middle Remove shifts them and clears a pending restore.
def test_middle_remove_shifts_checkpoints_and_forgets_a_pending_restore() -> None:
    model = Model()
    model.feed(0, list(range(14)), 0)
    cache = model.cache
    assert cache.prepare_restore(0, 10) == 9
    cache.remove(0, 1, 3)
    with pytest.raises(NotSupported):
        cache.remove(0, 9)
    # Taken at 0, 4, 8 and 12, which are 0, 2, 6 and 10 now.
    assert [pos for pos in range(13) if cache.can_resume(0, pos)] == [0, 1, 3, 7, 11, 12]
    assert cache.prepare_restore(0, 8) == 7
    cache.remove(0, 7)
    assert model.feed(0, [0], 7) == [sum(range(9)), 10]


# A.1 checkpoints: states shared by CopyPrefix detach when one of the sequences writes.
def test_copies_share_states_until_they_are_written() -> None:
    model = Model()
    model.feed(0, list(range(10)), 0)
    cache = model.cache
    cache.copy_prefix(0, 1, 10)
    assert model.feed(1, [100], 10) == [sum(range(10)) + 100, 11]
    assert model.feed(0, [5], 10) == [sum(range(10)) + 5, 11]
    cache.copy_prefix(0, 1, 6)
    with pytest.raises(NotSupported, match="sequence 1 goes on at 11"):
        cache.start_forward([6], [1])
    assert cache.prepare_restore(1, 6) == 5
    cache.remove(1, 5)
    assert model.feed(1, [50], 5) == [sum(range(5)) + 50, 6]
    assert model.feed(0, [1], 11) == [sum(range(10)) + 6, 12]
    cache.copy_prefix(0, 1, 0)
    assert model.feed(1, [2], 0) == [2, 1]


# Better than upstream: a batch that the state does not lead to is refused, nothing changed.
@pytest.mark.parametrize("positions", [[2], [4], [3, 5], [3, 3]])
def test_batch_must_begin_where_the_state_is(positions: list[int]) -> None:
    model = Model()
    model.feed(0, [1, 2, 3], 0)
    with pytest.raises(NotSupported, match="goes on at 3"):
        model.cache.start_forward(positions, [0] * len(positions))
    wrapper = WrapperCache(RecurrentCache(), RecurrentCache())
    wrapper.init(np.float32, 1, 8, 8)
    with pytest.raises(NotSupported, match="goes on at 0"):
        wrapper.start_forward(positions, [0] * len(positions))
    assert model.feed(0, [4], 3) == [10, 4]


def test_recurrent_cache_checks_order_and_numbers() -> None:
    cache = RecurrentCache()
    for call in (lambda: cache.get_state("a", (1,)), lambda: cache.prepare_restore(0, 1)):
        with pytest.raises(CacheOrderError, match="call init first"):
            call()
    cache.init(np.float32, 1, 8, 4)
    with pytest.raises(CacheOrderError, match="start_forward"):
        cache.put_state("a", np.ones((1, 1)))
    for name in ("checkpoint_count", "checkpoint_min_pos", "checkpoint_interval"):
        with pytest.raises(CacheValueError, match=name):
            RecurrentCache(**{name: -1})


# A.4b LoadCacheSlot with PrepareRestore: the slot policy over real checkpoints.
@pytest.mark.parametrize("multi_user", [False, True])
def test_slots_are_resumed_at_checkpoints(multi_user: bool) -> None:
    model = Model()
    policy = InputCache(model.cache, 64, 2, 8, multi_user, np.float32)

    def answer(*numbers: int) -> tuple[int, list[float]]:
        slot, rest = policy.load_slot([Input(number) for number in numbers])
        state = model.feed(slot.id, [item.token for item in rest], len(slot.inputs))
        slot.inputs, slot.in_use = slot.inputs + rest, False
        return len(rest), state

    prompt = list(range(1, 13))
    assert answer(*prompt) == (12, [sum(prompt), 12])
    assert answer(*prompt, 50) == (1, [sum(prompt) + 50, 13])
    # Common up to 7; the checkpoint before that was taken at 4.
    assert answer(*prompt[:7], 60, 61) == (4, [sum(prompt[:7]) + 121, 9])
