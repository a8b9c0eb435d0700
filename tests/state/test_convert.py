"""Other types of K and V: the rounding stays within what `restore_sequence` says."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memory.kit import Fresh, Make, apart
from pykvcache import LlamaContext, SequenceState
from pykvcache.errors import StateDamaged, StateError, StateLayoutMismatch
from pykvcache.state.convert import as_floats, rotated
from pykvcache.state.layout import Part
from state.kit import WORDS, forged, next_logits, refused
from state.test_forged import spoil
from support.models import RIGHT

FLOATS = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
BLOCKS = {
    "q8_0": 1 / 225,
    "q5_1": 1 / 29,
    "q5_0": 1 / 15,
    "q4_1": 1 / 14,
    "q4_0": 1 / 7,
    "iq4_nl": 1 / 4,
}
TYPES = [*FLOATS, *BLOCKS]

# Heads of 64 values: quantised caches are rotated by Hadamard matrices.
NAME = "llama_h64"


def options(kind: str) -> dict[str, Any]:
    """Floats without flash attention, so that their values are transposed on the way."""
    flash = "enabled" if kind in BLOCKS else "disabled"
    return {"type_k": kind, "type_v": kind, "flash_attn": flash}


def stored(part: Part, i: int) -> NDArray[np.float32]:
    """Return the stored values of tensor i, (n_cells, n_head, head_dim)."""
    rows, tensor = part.layout.rows[i], part.tensors[i]
    if part.is_transposed(i):
        tensor = tensor.transpose(1, 0, 2)
    heads = np.ascontiguousarray(tensor).reshape(len(part), rows.n_head, -1)
    return as_floats(heads, rows.type, 0)


def check_bound(source: Part, target: Part, kind: str) -> None:
    for i, (old, new) in enumerate(zip(source.layout.rows, target.layout.rows, strict=True)):
        want = stored(source, i)
        if old.rotation:
            want = rotated(want, old.rotation)
        if new.rotation:
            want = rotated(want, new.rotation)
        error = np.abs(stored(target, i) - want)
        if kind in FLOATS:
            bound = np.abs(want) * FLOATS[kind] + 2.0**-25
        else:
            blocks = np.abs(want).reshape(*want.shape[:-1], -1, 32).max(-1)
            bound = np.repeat(blocks, 32, -1) * BLOCKS[kind] + 2.0**-18
        # NumPy's own product with the matrix is rounded, too.
        assert (error <= bound + 1e-5 * np.abs(want).max()).all(), (kind, (error / bound).max())
        assert error.any() or old.type != 0  # from f32 something is always rounded


def test_every_type_converts_to_every_other(make_context: Make) -> None:
    contexts = {kind: make_context(NAME, **options(kind)) for kind in TYPES}
    states: dict[str, SequenceState] = {}
    for kind, ctx in contexts.items():
        ctx.decode(WORDS[:40], seq_id=1)
        states[kind] = ctx.sequence_state(1)
    for old, new in permutations(TYPES, 2):
        ctx = contexts[new]
        ctx.restore_sequence(states[old], 2, convert=True)
        assert np.array_equal(ctx.sequence_state(2).positions, np.arange(40))
        check_bound(states[old].parts[0], ctx.sequence_state(2).parts[0], new)
    for kind, ctx in contexts.items():
        # Nothing is rounded where nothing differs.
        ctx.restore_sequence(states[kind], 3, convert=True)
        assert ctx.sequence_state(3).to_bytes() == states[kind].to_bytes()
    with refused(contexts["f32"], StateLayoutMismatch, match="convert=True"):
        contexts["f32"].restore_sequence(states["f16"], 1)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "f32"])
def test_logits_are_as_close_as_those_of_a_context_of_that_type(
    kind: str, make_context: Make, fresh_logits: Fresh
) -> None:
    exact = fresh_logits(NAME, [*WORDS[:40], 9])
    source, target = make_context(NAME), make_context(NAME, **options(kind))
    source.decode(WORDS[:40])
    target.decode(WORDS[:40], seq_id=1)
    target.restore_sequence(source.sequence_state(0), 0, convert=True)
    fresh = apart(next_logits(target, 1), exact)
    assert apart(next_logits(target, 0), exact) < 2 * fresh + RIGHT
    # And back: what was rounded once stays as it is.
    source.restore_sequence(target.sequence_state(0), 2, convert=True)
    target.restore_sequence(source.sequence_state(2), 2, convert=True)
    if kind in FLOATS:
        assert target.sequence_state(2).to_bytes() == target.sequence_state(0).to_bytes()


@pytest.mark.parametrize("unified", [True, False])
def test_a_whole_context_is_converted_even_if_streams_are_empty(
    unified: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    layout = {"kv_unified": unified, "n_ctx": 1024}
    source = make_context(NAME, **layout)
    target = make_context(NAME, **layout, **options("q8_0"))
    source.decode(WORDS[:40], seq_id=1)
    source.copy_kv_cache_seq(1, 3)
    target.decode(WORDS[:4], seq_id=0)
    target.restore_context(source.context_state(), convert=True)
    assert target.sequences() == source.sequences()
    assert target.n_cells_used == source.n_cells_used
    want = fresh_logits(NAME, [*WORDS[:40], 9])
    for seq in (1, 3):
        assert apart(next_logits(target, seq), want) < 0.3
    target.restore_sequence(source.sequence_state(0), 1, convert=True)  # of nothing
    assert list(target.sequences()) == [3]


@pytest.mark.parametrize("name", ["gemma3", "jamba", "granitehybrid", "lfm2_swa"])
def test_attention_next_to_windows_and_states_is_converted(
    name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    half = {"type_k": "f16", "type_v": "f16"}
    source, target = make_context(name), make_context(name, **half)
    source.decode(WORDS[:60])
    with refused(target, StateLayoutMismatch):
        target.restore_sequence(source.sequence_state(0), 0)
    target.restore_sequence(source.sequence_state(0), 0, convert=True)
    target.decode(WORDS[:60], seq_id=1)
    exact = fresh_logits(name, [*WORDS[:60], 9])
    fresh = apart(next_logits(target, 1), exact)
    assert apart(next_logits(target, 0), exact) < 3 * fresh + 10 * RIGHT


def with_values(ctx: LlamaContext, value: float) -> SequenceState:
    """A sequence that holds this value somewhere."""
    ctx.decode(WORDS[:5])
    state = ctx.sequence_state(0)
    raw = ctx.get_state(0)
    old = state.parts[0].tensors[0].tobytes()
    at = raw.tobytes().index(old)
    raw[at : at + 4] = np.frombuffer(np.float32(value).tobytes(), np.uint8)
    ctx.set_state(raw, 0)
    return ctx.sequence_state(0)


@pytest.mark.parametrize("kind", ["f16", *BLOCKS])
def test_values_that_another_type_cannot_hold_are_refused(kind: str, make_context: Make) -> None:
    source, target = make_context(NAME), make_context(NAME, **options(kind))
    target.decode(WORDS[:5])
    state = with_values(source, 1e30)
    with refused(target, StateError):
        target.restore_sequence(state, 0, convert=True)
    source.restore_sequence(state, 1)  # as it is, it can be kept
    for value in (np.nan, -np.inf):
        with pytest.raises(StateDamaged, match="NaN"):
            with_values(source, float(value))
    source.decode(WORDS[:5], seq_id=2)
    damaged = SequenceState.from_bytes(forged(source.sequence_state(2).to_bytes(), spoil))
    with refused(target, StateDamaged):
        target.restore_sequence(damaged, 0, convert=True)
