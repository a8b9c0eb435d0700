"""Damaged models: refused or used, in child processes of which none may die.

``PYKVCACHE_FUZZ_CALLS=100000`` tries every copy instead of a sample. What llama.cpp aborts on is
contained, also on its worker threads; what it divides by is checked before the load.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from binding.conftest import Child, assert_quiet
from binding.test_hostile import CALLS, SEED, run
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ContextCreateError, ModelLoadError
from support.breaking import make_breaking
from support.models import MODELS, make_model, write_gguf
from support.odd_models import stored
from test_quantized_weights import quantized

NAMES = ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "bert", "t5", "lfm2_swa", "deepseek4"]
SAMPLE = {"fields": 61, "cuts": 79}
"""One in so many copies is tried in the ordinary suite."""


DAMAGES = ("mixed", "fields", "cuts", "flips")


def driven(path: Path, folder: Path, damages: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Run the driver and return how often each outcome was, of each damage."""
    command = ["-m", "binding.damage_driver", str(path), "--folder", str(folder)]
    for damage in damages:
        command += ["--damage", damage]
        if damage in SAMPLE:
            step = SAMPLE[damage] if CALLS < 100_000 else 1
            command += ["--every", str(step), "--first", str(int(SEED) % step)]
        else:
            command += ["--copies", str(max(24, CALLS // 50)), "--seed", SEED]
    done: subprocess.CompletedProcess[str] = run(command, folder)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last}: {done.stderr[-3000:]}"
    outcomes: dict[str, dict[str, int]] = eval(last[0])
    return outcomes


# One process does all of it where it is soon done.
@pytest.mark.parametrize(
    "damages",
    [DAMAGES] if CALLS <= 2000 else [(damage,) for damage in DAMAGES],
    ids=lambda damages: "-".join(damages),
)
@pytest.mark.parametrize("name", [*NAMES, "quantised"])
def test_damaged_models_are_refused_or_used(
    name: str, damages: tuple[str, ...], model_folder: Path, tmp_path: Path
) -> None:
    if name == "quantised":
        path = quantized(tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0)
    else:
        path = make_model(name, model_folder)
    seen = driven(path, tmp_path, damages)
    assert tuple(seen) == damages
    for damage, outcomes in seen.items():
        assert "ModelLoadError" in outcomes, f"{damage}: nothing was damaged"
        if damage == "cuts":
            assert set(outcomes) == {"ModelLoadError"}
        else:
            # Some of each, otherwise nothing was tested.
            assert "fine" in outcomes or "UnsupportedOperation" in outcomes, damage


def damaged(path: Path, name: str, keys: dict[str, Any]) -> Path:
    """Write a generated model with other keys."""
    info = MODELS[name]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    plan.keys |= keys
    write_gguf(path, plan, words, 0)
    return path


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", ".attention.layer_norm_rms_epsilon", -1.0),
        ("llama", ".attention.layer_norm_rms_epsilon", float("nan")),
        ("bert", ".attention.layer_norm_epsilon", float("inf")),
        ("mamba2", ".ssm.group_count", 0),
        ("mamba2", ".ssm.time_step_rank", 0),
        ("deepseek4", ".attention.output_group_count", 0),
        ("granitehybrid", ".rope.dimension_count", 18),
        ("deepseek4", ".hyper_connection.sinkhorn_iterations", 2**31),
        # No process ends of these: the mask overflows, and logits are wrong.
        ("gemma3", ".attention.sliding_window", 2**30 + 1),
        ("step35", ".attention.sliding_window", 2**32 - 1),
    ],
)
def test_what_would_divide_by_zero_or_never_end_is_checked_before_the_load(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = damaged(tmp_path / "broken.gguf", name, {key: value})
    with pytest.raises(ModelLoadError, match=key.removeprefix(".").replace(".", r"\.")):
        LlamaModel(path)


def test_a_rotation_of_no_dimension_which_never_ends_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path / "m.gguf", "minimax_m3", {".rope.dimension_count": 0})
    model = LlamaModel(path)
    with pytest.raises(ContextCreateError, match="rotates 0 dimensions"):
        LlamaContext(model, n_ctx=64)


@pytest.mark.parametrize("side", ["enc", "dec"])
def test_a_tensor_that_the_loader_does_not_miss_is_missed(tmp_path: Path, side: str) -> None:
    info = MODELS["t5"]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    del plan.tensors[f"{side}.blk.0.attn_rel_b.weight"]
    write_gguf(tmp_path / "t5.gguf", plan, words, 0)
    with pytest.raises(ModelLoadError, match="biases"):
        LlamaModel(tmp_path / "t5.gguf")


ON_WORKERS = """
import sys
WHY = "binary_op"
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import InternalError
model = LlamaModel(sys.argv[1])
other = LlamaContext(LlamaModel(sys.argv[2]), n_ctx=256, n_threads=4)
for n_threads in (1, 2, 4, 20):  # 20: more than have a place of their own to tell where they are
    ctx = LlamaContext(model, n_ctx=256, n_threads=n_threads)
    for _ in range(3):
        for tokens in (range(5, 45), [5]):
            try: ctx.decode(tokens)
            except InternalError as error: assert WHY in str(error) or "earlier" in str(error)
            else: raise AssertionError("not refused")
        ctx.clear_kv_cache()
        # The threads of the pool still work together.
        other.clear_kv_cache()
        other.decode(range(5, 45))
        assert other.logits().std() > 0.5
    ctx.close()
model.close()
"""


def test_an_assertion_in_all_compute_threads_is_an_internal_error(
    child: Child, model_folder: Path, tmp_path: Path
) -> None:
    # No kernel multiplies f32 by f16: every thread finds that out by itself, in the same step.
    # In an encoder alone: what a decode computes is looked at when the context is made.
    info, path = MODELS["t5"], tmp_path / "odd.gguf"
    plan = info.plan(info.sizes, len(info.vocab()))
    write_gguf(path, stored(plan, "enc.blk.0.attn_norm.weight", np.float16), info.vocab(), 0)
    done = child(
        ON_WORKERS.replace("ctx.decode", "ctx.encode"),
        path,
        make_model("llama", model_folder),
        timeout=60,
    )
    assert_quiet(done)


ON_ONE = ON_WORKERS.replace("binary_op", "i01 >= 0")


def test_an_assertion_in_one_compute_thread_stops_the_others(
    child: Child, model_folder: Path, tmp_path: Path
) -> None:
    # A table from the file names experts that do not exist. Each thread looks at rows of its own,
    # and those that have none wait at a barrier for the others.
    path = make_breaking(tmp_path)
    done = child(ON_ONE, path, make_model("llama", model_folder), timeout=60)
    assert_quiet(done)
