"""Models whose layers lack what the graphs of their architecture read are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.models import MODELS, write_gguf

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
    "hybrid of attention": ("jamba", {"n_layer": 1}, {}, "lacks one of the two"),
    "hybrid of attention with windows": ("lfm2_swa", {"n_layer": 1}, {}, "lacks one of the two"),
    "hybrid": ("jamba", {}, {}, "works"),
    "windows beside indexers": ("dots3note", {}, WINDOWS, "attends to more than a window"),
    "one layer without an indexer": ("minimax_m3", {"n_layer": 1}, {}, "has an indexer"),
    "indexer": ("minimax_m3", {}, {}, "works"),
    "odd rotation": ("minimax_m3", {}, {".rope.dimension_count": 3}, "rotates 3 dimensions"),
    "rotation of odd heads": ("minimax_m3", {"n_embd": 4}, {}, "rotates 1 dimensions"),
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
    paths = []
    for i, (name, sizes, keys, _) in enumerate(CASES.values()):
        info = MODELS[name]
        words = info.vocab()
        plan = info.plan(replace(info.sizes, **sizes), len(words))
        plan.keys |= keys
        paths.append(folder / f"{i}.gguf")
        write_gguf(Path(paths[-1]), plan, words, 0)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_layers_that_lack_an_index_or_a_state_are_refused(case: str, said: dict[str, str]) -> None:
    assert CASES[case][3] in said[case]
