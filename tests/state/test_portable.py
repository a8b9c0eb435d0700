"""From one context into another: other sizes, streams, sequences, flash attention, windows."""

from __future__ import annotations

from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Fresh, Make, apart
from pykvcache import SequenceState
from state.kit import CASES, WORDS, next_logits
from support.models import MODELS, RIGHT

NAMES = sorted({case.values[0].name for case in CASES})  # type: ignore[union-attr]
CONTEXTS: list[dict[str, Any]] = [
    {"n_ctx": 256, "n_seq_max": 1},
    {"n_ctx": 1024, "n_seq_max": 3, "kv_unified": False},
    {"n_ctx": 512, "n_seq_max": 8, "kv_unified": True, "n_batch": 64, "n_ubatch": 16},
]


@pytest.mark.parametrize("name", NAMES)
def test_other_sizes_streams_and_sequences(
    name: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    info = MODELS[name]
    fits = [
        o
        for o in CONTEXTS
        if o["n_seq_max"] == 1 or (info.can_unify if o["kv_unified"] else info.can_stream)
    ]
    contexts = [make_context(name, **options) for options in fits]
    want = fresh_logits(name, [*WORDS[:70], 9])
    tolerance = RIGHT if name != "gemma3" else 10 * RIGHT
    for ctx in contexts:
        ctx.decode(WORDS[:70], seq_id=ctx.n_seq_max - 1)
        ctx.save_sequence(tmp_path / str(ctx.n_seq_max), ctx.n_seq_max - 1)
    for source, target in permutations(contexts, 2):
        state = SequenceState.load(tmp_path / str(source.n_seq_max))
        for seq in {0, target.n_seq_max - 1}:
            target.restore_sequence(state, seq)
            assert target.sequence_state(seq).to_bytes() == state.to_bytes()
            assert apart(next_logits(target, seq), want) < tolerance


@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2vl", "jamba"])
def test_flash_attention_on_and_off(name: str, kind: str, make_context: Make) -> None:
    """Values are transposed, and transposed back: bit for bit."""
    types = {"type_k": kind, "type_v": kind}
    off = make_context(name, flash_attn="disabled", **types)
    on = make_context(name, flash_attn="enabled", **types)
    off.decode(WORDS[:50])
    state = off.sequence_state(0)
    on.restore_sequence(state, 1)
    there = on.sequence_state(1)
    off.restore_sequence(there, 2)
    assert off.sequence_state(2).to_bytes() == state.to_bytes()
    for a, b in zip(state.parts, there.parts, strict=True):
        for i, rows in enumerate(a.layout.rows):
            old = a.tensors[i]
            if a.is_transposed(i):
                assert rows.what == "v"
                assert not b.is_transposed(i)
                old = old.transpose(1, 0, 2).reshape(len(a), -1)
            assert np.array_equal(old, b.tensors[i])
    if name in ("llama", "gemma3"):
        before, after = off.kv(0), on.kv(1)
        assert len(before.layers) == len(after.layers) > 0
        for x, y in zip(before.layers, after.layers, strict=True):
            assert np.array_equal(x.keys, y.keys)
            assert np.array_equal(x.values, y.values)
    whole = off.context_state()
    on.restore_context(whole)
    assert on.sequences() == off.sequences()
    assert on.n_cells_used == off.n_cells_used
    off.restore_context(on.context_state())
    assert off.context_state().to_bytes() == whole.to_bytes()
    # With flash attention K and V are rounded to f16 when they are read.
    assert apart(next_logits(off, 0), next_logits(on, 0)) < 0.1


@pytest.mark.parametrize("name", ["gemma3", "lfm2_swa"])
@pytest.mark.parametrize("n", [10, 33, 300])
def test_whole_windows_and_short_ones(
    name: str, n: int, make_context: Make, fresh_logits: Fresh
) -> None:
    options = {"n_ctx": 2048, "n_ubatch": 32}
    contexts = [
        make_context(name, swa_full=full, kv_unified=unified, **options)
        for full, unified in product((True, False), repeat=2)
    ]
    tokens = WORDS[:n]
    want = fresh_logits(name, [*tokens, 9])
    for source in contexts:
        if source.kv_cache_seq_pos_max(0) < 0:
            for at in range(0, n, 7):
                source.decode(tokens[at : at + 7], seq_id=0)
    states = [ctx.sequence_state(0) for ctx in contexts]
    for state, target in product(states, contexts):
        target.restore_sequence(state, 1)
        assert target.kv_cache_seq_pos_max(1) == n - 1
        assert apart(next_logits(target, 1), want) < 10 * RIGHT
