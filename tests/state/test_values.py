"""Values of a state must be finite and must not overflow, or they would harm other sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Case
from pykvcache._native import lib
from pykvcache.errors import StateDamaged, StateError
from pykvcache.kv import LayerKV, LayerState
from state.kit import WORDS, refused
from support.raw_states import runs

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, BF16 = 0, 1, 2, 3, 6, 7, 8, 20, 30
UNITS = {F32: 4, F16: 2, BF16: 2, Q4_0: 18, Q4_1: 20, Q5_0: 22, Q5_1: 24, Q8_0: 34, IQ4_NL: 18}
"""Bytes of a value, or of a block of them."""
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

STATES = tuple(case for case in CASES if case.has_states)
WRONG = {"NaN": np.nan, "infinity": np.inf, "minus infinity": -np.inf}


def encoded(value: float, kind: int) -> bytes:
    """The bytes that make a value wrong: itself, or what its block begins with."""
    if kind == F32:
        return np.float32(value).tobytes()
    if kind == BF16:
        return np.float32(value).tobytes()[2:]
    return np.float16(value).tobytes()


def blocks(ctx: Any, state: Any, whole: bool) -> Iterator[tuple[str, int, int, int]]:
    """(what, type, offset, size) of every run of values."""
    kinds = {
        (part["part"], row[0], row[1]): row[2]
        for part in ctx.native.state_layout("get_state")
        for row in part["rows"]
    }
    for run in runs(ctx, state, whole=whole):
        if run.size and run.what not in ("cells", "ple"):
            yield run.what, kinds[run.part, run.what, run.layer], run.offset, run.size


@pytest.mark.hazard("N47", "N49")
@pytest.mark.parametrize("case", STATES, ids=str)
def test_values_that_are_not_numbers_are_refused(case: Case, make_context: Any) -> None:
    ctx = make_context(case.name, **case.options)
    ctx.decode(WORDS[:12])
    ctx.decode(WORDS[:5], seq_id=1)
    for target in (0, None):
        state, row = ctx.get_state(target), ctx.logits()
        runs = list(blocks(ctx, state, target is None))
        assert runs
        for k, (_, kind, offset, size) in enumerate(runs):
            value = list(WRONG.values())[k % 3]
            unit = UNITS[kind]
            n = size // unit
            for place in (0, n // 2, n - 1)[k % 3 :: 3]:
                bad = state.copy()
                at = offset + place * unit
                data = encoded(value, kind)
                bad[at : at + len(data)] = np.frombuffer(data, np.uint8)
                with refused(ctx, StateDamaged, match="NaN, infinity"):
                    ctx.set_state(bad, target)
        np.testing.assert_array_equal(ctx.logits(), row)
        ctx.set_state(state, target)
        ctx.decode(WORDS[5:6], seq_id=1)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_cache(make_context: Any, kind: str) -> None:
    ctx = make_context("llama_h64", type_k=kind, type_v=kind, flash_attn="enabled")
    ctx.decode(WORDS[:12])
    state = ctx.get_state(0)
    for what, number, offset, size in blocks(ctx, state, False):
        unit = UNITS[number]
        places = range(0, size, unit)
        for at in {places[0], places[len(places) // 2], places[-1]}:
            for more in (0, 2) if number in (Q4_1, Q5_1) else (0,):
                for value in WRONG.values():
                    bad = state.copy()
                    data = encoded(value, number)
                    start = offset + at + more
                    bad[start : start + len(data)] = np.frombuffer(data, np.uint8)
                    with pytest.raises(StateDamaged, match="keys" if what == "k" else "values"):
                        ctx.set_state(bad, 0)
    rng = np.random.default_rng(0)
    for _ in range(20):  # values of the cache itself are never refused
        ctx.clear_kv_cache()
        ctx.decode(rng.integers(5, 50, 20).astype(np.int32))
        ctx.set_state(ctx.get_state(0), 1)


@pytest.mark.hazard("N48")
@pytest.mark.parametrize("flash", ["disabled", "enabled"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_numbers_whose_products_overflow_are_refused(
    make_context: Any, kind: str, flash: str
) -> None:
    ctx = make_context("llama", type_k=kind, type_v="f32", flash_attn=flash)
    twin = make_context("llama", type_k=kind, type_v="f32", flash_attn=flash)
    for each in (ctx, twin):
        each.decode(WORDS[:12])
        each.decode(WORDS[:5], seq_id=1)
    number = F32 if kind == "f32" else BF16
    n_embd = ctx.native.state_layout("get_state")[0]["rows"][0][3]
    finite = lib.largest_value(n_embd)
    assert finite == pytest.approx(np.finfo(np.float32).max / (65504 * n_embd))
    state = ctx.get_state(0)
    for what, type_, offset, size in blocks(ctx, state, False):
        # Flash attention takes a float32 as an f16.
        largest = lib.largest_value(n_embd, flash == "enabled" and type_ == F32)
        assert largest == (65504 if flash == "enabled" and type_ == F32 else finite)
        kept, over = encoded(largest, type_), encoded(largest * 1.02, type_)
        bad = state.copy()
        bad[offset : offset + size] = np.frombuffer(over * (size // len(over)), np.uint8)
        with pytest.raises(StateDamaged, match="overflow"):
            ctx.set_state(bad, 0)
        if what == "k" and type_ == number:
            bad[offset : offset + size] = np.frombuffer(kept * (size // len(kept)), np.uint8)
            ctx.set_state(bad, 0)
    # Keys at the limit next to sequence 1 do not harm it.
    for each in (ctx, twin):
        each.decode(WORDS[5:8], seq_id=1)
    np.testing.assert_allclose(ctx.logits(), twin.logits(), atol=1e-4)
    for each in (ctx, twin):
        each.clear_kv_cache_seq(0)
        each.decode(WORDS[8:9], seq_id=1)
    np.testing.assert_allclose(ctx.logits(), twin.logits(), atol=1e-4)


@pytest.mark.parametrize("flash", ["disabled", "enabled"])
@pytest.mark.parametrize("value", [3e38, -3e38, 1e34])
def test_arrays_whose_products_overflow_are_refused(
    make_context: Any, value: float, flash: str
) -> None:
    ctx = make_context("llama", type_k="f32", type_v="f32", flash_attn=flash)
    ctx.decode(WORDS[:12])
    ctx.decode(WORDS[:5], seq_id=1)
    arrays = ctx.kv(0)
    before = ctx.get_state().tobytes()
    for which in ("keys", "values"):
        layers = list(arrays.layers)
        large = {"keys": layers[1].keys, "values": layers[1].values}
        large[which] = np.full_like(large[which], value)
        layers[1] = LayerKV(large["keys"], large["values"])
        with pytest.raises(StateError, match=rf"layers\[1\]\.{which} holds .* overflow") as caught:
            ctx.write_kv(replace(arrays, layers=layers), 2)
        assert caught.value.what == f"attention layers[1].{which}"
        assert isinstance(caught.value.value, float)
        assert caught.value.value > caught.value.limit  # type: ignore[operator]
    assert ctx.get_state().tobytes() == before


def test_recurrent_arrays_whose_products_overflow_are_refused(make_context: Any) -> None:
    ctx = make_context("mamba")
    ctx.decode(WORDS[:12])
    arrays = ctx.kv(0)
    assert arrays.recurrent is not None
    layers = list(arrays.recurrent.layers)
    layers[0] = LayerState(layers[0].r, np.full_like(layers[0].s, 3e38), layers[0].layer)
    with pytest.raises(StateError, match="overflow"):
        ctx.write_kv(replace(arrays, recurrent=replace(arrays.recurrent, layers=layers)), 1)


def test_a_value_split_over_two_pieces_is_checked(make_context: Any) -> None:
    ctx = make_context("llama", type_k="f32")
    ctx.decode(WORDS[:12])
    state = ctx.get_state(0)
    _, _, offset, _ = next(blocks(ctx, state, False))
    bad = state.copy()
    bad[offset + 40 : offset + 44] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
    for cut in (41, 42, 43):
        at = offset + cut
        for parts in ([bad[:at], bad[at:]], [bad[:at], bad[at : at + 1], bad[at + 1 :]]):
            with pytest.raises(StateDamaged, match="NaN"):
                ctx.native.set_state(0, [np.ascontiguousarray(p) for p in parts], [])
    for cut in range(33, 50):
        ctx.native.set_state(0, [state[: offset + cut], state[offset + cut :]], [])
