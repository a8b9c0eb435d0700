"""Windows in chunks (Llama 4): a token sees its own chunk of 8,192 positions, nothing before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import Logits, apart
from pykvcache import LlamaContext
from pykvcache.errors import ArgumentError
from state.block_kit import parts_of
from support.models import RIGHT

CHUNK, N = 8192, 8300


@pytest.mark.slow
@pytest.mark.parametrize("swa_full", [True, False])
def test_a_chunk_is_all_that_is_needed(swa_full: bool, make_context: Callable[..., Any]) -> None:
    options = {"n_ctx": 9216, "n_seq_max": 2, "n_ubatch": 256}
    tokens = np.random.default_rng(4).integers(5, 300, N + 3, dtype=np.int32)
    first = make_context("llama4", **options, swa_full=swa_full)
    native = first.native
    assert [native.window_needed(n) for n in (0, 1, CHUNK - 1, CHUNK, N)] == [0, 0, 0, CHUNK, CHUNK]
    assert [native.least_cut(n) for n in (0, 1, CHUNK, CHUNK + 1)] == [0, CHUNK, CHUNK, 2 * CHUNK]
    first.decode(tokens[:CHUNK])
    at_end = parts_of(first, 0, CHUNK)
    assert at_end[1:3] == ([], CHUNK)
    after = {CHUNK: _rows(first, 0, tokens[CHUNK : CHUNK + 3])}
    first.decode(tokens[CHUNK + 3 : N])
    after[N] = _rows(first, 0, tokens[N:])
    parts = parts_of(first, 0, N)
    assert parts[2] == CHUNK
    begin, end = native.window_range(0)
    assert end == N + 3
    assert begin <= CHUNK
    other = make_context("llama4", **options, swa_full=not swa_full)
    for n, given in ((CHUNK, at_end), (N, parts)):
        other.native.set_blocks(1, *given)
        assert other.native.window_range(1) == (CHUNK, n)
        assert [other.can_resume(1, m) for m in (CHUNK - 1, CHUNK, n)] == [False, True, True]
        rows = _rows(other, 1, tokens[n : n + 3])
        assert max(map(apart, rows, after[n])) < RIGHT
    with pytest.raises(ArgumentError, match="108 cells"):
        other.native.set_blocks(0, parts[0], parts[1][1:], CHUNK + 8)
    # A state has what the chunk before needs, where that is there.
    state = first.sequence_state(0)
    other.restore_sequence(state, 1)
    assert other.native.window_range(1) == (begin, N + 3)
    assert other.can_resume(1, CHUNK - 1) == (begin == 0)


def _rows(ctx: LlamaContext, seq: int, tokens: Any) -> list[Logits]:
    """Logits after each of a few tokens."""
    rows = []
    for token in tokens:
        ctx.decode([int(token)], seq_id=seq)
        rows.append(ctx.logits())
    return rows
