"""Models whose layers lack what the graphs of their architecture read are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ModelLoadError, UnsupportedOperation
from support import vocab
from support.blueprint import Blueprint, Sizes, matrix
from support.models import MODELS, write_gguf
from support.odd_models import (
    afmoe,
    cogvlm,
    deci,
    experts,
    falcon_h1,
    gpt2,
    openelm,
    qwen3vl,
    rwkv7,
    stored,
)

CHILD = """
import sys
from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ContextCreateError, ModelLoadError
for path in sys.argv[1:]:
    try:
        with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_seq_max=1) as ctx:
            ctx.decode([5, 6, 7])
            print("works")
    except (ContextCreateError, ModelLoadError) as error:
        print(error)
"""

WINDOWS = {".attention.sliding_window_pattern": [1, 1]}
FULL = {".attention.indexer.types": [0, 1], ".attention.sliding_window_pattern": [0, 1]}

# The first three and "blind" ended the process; the hybrids broke the context at its first decode.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no index": ("deepseek4", {"n_layer": 2}, {}, "compressed by 4"),
    "no second rotation": ("deepseek4", {"n_layer": 3, "n_embd": 256}, {}, "compressed by 128"),
    "both": ("deepseek4", {"n_layer": 4, "n_embd": 256}, {}, "works"),
    "windows only": ("dots3note", {"n_layer": 1}, {}, "has an indexer"),
    "blind": ("dots3note", {}, FULL, "has no indexer"),
    "mixed": ("dots3note", {}, {}, "works"),
    "hybrid of attention": ("jamba", {"n_layer": 1}, {}, "has a recurrent state"),
    "hybrid of attention with windows": ("lfm2_swa", {"n_layer": 1}, {}, "has a recurrent state"),
    "hybrid": ("jamba", {}, {}, "works"),
    "windows beside indexers": ("dots3note", {}, WINDOWS, "attends to more than a window"),
    "one layer without an indexer": ("minimax_m3", {"n_layer": 1}, {}, "has an indexer"),
    "indexer": ("minimax_m3", {}, {}, "works"),
    "odd rotation": ("minimax_m3", {}, {".rope.dimension_count": 3}, "rotates 3 dimensions"),
    "rotation of odd heads": ("minimax_m3", {"n_embd": 4}, {}, "rotates 1 dimensions"),
    "no sections": ("qwen2vl", {}, {".rope.dimension_sections": [0, 0, 0, 0]}, "has a section"),
    "no heads": ("gemma3", {}, {".attention.head_count": 0}, "head_count is 0"),
    "odd heads": ("deepseek4", {"n_embd": 68}, {}, "after the first 9 of a head"),
    "sections of more than a head": (
        "qwen2vl",
        {},
        {".rope.dimension_sections": [12, 4, 4, 0]},
        "sections of the model's rotation have 20",
    ),
    "no interval": ("llama", {}, {".full_attention_interval": 0}, "full_attention_interval is 0"),
    "experts of no size": (
        "llama",
        {},
        {".expert_count": 4, ".expert_used_count": [2, 0]},
        "expert_used_count is 0 for layer 1",
    ),
    "no groups": ("llama", {}, {".attention.group_norm_groups": 0}, "group_norm_groups is 0"),
    "no heads in the first layer": (
        "gemma3",
        {},
        {".attention.head_count": [0, 4, 4, 4]},
        "head_count is 0",
    ),
    "a number of heads that is not there": (
        "gemma3",
        {},
        {".attention.head_count": None},
        "head_count is 0, or not there",
    ),
    "heads as truth values": (
        "gemma3",
        {},
        {".attention.head_count": [False] * 4},
        "head_count is 0, or not there",
    ),
    "experts that are not there": (
        "qwen4exp",
        {},
        {
            ".expert_count": None,
            ".expert_used_count": None,
            ".expert_feed_forward_length": None,
        },
        "expert_used_count is 0 for layer 0, or not there",
    ),
    "no layer": (
        "llama",
        {"n_layer": 0},
        {".block_count": 2, ".nextn_predict_layers": 2},
        "nextn_predict_layers",
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a child said of each model, one line each."""
    folder = tmp_path_factory.mktemp("faults")
    paths: list[Path] = []
    for i, (name, sizes, keys, _) in enumerate(CASES.values()):
        info = MODELS[name]
        words = info.vocab()
        plan = info.plan(replace(info.sizes, **sizes), len(words))
        plan.keys |= keys
        for key in [key for key, value in keys.items() if value is None]:
            del plan.keys[key]
        paths.append(folder / f"{i}.gguf")
        write_gguf(Path(paths[-1]), plan, words, 0)
    return dict(zip(CASES, told(paths), strict=True))


def told(paths: list[Path]) -> list[str]:
    """What a child says of each model, one line each."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("case", CASES)
def test_layers_that_lack_an_index_or_a_state_are_refused(case: str, said: dict[str, str]) -> None:
    assert CASES[case][3] in said[case]


def without_bias() -> Blueprint:
    """Falcon-H1 without a weight that its loader lets be absent and its graph reads."""
    plan = falcon_h1(Sizes(n_layer=1), len(vocab.spm()))
    del plan.tensors["blk.0.ssm_conv1d.bias"]
    return plan


def without_keys() -> Blueprint:
    """OpenELM with a layer of queries only."""
    plan = openelm(Sizes(), len(vocab.spm()))
    plan.keys[".attention.head_count_kv"] = [2, 0]
    plan.tensors["blk.1.attn_qkv.weight"] = matrix(64, 64)
    return plan


def llama(name: str, dtype: type[np.generic]) -> Blueprint:
    """Llama with one weight of another type."""
    plan = MODELS["llama"].plan(Sizes(), len(vocab.spm()))
    return stored(plan, name, dtype)


# Most that are refused ended the process; logits of all were those of the first tokens, small heads
# wrote past their rows, and a norm of F16 broke the context at its first decode.
PLANS: dict[str, tuple[Blueprint, str]] = {
    "all weights": (falcon_h1(Sizes(n_layer=1), len(vocab.spm())), "works"),
    "a weight is missing": (without_bias(), "lacks a weight that its graph reads"),
    "a window": (afmoe(Sizes(), len(vocab.spm())), "works"),
    "no window": (afmoe(Sizes(n_swa=0), len(vocab.spm())), "has no window"),
    "heads": (openelm(Sizes(), len(vocab.spm())), "works"),
    "no heads of keys": (without_keys(), "has nothing to compute with"),
    "heads of 64": (rwkv7(Sizes(), len(vocab.spm())), "works"),
    "small heads": (rwkv7(Sizes(), len(vocab.spm()), head=16), "heads have 16 values"),
    "experts": (experts(Sizes(), len(vocab.spm()), [2, 1]), "works"),
    "unused experts": (experts(Sizes(), len(vocab.spm()), [2, 0]), "what its experts give"),
    "no experts at all": (experts(Sizes(), len(vocab.spm()), [0, 2]), "uses none of them"),
    "half a matrix": (llama("blk.0.attn_q.weight", np.float16), "works"),
    "half a table": (llama("token_embd.weight", np.float16), "works"),
    "a matrix of integers": (llama("blk.0.attn_q.weight", np.int16), "has the type i16"),
    "a matrix of ids": (llama("output.weight", np.int32), "has the type i32"),
    "a table of integers": (llama("token_embd.weight", np.int16), "has the type i16"),
    "a table of ids": (llama("token_embd.weight", np.int32), "cannot create a context"),
    "doubles": (llama("blk.0.ffn_up.weight", np.float64), "has the type f64"),
    "half a norm": (llama("output_norm.weight", np.float16), "has the type f16"),
    "a head in two groups": (
        falcon_h1(Sizes(), len(vocab.spm()), n_heads=1),
        "1 heads (ssm.time_step_rank) in 2 groups",
    ),
    "pictures": (qwen3vl(Sizes(), len(vocab.spm()), 1), "works"),
    "pictures in the last layer": (qwen3vl(Sizes(), len(vocab.spm()), 2), "n_deepstack_layers"),
    "all feed forward": (deci(Sizes(), len(vocab.spm()), [96, 96]), "works"),
    "the first does not": (deci(Sizes(), len(vocab.spm()), [0, 96]), "works"),
    "the last does not": (deci(Sizes(), len(vocab.spm()), [96, 0]), "picks the tokens"),
    "logits of all": (cogvlm(Sizes(n_head_kv=4), len(vocab.spm())), "gives logits of all tokens"),
}


GUARDED = ("a weight is missing", "no heads of keys", "unused experts", "no experts at all")


@pytest.fixture(scope="module")
def said_of_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a child said of each of `PLANS`."""
    folder = tmp_path_factory.mktemp("graphs")
    cases = [case for case in PLANS if sys.platform == "linux" or case not in GUARDED]
    paths = [folder / f"{i}.gguf" for i in range(len(cases))]
    for path, case in zip(paths, cases, strict=True):
        write_gguf(path, PLANS[case][0], vocab.spm(), 0)
    return dict(zip(cases, told(paths), strict=True))


@pytest.mark.parametrize("case", PLANS)
def test_graphs_that_read_or_give_something_else_are_refused(
    case: str, said_of_graphs: dict[str, str]
) -> None:
    if case not in said_of_graphs:
        pytest.skip("ggml.c is compiled behind operands.h on Linux only")
    assert PLANS[case][1] in said_of_graphs[case]


def test_a_learned_position_is_not_shifted(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.gguf"
    write_gguf(path, gpt2(Sizes(), len(vocab.spm())), vocab.spm(), 0)
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=64, n_seq_max=1) as ctx:
        ctx.decode(list(range(5, 25)))
        assert not ctx.kv_cache_can_shift()
        with pytest.raises(UnsupportedOperation, match="learned table"):
            ctx.kv_cache_seq_add(0, None, None, 5)
        with pytest.raises(UnsupportedOperation, match="learned table"):
            ctx.remove(0, 4, 8)
        assert ctx.kv_cache_seq_pos_max(0) == 19
        ctx.clear_kv_cache_seq(0, 10, None)
        ctx.decode([7])


def test_a_vocabulary_alone_needs_no_heads_and_no_experts(tmp_path: Path) -> None:
    for name, keys in (
        ("gemma3", [".attention.head_count"]),
        ("qwen4exp", [".expert_count", ".expert_used_count", ".expert_feed_forward_length"]),
    ):
        info, path = MODELS[name], tmp_path / f"{name}.gguf"
        words = info.vocab()
        plan = info.plan(info.sizes, len(words))
        for key in keys:
            plan.keys.pop(key, None)
        write_gguf(path, plan, words, 0)
        with pytest.raises(ModelLoadError, match="not there"):
            LlamaModel(path)
        with LlamaModel(path, vocab_only=True) as model:
            assert model.n_vocab == len(words)
