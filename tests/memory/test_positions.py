"""Positions end where the angles of RoPE, which are float32, would no longer be right."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import apart
from pykvcache import LlamaBatch, LlamaContext, LlamaModel
from pykvcache.errors import PositionError
from support.models import EXACT, RIGHT, make_model
from support.raw_states import runs

EVERY = 2**31 - 33  # what fits an int32 when llama.cpp's mask adds 32
WORDS = np.random.default_rng(0).integers(5, 50, 40).astype(np.int32)
ROTATED = ("llama", "gemma3", "qwen2vl", "lfm2")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "usual base": {"rope_freq_base": 10_000.0},
    "large base": {"rope_freq_base": 5e6},
    "linear": {"rope_freq_scale": 0.3},
    "yarn": {
        "rope_scaling_type": "yarn",
        "rope_freq_scale": 0.25,
        "yarn_ext_factor": 1.0,
        "yarn_orig_ctx": 128,
    },
}


def at(first: int, tokens: Any = WORDS) -> LlamaBatch:
    return LlamaBatch.from_arrays(tokens, first + np.arange(len(tokens)), 0, True)


def rows(ctx: LlamaContext, first: int) -> Any:
    ctx.clear_kv_cache()
    ctx.decode(at(first))
    return np.stack([ctx.logits(i) for i in range(len(WORDS))])


def angles(positions: Any, facts: dict[str, Any], real: type) -> Any:
    """Angles of each pair, as ggml computes them, in this type; the step is float32 in both."""
    pairs = facts["n_rot"] // 2
    step = real(np.float32(facts["freq_base"]) ** np.float32(-2.0 / facts["n_rot"]))
    table = np.full((len(positions), pairs), step, real)
    table[:, 0] = positions
    table = np.multiply.accumulate(table, axis=1, dtype=real)
    if len(facts["freq_factors"]):
        table = table / facts["freq_factors"][:pairs].astype(real)
    scale = real(np.float32(facts["freq_scale"]))
    if not facts["ext_factor"]:
        return scale * table
    mix = np.linspace(1, 0, pairs).astype(np.float32).astype(real)  # any will do
    return scale * table * (real(1) - mix) + table * mix


def error(last: int, facts: dict[str, Any]) -> float:
    """How much of its length a key is off at most, at the positions up to this one."""
    positions = np.unique(np.linspace(last * 0.9, last, 2000).astype(np.int64))
    off = angles(positions, facts, np.float32).astype(np.float64) - angles(
        positions, facts, np.float64
    )
    return float(np.sqrt(np.mean(off**2, axis=1)).max())


@pytest.mark.hazard("N46")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["llama", "llama_h64"])
def test_angles_are_right_up_to_the_last_position(
    make_context: Any, name: str, settings: str
) -> None:
    ctx = make_context(name, **SETTINGS[settings])
    facts, last = ctx.native.rope(0), ctx.max_position
    assert 10_000 < last <= 2**24
    assert 2**-10 < error(last, facts) < 2**-5
    if last < 2**21:
        assert error(8 * last, facts) > 2**-7  # not by chance


PAGE = Path(__file__).parents[2] / "docs" / "positions.md"
# Names of models, with what the page says of them: at 131,072, at the last position.
STATED = {
    name: (float(near), float(far))
    for name, near, far in re.findall(
        r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.M
    )
}


@pytest.mark.parametrize("name", STATED)
def test_logits_drift_by_no_more_than_the_page_says(make_context: Any, name: str) -> None:
    drift = np.zeros(2)
    for base in (0.0, 1e4, 1e6, 1e7):
        ctx = make_context(name, rope_freq_base=base, **EXACT)
        begun, last = rows(ctx, 0), ctx.max_position + 1 - len(WORDS)
        found = [apart(rows(ctx, first), begun) for first in (131_072, last) if first <= last]
        drift = np.maximum(drift, (0.0, *found)[-2:])
    # Other processors round otherwise.
    assert (drift < 1.5 * np.array(STATED[name])).all(), drift


@pytest.mark.parametrize("name", ["mamba", "jamba", "granite_nope"])
def test_without_rotation_only_int32_ends_positions(make_context: Any, name: str) -> None:
    ctx = make_context(name)
    assert ctx.max_position == EVERY
    assert apart(rows(ctx, EVERY + 1 - len(WORDS)), rows(ctx, 0)) < RIGHT


@pytest.mark.parametrize("name", ["gemma3", "lfm2_swa"])
def test_windows_of_any_size_that_loads_are_right(
    make_context: Any, model_folder: Path, name: str
) -> None:
    """Larger ones overflow in llama.cpp's mask: see `test_damaged.py`."""
    found = []
    for window in (1000, 2**30):
        with LlamaModel(make_model(name, model_folder, n_swa=window)) as one:
            found.append(rows(make_context(one, n_threads=1, **EXACT), 0))
    assert apart(*found) < RIGHT


def test_the_lowest_limit_of_all_layers_counts(make_context: Any) -> None:
    # The window's layers of gemma3 keep their own base.
    near = make_context("gemma3", rope_freq_base=2.0).max_position
    assert near < make_context("gemma3", rope_freq_base=1e6).max_position
    assert make_context("gemma3").max_position == make_context("llama").max_position


def held(ctx: LlamaContext) -> Any:
    sequences = {s: (i.pos_min, i.pos_max, i.n_cells) for s, i in ctx.sequences().items()}
    return sequences, ctx.get_state().tobytes()


def generate(ctx: LlamaContext, last: int) -> None:
    list(ctx.generate(np.array([5], np.int32), 3, seq_id=3))


WAYS_IN: dict[str, Callable[[LlamaContext, int], Any]] = {
    "a batch": lambda ctx, last: ctx.decode(
        LlamaBatch.from_arrays([5, 6], [last, last + 1], 2, True)
    ),
    "a batch far off": lambda ctx, last: ctx.decode(LlamaBatch.from_arrays([5], [EVERY], 2, True)),
    "the next position": lambda ctx, last: ctx.decode([5], seq_id=3),
    "several next positions": lambda ctx, last: ctx.decode([5, 6, 7], seq_id=3),
    "generate": generate,
    "a shift": lambda ctx, last: ctx.kv_cache_seq_add(0, 0, None, last + 1 - 11),
    "a shift of a part": lambda ctx, last: ctx.kv_cache_seq_add(0, 5, None, last + 1 - 11),
    "a shift past int32": lambda ctx, last: ctx.kv_cache_seq_add(0, 0, None, 2**40),
}


@pytest.mark.hazard("N46")
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("way", WAYS_IN)
def test_no_call_goes_past_the_last_position(make_context: Any, name: str, way: str) -> None:
    if name == "lfm2" and way == "a shift of a part":
        pytest.skip("it moves whole sequences only")
    ctx = make_context(name)
    last = ctx.max_position
    ctx.decode(WORDS[:12])
    ctx.decode(LlamaBatch.from_arrays([5, 6], [last - 1, last], 3, True))  # up to it
    row, before = ctx.logits(), held(ctx)
    with pytest.raises(PositionError, match=f"past {last}") as caught:
        WAYS_IN[way](ctx, last)
    assert caught.value.limit == last
    assert caught.value.value is not None
    assert caught.value.value > last
    assert held(ctx) == before
    assert (ctx.logits() == row).all()
    ctx.kv_cache_seq_add(0, 0, None, last - 11)
    assert ctx.kv_cache_seq_pos_max(0) == last
    ctx.kv_cache_seq_div(0, 0, None, 2)  # only lowers


@pytest.mark.parametrize("name", ROTATED)
def test_no_state_brings_positions_past_the_last(
    make_context: Any, tmp_path: Any, name: str
) -> None:
    """Saved where positions go further: the same model with another rotation."""
    near = make_context(name)
    last = near.max_position
    near.decode(WORDS[:12])
    near.decode(WORDS[:5], seq_id=1)
    good = near.get_state(0)
    cells = [
        (run.offset, run.n_cells) for run in runs(near, good, whole=False) if run.what == "cells"
    ]
    bad = good.copy()
    for offset, n in cells:
        step = 24 if name == "qwen2vl" else 8 if n == 1 else 12
        for i in range(n):
            where = offset + i * step
            position = bad[where : where + 4].view(np.int32)
            position[0] += last - 10  # 11 becomes one past the last
    before, row = held(near), near.logits()
    with pytest.raises(PositionError) as caught:
        near.set_state(bad, 0)
    assert (caught.value.value, caught.value.limit) == (last + 1, last)
    assert held(near) == before
    assert (near.logits() == row).all()


def test_every_axis_of_mrope_is_a_position(make_context: Any) -> None:
    ctx = make_context("qwen2vl")
    ctx.decode(WORDS[:12])
    arrays = ctx.kv(0)
    for axis in (0, 1):
        extended = np.array(arrays.extended)
        extended[5, axis] = ctx.max_position
        ctx.write_kv(replace(arrays, extended=extended), 1)
        extended[5, axis] += 1
        with pytest.raises(PositionError) as caught:
            ctx.write_kv(replace(arrays, extended=extended), 1)
        assert caught.value.value == ctx.max_position + 1


def test_arrays_and_files_are_refused_alike(make_context: Any, tmp_path: Any) -> None:
    # With this base positions go further than with the model's own.
    far = make_context("llama", rope_freq_base=10_000.0)
    last = make_context("llama").max_position
    assert far.max_position > last + 100
    far.decode(at(last - 5, WORDS[:12]))
    near = make_context("llama")
    near.decode(WORDS[:3])
    before = held(near)
    with pytest.raises(PositionError):
        near.write_kv(far.kv(0), 1)
    with pytest.raises(PositionError):
        near.set_state(far.get_state(0), 1)
    with pytest.raises(PositionError):
        near.set_state(far.get_state())
    assert held(near) == before
