"""Regressions of states: failures that happened, and must not again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pykvcache.errors import NoKvCacheSlot

if TYPE_CHECKING:
    from conftest import ContextFactory


def test_a_state_that_has_no_room_beside_forks_breaks_nothing(
    make_context: ContextFactory,
) -> None:
    """Cells that forks share stay taken when the sequence leaves them.

    So neither the state nor what was there before it found room in the window: the sequence was
    gone, and the context refused all work.
    """
    ctx = make_context("gemma3", swa_full=False, n_ctx=2048, n_ubatch=32)
    words = np.random.default_rng(0).integers(5, 200, 250).astype(np.int32)
    ctx.decode(words[:200])
    state = ctx.get_state(0)
    ctx.copy_kv_cache_seq(0, 1)
    ctx.copy_kv_cache_seq(0, 2)
    with contextlib.suppress(NoKvCacheSlot):
        for word in words[200:]:
            for seq in (0, 1, 2):
                ctx.decode([word], seq_id=seq)
    before = ctx.get_state().tobytes()
    with pytest.raises(NoKvCacheSlot, match="window"):
        ctx.set_state(state, 0)
    assert ctx.get_state().tobytes() == before
    ctx.clear_kv_cache_seq(2)
    ctx.set_state(state, 0)
    assert ctx.kv_cache_seq_pos_max(0) == 199
