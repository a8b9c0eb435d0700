"""Sequences in the memory of a device: out, in and moved as on the CPU.

Skipped where the build knows no device but the CPU. ``make test-device`` makes builds that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv.kit import different
from pykvcache import LlamaBatch, LlamaContext, LlamaModel, devices
from pykvcache.errors import UnsupportedOperation
from state.kit import next_logits
from support.models import EXACT, MODELS, make_model

WORDS = np.random.default_rng(5).integers(5, 250, 48).astype(np.int32)
BY = 7
NAMES = [
    *("llama", "gemma3", "qwen2vl", "mamba", "jamba", "granitehybrid", "lfm2_swa", "step35"),
    *("deepseek32", "minimax_m3", "deepseek4"),
]
# 0: the device takes single operations of large batches, where it can. 99: all is on it.
LAYERS = [0, 99]

on_every = pytest.mark.parametrize("name", NAMES)
in_both_ways = pytest.mark.parametrize("layers", LAYERS)


@pytest.fixture(autouse=True)
def _needs_a_device(_device: None) -> None:
    from pykvcache._native import lib

    if lib.devices() == ["CPU"]:
        pytest.skip("this build has no device: see make test-device")


class Bench:
    """Models on the device and contexts of them, closed after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[Any] = []

    def __call__(self, name: str, layers: int, **options: Any) -> LlamaContext:
        model = LlamaModel(make_model(name, self.folder), n_gpu_layers=layers)
        defaults = {"n_ctx": 256, "n_seq_max": 4, "n_threads": 1, **EXACT}
        defaults |= {} if MODELS[name].can_unify else {"kv_unified": False}
        ctx = LlamaContext(model, **(defaults | options))
        self.opened += [ctx, model]
        return ctx

    def cpu(self, name: str, **options: Any) -> LlamaContext:
        """A context whose every operation runs on the CPU."""
        return self(name, 0, op_offload=False, **options)


@pytest.fixture
def bench(model_folder: Path) -> Iterator[Bench]:
    made = Bench(model_folder)
    yield made
    for one in made.opened:
        one.close()


def near(a: Any, b: Any, share: float = 1e-3) -> bool:
    """Equal but for what other kernels round: a wrong rotation is a third of the spread off."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return bool(np.abs(a - b).max(initial=0) <= share * (np.ptp(b) + 1) if b.size else a.size == 0)


@pytest.mark.hazard("N50")
@in_both_ways
@pytest.mark.parametrize("name", ["llama", "llama3l", "gemma3", "step35", "jamba", "deepseek32"])
def test_the_rotation_of_keys_is_read(name: str, layers: int, bench: Bench) -> None:
    ctx, cpu = bench(name, layers), bench.cpu(name)
    for layer in range(ctx.model.n_layer):
        np.testing.assert_equal(ctx.native.rope_settings(layer), cpu.native.rope_settings(layer))
    assert ctx.kv_cache_can_shift() == cpu.kv_cache_can_shift()
    if not MODELS[name].has_arrays:
        return
    for one in (ctx, cpu):
        one.decode(WORDS)
    keys, wanted = (one.kv(0, rope=False).layers for one in (ctx, cpu))
    for found, right in zip(keys, wanted, strict=True):
        assert near(found.keys, right.keys, 2e-2)


@in_both_ways
@pytest.mark.parametrize("name", ["llama", "llama3l", "gemma3"])
def test_shifted_keys_are_those_computed_there(name: str, layers: int, bench: Bench) -> None:
    moved, fresh = bench(name, layers), bench(name, layers)
    moved.decode(WORDS)
    moved.kv_cache_seq_add(0, None, None, BY)
    there = np.arange(BY, BY + len(WORDS), dtype=np.int32)
    fresh.decode(LlamaBatch.from_arrays(WORDS, there, 0))
    # Read at once: the device may still be at work.
    for found, right in zip(moved.kv(0).layers, fresh.kv(0).layers, strict=True):
        assert near(found.keys, right.keys, 1e-2)
    assert near(next_logits(moved), next_logits(fresh))


@in_both_ways
@on_every
def test_states_and_arrays_go_out_and_in(name: str, layers: int, bench: Bench) -> None:
    ctx = bench(name, layers)
    ctx.decode(WORDS)
    if not MODELS[name].has_states:
        with pytest.raises(UnsupportedOperation):
            ctx.get_state(0)
        return
    state, saved, whole = ctx.get_state(0), ctx.sequence_state(0, WORDS), ctx.get_state()
    ctx.set_state(state, 1)
    ctx.restore_sequence(saved, 2)
    if MODELS[name].has_arrays:
        assert different(ctx.kv(1), ctx.kv(0)) == []
        ctx.write_kv(ctx.kv(0), 3)
    else:
        ctx.set_state(state, 3)
    logits = [next_logits(ctx, seq_id) for seq_id in range(4)]
    for found in logits[1:]:
        assert near(found, logits[0])
    ctx.set_state(whole)
    assert ctx.sequences().keys() == {0}
    assert near(next_logits(ctx), logits[0])
    # The bytes are the same wherever they lie.
    cpu = bench.cpu(name)
    cpu.set_state(state, 0)
    assert np.array_equal(cpu.get_state(0), state)
    assert near(next_logits(cpu), logits[0], 3e-2)


@in_both_ways
@on_every
def test_forks_and_partial_states_stand(name: str, layers: int, bench: Bench) -> None:
    ctx = bench(name, layers, swa_full=False)
    ctx.decode(WORDS)
    ctx.copy_kv_cache_seq(0, 1)
    try:
        partial = ctx.get_partial_state(0)
    except UnsupportedOperation:
        partial = None
    first = next_logits(ctx, 0)
    assert near(next_logits(ctx, 1), first)
    if partial is not None:
        ctx.decode(WORDS[:5], seq_id=0)
        ctx.set_partial_state(partial)
        assert near(next_logits(ctx, 0), first)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_restore_beside_full_windows_changes_no_other_sequence(layers: int, bench: Bench) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 3, "n_ubatch": 32, "swa_full": False}
    ctx, fresh = bench("gemma3", layers, **options), bench("gemma3", layers, **options)
    long = np.random.default_rng(6).integers(5, 250, 300).astype(np.int32)
    for one in (ctx, fresh):
        one.decode(WORDS, seq_id=1)
        one.decode(long, seq_id=0)
    ctx.set_state(ctx.get_state(1), 2)
    for seq_id, same in ((0, 0), (1, 1), (2, 1)):
        wanted = next_logits(fresh, same)
        assert near(next_logits(ctx, seq_id), wanted)
        fresh.clear_kv_cache_seq(same, int(fresh.kv_cache_seq_pos_max(same)))


@pytest.mark.hazard("N52")
@in_both_ways
def test_a_context_goes_on_when_another_is_closed(layers: int, bench: Bench) -> None:
    """ggml's RPC server forgets the graph that it is asked to compute again."""
    ctx, fresh = bench("llama", layers), bench("llama", layers)
    for one in (ctx, fresh):
        one.decode(WORDS)
    for token in range(20, 26):
        with bench("llama", layers) as other:
            other.decode([token])
            ctx.decode([token])
        ctx.decode([token])
        fresh.decode([token, token])
    assert near(next_logits(ctx), next_logits(fresh))


def test_a_model_lies_on_the_devices_that_are_named(bench: Bench) -> None:
    names = [d.name for d in devices() if d.kind in ("gpu", "integrated-gpu")]
    ctx = bench("llama", 99)
    assert set(ctx.model.devices) <= set(names)
    for name in ctx.model.devices:
        path = ctx.model.path
        for more in ({}, {"tensor_split": [3.0]}, {"split_mode": "none"}):
            with (
                LlamaModel(path, n_gpu_layers=99, devices=[name], **more) as model,
                LlamaContext(model, n_ctx=256, n_threads=1, **EXACT) as one,
            ):
                assert model.devices == (name,)
                (where,) = one.memory_info.buffer_types
                assert where != "CPU"
                assert one.memory_breakdown()[where].context == one.memory_info.bytes_total
                assert near(next_logits(one), next_logits(ctx))
                ctx.clear_kv_cache()
        with pytest.raises(ValueError, match="twice"):
            LlamaModel(path, devices=[name, name])
        with pytest.raises(ValueError, match="main_gpu"):
            LlamaModel(path, devices=[name], split_mode="none", main_gpu=1)
        with pytest.raises(ValueError, match="at least one share"):
            LlamaModel(path, devices=[name], tensor_split=[0.0])
