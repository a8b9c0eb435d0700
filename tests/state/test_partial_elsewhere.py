"""Partial states in another sequence that holds the same tokens; also above position 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memory.kit import Case, apart
from pykvcache import LlamaBatch
from pykvcache.errors import PartialStateError
from state.partial_kit import FORGETFUL, TAGGED, MakeBench

FIRST, N = 7, 12


def feed(ctx: Any, tokens: Any, seq_id: int, first: int) -> None:
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    ctx.decode(LlamaBatch.from_arrays(tokens, positions, seq_id))


@pytest.mark.parametrize("case", [c for c in FORGETFUL if not c.info.bounded], ids=str)
def test_a_state_that_begins_above_0_fits_the_same_tokens_elsewhere(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case)
    words, more = b.prompt(N), b.prompt(5)
    feed(b.ctx, words, 0, FIRST)
    state = b.ctx.get_partial_state(0)
    assert state.pos == FIRST + N - 1
    feed(b.ctx, words, 1, FIRST)
    feed(b.ctx, more, 1, FIRST + N)
    b.ctx.native.set_partial_state(state._native, 1)
    assert b.ctx.sequences()[1].pos_max == state.pos
    assert b.ctx.kv_cache_seq_pos_min(1) == b.ctx.kv_cache_seq_pos_min(0)
    rows = []
    for seq_id in (0, 1):
        b.ctx.decode(more[:1], seq_id=seq_id)
        rows.append(b.ctx.logits())
    assert apart(*rows) < case.tolerance


@pytest.mark.hazard("N110")
@pytest.mark.parametrize("case", [c for c in TAGGED if not c.info.bounded], ids=str)
def test_a_sequence_that_begins_elsewhere_is_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    words = b.prompt(FIRST + N)
    feed(b.ctx, words[FIRST:], 0, FIRST)
    state = b.ctx.get_partial_state(0)
    feed(b.ctx, words, 1, 0)
    before = b.ctx.get_state(1).tobytes()
    with pytest.raises(PartialStateError, match=f"the positions {FIRST} to {FIRST + N - 1}"):
        b.ctx.native.set_partial_state(state._native, 1)
    assert b.ctx.get_state(1).tobytes() == before


@pytest.mark.hazard("N110")
@pytest.mark.parametrize("case", [c for c in TAGGED if c.swa_full and c.info.n_swa], ids=str)
def test_a_hole_is_refused_also_where_later_cells_make_up_for_it(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case)
    words = b.prompt(N + 8)
    feed(b.ctx, words[:N], 0, 0)
    state = b.ctx.get_partial_state(0)
    feed(b.ctx, words, 1, 0)
    if not b.ctx.clear_kv_cache_seq(1, 4, 7):
        pytest.skip("this memory removes no part")
    with pytest.raises(PartialStateError):
        b.ctx.native.set_partial_state(state._native, 1)
