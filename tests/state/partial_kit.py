"""Helpers of the tests of partial states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.kit import CASES, Bench, Case
from pykvcache import LlamaContext
from pykvcache.errors import PartialStateError, StateError
from pykvcache.state import PartialState

MakeBench = Callable[..., Bench]
# The window of a small cache reuses its cells after 256 tokens.
LONG = {"n_ctx": 2048, "n_ubatch": 32}


def is_forgetful(case: Case) -> bool:
    """Whether a memory drops cells of a window or folds tokens into a state."""
    return case.has_states and bool(case.info.n_swa or case.info.has_recurrent_state)


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
