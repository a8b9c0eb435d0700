"""Restoring a state next to sequences whose windows fill the cache: their visible cells stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from state.kit import WORDS, next_logits
from support.models import RIGHT

if TYPE_CHECKING:
    from conftest import ContextFactory, FreshLogits
    from pykvcache import LlamaContext

TOKEN = 9


def in_window(ctx: LlamaContext, seq_id: int) -> set[int]:
    """Positions whose window cells the sequence still has."""
    cells = ctx.cells("window")
    return set(cells.pos[cells.members[:, seq_id]].tolist())


@pytest.mark.hazard("N51")
@pytest.mark.parametrize("name", ["gemma3", "lfm2_swa"])
def test_a_restore_takes_only_what_no_sequence_sees_any_more(
    name: str, make_context: ContextFactory, fresh_logits: FreshLogits
) -> None:
    """A full window cache gives up cells that the next token of their owner does not see."""
    ctx = make_context(name, n_ctx=1024, n_seq_max=3, n_ubatch=32, swa_full=False)
    short, long = WORDS[:40], WORDS[:300]
    ctx.decode(short, seq_id=1)
    state = ctx.get_state(1)
    ctx.decode(long, seq_id=0)
    before = in_window(ctx, 0)
    ctx.set_state(state, seq_id=2)
    left = in_window(ctx, 0)
    assert left < before, "no cell was taken: this shows nothing"
    for seq_id, tokens in ((0, long), (1, short), (2, short)):
        wanted = fresh_logits(name, [*tokens, TOKEN])
        assert np.abs(next_logits(ctx, seq_id, TOKEN) - wanted).max() < RIGHT, seq_id
    if name != "gemma3":
        return  # a recurrent state is not rewound
    # A rewind knows the missing cells.
    back = next(n for n in range(1, len(long) + 1) if ctx.can_resume(0, n))
    assert not ctx.clear_kv_cache_seq(0, back - 1)
    assert ctx.clear_kv_cache_seq(0, back)
    wanted = fresh_logits(name, [*long[:back], TOKEN])
    assert np.abs(next_logits(ctx, 0, TOKEN) - wanted).max() < RIGHT
