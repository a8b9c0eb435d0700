"""Partial states: a sequence goes back to the time of one that fits, and any other is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case, Make, apart
from pykvcache import LlamaBatch, LlamaContext
from pykvcache.errors import (
    ClosedError,
    DecodeAborted,
    NoKvCacheSlot,
    PartialStateError,
    SequenceIdError,
    StateError,
    UnsupportedOperation,
)
from pykvcache.state import PartialState
from state.kit import LONG, MakeBench, is_forgetful, next_logits
from support.models import EVERY_MODEL, RIGHT
from support.stopping import stop_soon

FORGETFUL = [case for case in CASES if is_forgetful(case)]
TAGGED = [case for case in FORGETFUL if case.info.memory != "recurrent"]
RECURRENT = [case for case in FORGETFUL if case.info.memory == "recurrent"]

forgetful = pytest.mark.parametrize("case", FORGETFUL, ids=str)


def put_back(b: Bench, state: PartialState) -> None:
    """Put a state back, and say so in the account."""
    seq = state.seq_id
    assert state.is_valid
    b.ctx.set_partial_state(state)
    b.held[seq] = b.held[seq][: state.pos + 1 - b.start.get(seq, 0)]
    b.positions()
    assert state.is_valid
    assert b.ctx.can_resume(seq, state.pos + 1)


def refused(ctx: LlamaContext, state: PartialState) -> None:
    """Check that the state is invalid, and that an attempt changes no byte."""
    before, held = ctx.get_state().tobytes(), ctx.sequences()
    assert not state.is_valid
    assert "no longer valid" in repr(state)
    with pytest.raises(PartialStateError) as caught:
        ctx.set_partial_state(state)
    assert isinstance(caught.value, StateError)
    assert (caught.value.seq_id, caught.value.pos) == (state.seq_id, state.pos)
    assert ctx.get_state().tobytes() == before
    assert ctx.sequences() == held


@pytest.mark.hazard("S30")
@forgetful
def test_a_sequence_rolls_back_to_every_partial_state(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    taken = {}
    for more in (3, 17, 41, 38):
        b.feed(0, more)
        taken[len(b.held[0])] = b.ctx.get_partial_state(0)
    b.feed(0, 300)
    for n, on in ((99, 40), (61, 300), (61, 1), (20, 5), (3, 300), (3, 1)):
        put_back(b, taken[n])
        b.check(0, n=2)
        b.feed(0, on)
        b.check(0)
    for n in (20, 61, 99):
        if case.info.memory != "recurrent":
            refused(b.ctx, taken[n])


@forgetful
def test_a_partial_state_has_the_size_of_a_window_or_a_state(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 100)
    early = b.ctx.get_partial_state(0)
    b.feed(0, 300)
    late = b.ctx.get_partial_state(0)
    assert (early.seq_id, early.pos, late.pos) == (0, 99, 399)
    assert early.memory_kind == b.ctx.memory_kind
    assert 0 < late.nbytes == early.nbytes <= b.ctx.state_size(0)
    assert repr(late) == (
        f"<PartialState {b.ctx.memory_kind}, sequence 0 up to position 399, {late.nbytes:,} bytes>"
    )


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_rollback_keeps_the_first_position_of_a_recurrent_state(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case)
    words = b.prompt(5)
    b.ctx.decode(LlamaBatch.from_arrays(words, np.arange(10, 15), 0))
    state = b.ctx.get_partial_state(0)
    b.ctx.clear_kv_cache_seq(0)
    b.feed(0, 3)
    b.held[0], b.start[0] = [*words, 1, 2, 3], 10
    put_back(b, state)
    assert b.ctx.sequences()[0].pos_min == 10
    b.check()


def is_aborted(b: Bench, before: PartialState, delay: float) -> bool:
    """Return whether a long decode was stopped; undo one that finished before."""
    thread = stop_soon(b.ctx, delay)
    try:
        b.ctx.decode(b.prompt(3500))
    except DecodeAborted:
        return True
    finally:
        thread.join()
    b.ctx.set_partial_state(before)
    return False


@pytest.mark.parametrize("case", [c for c in FORGETFUL if c.swa_full], ids=str)
def test_a_partial_state_repairs_an_aborted_decode(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_ctx=16384, n_batch=4096)
    b.feed(0, 40)
    b.feed(1, 40)
    states = [b.ctx.get_partial_state(seq) for seq in (0, 1)]
    b.feed(0, 3)
    assert any(is_aborted(b, states[0], delay) for delay in (0.01, 0.005, 0.0))
    if case.info.has_recurrent_state and not case.info.n_swa:  # whose decodes have parts
        with pytest.raises(UnsupportedOperation, match="aborted"):
            b.ctx.get_partial_state(0)
    for state in states:
        put_back(b, state)
    b.check(n=2)
    b.feed(0, 50)
    b.check(n=2)


# What no longer fits ------------------------------------------------------------------------------


def rewind_and_differ(ctx: LlamaContext) -> bool:
    if not ctx.clear_kv_cache_seq(0, 55):
        return False
    ctx.decode(np.arange(10, 30, dtype=np.int32))
    return True


def swap(ctx: LlamaContext) -> None:
    """The same cells, by way of another sequence."""
    ctx.copy_kv_cache_seq(0, 2)
    ctx.copy_kv_cache_seq(2, 0)


CHANGES: dict[str, Callable[[LlamaContext], object]] = {
    "removed": lambda ctx: ctx.clear_kv_cache_seq(0),
    "all removed": lambda ctx: ctx.clear_kv_cache_seq(),
    "cleared": lambda ctx: ctx.clear_kv_cache(),
    "not kept": lambda ctx: ctx.kv_cache_seq_keep(1),
    "copied over": lambda ctx: ctx.copy_kv_cache_seq(1, 0),
    "copied over by nothing": lambda ctx: ctx.copy_kv_cache_seq(3, 0),
    "copied there and back": swap,
    "restored": lambda ctx: ctx.set_state(ctx.get_state(1), 0),
    "restored to the same": lambda ctx: ctx.set_state(ctx.get_state(0), 0),
    "restored with all": lambda ctx: ctx.set_state(ctx.get_state()),
    "written": lambda ctx: ctx.write_kv(ctx.kv(1), 0),
    "rewound": lambda ctx: ctx.clear_kv_cache_seq(0, 59),
    "rewound and gone on": rewind_and_differ,
    "middle removed": lambda ctx: ctx.clear_kv_cache_seq(0, 20, 30),
    "gap closed": lambda ctx: ctx.remove(0, 59, 62),
    "shifted": lambda ctx: ctx.kv_cache_seq_add(0, None, None, 5),
    "last shifted": lambda ctx: ctx.kv_cache_seq_add(0, 59, None, 5),
    "divided": lambda ctx: ctx.kv_cache_seq_div(0, None, None, 2),
    "gone back": lambda ctx: None,  # to a state that was taken before
}
# What a recurrent state, a window that slid, or an index does not do.
PARTS = ("rewound", "rewound and gone on", "middle removed", "gap closed")
PARTS += ("shifted", "last shifted", "divided", "written")


def change_it(ctx: LlamaContext, change: str) -> bool:
    """Return whether it succeeded."""
    try:
        return CHANGES[change](ctx) is not False
    except UnsupportedOperation:
        return False


# Each change on one of the memories, in turns: random programs try them on all.
CASES_IN_TURNS = [
    pytest.param(case, change, id=f"{case}-{change}")
    for i, change in enumerate(CHANGES)
    for case in (TAGGED if EVERY_MODEL else [TAGGED[i % len(TAGGED)]])
]


@pytest.mark.hazard("S30", "N110")
@pytest.mark.parametrize(("case", "change"), CASES_IN_TURNS)
def test_a_changed_sequence_is_refused(case: Case, change: str, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(1, 70)
    b.feed(0, 30)
    early = b.ctx.get_partial_state(0)
    b.feed(0, 30)
    state = b.ctx.get_partial_state(0)
    b.feed(0, 30)
    if not change_it(b.ctx, change):
        assert change in PARTS
        put_back(b, state)
        b.check()
        return
    if change == "gone back":
        put_back(b, early)
        b.feed(0, 40)
    refused(b.ctx, state)
    if change in ("rewound", "last shifted", "gap closed", "rewound and gone on"):
        b.held[0] = b.held[0][:30]
        b.ctx.set_partial_state(early)  # cells below 30 are unchanged
        b.check(0)
    elif change != "gone back":
        refused(b.ctx, early)
    # The ids of sequences are used again, and their states are others.
    b.ctx.clear_kv_cache()
    b.held.clear()
    b.feed(0, 60)
    refused(b.ctx, state)
    b.ctx.get_partial_state(0)
    refused(b.ctx, state)
    b.check()


def full_window(make_context: Make) -> tuple[LlamaContext, PartialState, Any]:
    """Sequence 0 has slid, 1 to 3 share all cells of the window between two and two of them."""
    ctx = make_context("gemma3", swa_full=False, n_seq_max=5, **LONG)
    words = np.random.default_rng(4).integers(5, 250, 700).astype(np.int32)
    ctx.decode(words[:90])
    partial, whole = ctx.get_partial_state(0), ctx.get_state(0)
    ctx.decode(words[90:500])
    ctx.clear_kv_cache_seq(0, 480)
    ctx.decode(words[:190], seq_id=1)
    ctx.copy_kv_cache_seq(1, 2)
    ctx.copy_kv_cache_seq(1, 3)
    for seq in (1, 2, 3):
        for _ in range(60):
            try:
                ctx.decode([7], seq_id=seq)
            except NoKvCacheSlot:
                break
    return ctx, partial, whole


def test_a_window_full_of_forks_refuses_and_nothing_changes(make_context: Make) -> None:
    ctx, partial, whole = full_window(make_context)
    before = ctx.get_state().tobytes()
    with pytest.raises(NoKvCacheSlot, match="window"):
        ctx.set_state(whole, 4)
    assert ctx.get_state().tobytes() == before
    # Over its own sequence a state needs no cells but those that are there.
    assert partial.is_valid
    others = [ctx.get_state(seq).tobytes() for seq in (1, 2, 3)]
    ctx.set_partial_state(partial)
    assert ctx.kv_cache_seq_pos_max(0) == 89
    assert [ctx.get_state(seq).tobytes() for seq in (1, 2, 3)] == others
    ctx.clear_kv_cache_seq(3)
    ctx.clear_kv_cache_seq(2)
    ctx.set_state(whole, 4)
    assert ctx.kv_cache_seq_pos_max(4) == 89
    assert apart(next_logits(ctx, 0), next_logits(ctx, 4)) < RIGHT


def test_a_partial_state_belongs_to_one_context(make_context: Make) -> None:
    for name in ("gemma3", "mamba", "jamba", "lfm2_swa"):
        ctx, other = make_context(name), make_context(name)
        for each in (ctx, other):
            each.decode([5, 6, 7])
        state = ctx.get_partial_state(0)
        before = other.get_state().tobytes()
        with pytest.raises(PartialStateError, match="another context"):
            other.set_partial_state(state)
        assert other.get_state().tobytes() == before
        assert state.is_valid
        ctx.close()
        assert not state.is_valid
        with pytest.raises(ClosedError):
            ctx.set_partial_state(state)
        with pytest.raises(PartialStateError):
            other.set_partial_state(state)
        del ctx
        assert not state.is_valid


def test_other_objects_are_not_partial_states(make_context: Make) -> None:
    ctx = make_context("jamba")
    ctx.decode([5, 6])
    state = ctx.get_partial_state(0)
    for bad in (None, b"", ctx.get_state(0), 7, state._native, ctx):
        with pytest.raises(TypeError, match="PartialState"):
            ctx.set_partial_state(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="get_partial_state"):
        PartialState()
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="get_state"):
            duplicate(state)
    for seq in (-1, 4, 300):
        with pytest.raises(SequenceIdError):
            ctx.get_partial_state(seq)


def test_memories_without_partial_states_are_refused(make_context: Make) -> None:
    jamba = make_context("jamba")
    state = jamba.get_partial_state(0)
    for name, why in (("llama", "clear_kv_cache_seq"), ("qwen2vl", "rewinds"),
                      ("bert", "no memory"), ("t5", "encoder"), ("deepseek32", "rewinds"),
                      ("minimax_m3", "rewinds")):  # fmt: skip
        ctx = make_context(name, n_seq_max=1)
        for call in (ctx.get_partial_state, lambda _, c=ctx: c.set_partial_state(state)):
            with pytest.raises(UnsupportedOperation, match=why):
                call(0)


def test_a_rollback_leaves_no_logits(make_context: Make) -> None:
    for name in ("gemma3", "mamba"):
        ctx = make_context(name)
        ctx.decode([5, 6])
        state = ctx.get_partial_state(0)
        ctx.decode([7])
        ctx.set_partial_state(state)
        with pytest.raises(IndexError):
            ctx.logits()
