"""Partial states: a sequence is rewound to the time of the state, and others are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from memory.kit import EVERY_CASE, NAMES, Bench, Case, apart
from pykvcache import LlamaBatch
from pykvcache.errors import DecodeAborted, UnsupportedOperation
from pykvcache.state import PartialState
from state.partial_kit import (
    FORGETFUL,
    LONG,
    RECURRENT,
    MakeBench,
    forgetful,
    is_forgetful,
    put_back,
    refused,
)
from support.models import MODELS, usual
from support.stopping import stop_soon

if TYPE_CHECKING:
    from conftest import ContextFactory


@pytest.mark.hazard("S30")
@forgetful
def test_a_sequence_goes_back_to_every_state_that_was_taken(case: Case, bench: MakeBench) -> None:
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
def test_it_costs_a_window_or_a_state_and_not_the_sequence(case: Case, bench: MakeBench) -> None:
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


@forgetful
def test_forks_keep_what_they_have(case: Case, bench: MakeBench) -> None:
    """Forks share cells and states, and copies between streams are pending."""
    b = bench(case)
    b.feed(0, 40)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    state = b.ctx.get_partial_state(0)
    b.feed(0, 30)
    b.ctx.copy_kv_cache_seq(0, 2)
    b.held[2] = b.held[0].copy()
    put_back(b, state)
    b.check()
    b.feed(0, 50)
    b.ctx.copy_kv_cache_seq(0, 3)
    b.held[3] = b.held[0].copy()
    put_back(b, state)
    put_back(b, state)
    b.ctx.copy_kv_cache_seq(0, 2)
    b.held[2] = b.held[0].copy()
    put_back(b, state)
    b.check(n=3)


@pytest.mark.parametrize("case", [c for c in FORGETFUL if c.info.n_swa], ids=str)
@pytest.mark.parametrize(("early", "late"), [(90, 490), (30, 288)])
def test_forks_of_a_window_that_slid_keep_what_they_have(
    case: Case, early: int, late: int, bench: MakeBench
) -> None:
    """Also if the window is restored into cells that a pending copy reads."""
    b = bench(case)
    b.feed(0, early)
    state = b.ctx.get_partial_state(0)
    b.feed(0, late - early)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    put_back(b, state)
    b.check(n=2)
    put_back(b, state)
    b.ctx.copy_kv_cache_seq(0, 3)
    b.held[3] = b.held[0].copy()
    b.feed(0, 300)
    put_back(b, state)
    b.check()


@pytest.mark.parametrize("case", [c for c in FORGETFUL if c.info.can_shift and c.swa_full], ids=str)
def test_a_shift_before_is_part_of_it(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 40)
    b.ctx.kv_cache_seq_add(0, None, None, 7)
    b.start[0] = 7
    state = b.ctx.get_partial_state(0)
    assert state.pos == 46
    b.feed(0, 300)
    put_back(b, state)
    b.check()
    assert b.ctx.sequences()[0].pos_min == 7


@pytest.mark.parametrize("swa_full", [True, False])
def test_a_hole_before_is_part_of_it(
    swa_full: bool, make_context: ContextFactory, bench: MakeBench
) -> None:
    b = bench(Case("gemma3", True, swa_full))
    b.feed(0, 60)
    assert b.ctx.clear_kv_cache_seq(0, 40, 50)
    assert b.ctx.clear_kv_cache_seq(0, 5, 15)
    state, whole = b.ctx.get_partial_state(0), b.ctx.get_state(0)
    b.feed(0, 400)
    b.ctx.set_partial_state(state)
    other = make_context("gemma3", swa_full=swa_full, **LONG)
    other.set_state(whole, 0)
    for token in (5, 6, 7):
        for ctx in (b.ctx, other):
            ctx.decode([token])
        assert apart(b.ctx.logits(), other.logits()) < b.case.tolerance
    table = b.ctx.cells("attention")
    wanted = [*range(5), *range(15, 40), *range(50, 63)]
    assert sorted(table.pos[table.members[:, 0]]) == wanted


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_a_recurrent_state_begins_where_it_began(case: Case, bench: MakeBench) -> None:
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


@forgetful
def test_an_empty_sequence_goes_back_to_nothing(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    state = b.ctx.get_partial_state(2)
    assert state.pos == -1
    b.feed(1, 20)
    b.feed(2, 20)
    put_back(b, state)
    b.feed(2, 20)
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
def test_it_cures_an_aborted_decode(case: Case, bench: MakeBench) -> None:
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


def test_every_forgetful_model_is_here() -> None:
    with_states = {name: MODELS[name] for name in usual(NAMES) if MODELS[name].has_states}
    names = {name for name, info in with_states.items() if info.n_swa or info.has_recurrent_state}
    assert {case.name for case in EVERY_CASE if is_forgetful(case)} == names
