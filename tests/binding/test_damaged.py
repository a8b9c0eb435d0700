"""Damaged model files: refused or used, in child processes of which none may die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from binding.test_hostile import CALLS, SEED, run
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ContextCreateError, ModelLoadError
from support.children import assert_quiet, child
from support.models import MODELS, make_model, write_gguf
from support.odd_models import make_breaking, stored
from test_quantized_weights import quantized

NAMES = ["llama", "gemma3", "jamba", "t5"]


@pytest.mark.hazard("C18", "C19")
@pytest.mark.parametrize("damage", ["cuts", "zeros"])
@pytest.mark.parametrize("name", [*NAMES, "quantised"])
def test_files_cut_short_or_with_a_zeroed_field_are_refused_or_used(
    name: str, damage: str, model_folder: Path, tmp_path: Path
) -> None:
    if name == "quantised":
        path = quantized(tmp_path / "q8.gguf", gguf.GGMLQuantizationType.Q8_0)
    else:
        path = make_model(name, model_folder)
    given = [str(path), str(tmp_path), damage, str(CALLS // 50), SEED]
    done = run(["-m", "binding.damage_driver", *given], tmp_path)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last}: {done.stderr[-3000:]}"
    outcomes: dict[str, int] = eval(last[0])
    if damage == "cuts":
        assert set(outcomes) == {"ModelLoadError"}
    else:
        assert outcomes["ModelLoadError"] > sum(outcomes.values()) / 4


def damaged(path: Path, name: str, keys: dict[str, Any]) -> Path:
    """Write a generated model with changed keys."""
    info = MODELS[name]
    words = info.vocab()
    plan = info.plan(info.sizes, len(words))
    plan.keys |= keys
    write_gguf(path, plan, words, 0)
    return path


@pytest.mark.hazard("N28")
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gemma3", ".attention.head_count"),
        ("qwen4exp", ".expert_used_count"),
        ("mamba2", ".ssm.group_count"),
        ("mamba2", ".ssm.time_step_rank"),
        ("deepseek4", ".attention.output_group_count"),
        ("llama", ".full_attention_interval"),
        ("llama", ".attention.group_norm_groups"),
    ],
)
def test_a_zero_to_divide_by_is_refused_before_the_load(
    name: str, key: str, tmp_path: Path
) -> None:
    keys = {key: 0} | ({".expert_feed_forward_length": 0} if key == ".expert_used_count" else {})
    path = damaged(tmp_path / "broken.gguf", name, keys)
    with pytest.raises(ModelLoadError, match=key.removeprefix(".").replace(".", r"\.") + " is 0"):
        LlamaModel(path)
    with LlamaModel(path, vocab_only=True) as model:
        assert model.n_vocab > 0


@pytest.mark.hazard("N28")
def test_a_rotation_of_no_dimension_which_never_ends_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path / "m.gguf", "minimax_m3", {".rope.dimension_count": 0})
    model = LlamaModel(path)
    with pytest.raises(ContextCreateError, match="rotates 0 dimensions"):
        LlamaContext(model, n_ctx=64)


ON_WORKERS = """
import sys
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import InternalError
path, good, why = sys.argv[1:]
model = LlamaModel(path)
other = LlamaContext(LlamaModel(good), n_ctx=256, n_threads=4)
for n_threads in (1, 2, 4, 20):  # 20: more threads than own slots for their position
    ctx = LlamaContext(model, n_ctx=256, n_threads=n_threads)
    for _ in range(3):
        for tokens in (range(5, 45), [5]):
            try: ctx.decode(tokens)
            except InternalError as error: assert why in str(error) or "earlier" in str(error)
            else: raise AssertionError("not refused")
        ctx.clear_kv_cache()
        # The threads of the pool still work together.
        other.clear_kv_cache()
        other.decode(range(5, 45))
        assert other.logits().std() > 0.5
    ctx.close()
model.close()
"""


@pytest.mark.hazard("N27")
@pytest.mark.parametrize("threads", ["all", "one"])
def test_an_assertion_in_compute_threads_is_an_internal_error(
    model_folder: Path, tmp_path: Path, threads: str
) -> None:
    if threads == "all":
        # No kernel multiplies f32 by f16: every thread finds that out, in the same step.
        info, path = MODELS["llama"], tmp_path / "odd.gguf"
        plan = info.plan(info.sizes, len(info.vocab()))
        write_gguf(path, stored(plan, "blk.0.attn_norm.weight", np.float16), info.vocab(), 0)
    else:
        # A table from the file names experts that do not exist. Each thread looks at rows of its
        # own, and those that have none wait at a barrier for the others.
        path = make_breaking(tmp_path)
    why = {"all": "binary_op", "one": "i01 >= 0"}[threads]
    good = make_model("llama", model_folder)
    assert_quiet(child(ON_WORKERS, path, good, why, timeout=60))
