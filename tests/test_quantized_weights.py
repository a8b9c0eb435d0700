"""Models with quantised weights, which take other paths through llama.cpp than float ones.

On x86 with AMX llama.cpp has code of its own for them and for f16. Compilers that drop stores
before ``ldtilecfg`` (GCC before 11.5, 12.4 and 13.3) turned the first decode into a crash, and
several recurrent sequences another: hence the child processes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from support.forks import run_forked
from support.models import MODELS, _add_key, finish

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

NAME = "llama_h64"  # wide enough for every block size

TOO_FAR = {Kind.F16: 0.1, Kind.Q8_0: 2.0, Kind.Q4_0: 12.0}
"""How far the rounding of the weights may move a logit from those of the float model."""

CHILD = """
import sys
import numpy as np
from pykvcache import LlamaContext, LlamaModel

options = {"n_ctx": 256, "n_seq_max": 2, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
with LlamaModel(sys.argv[1]) as model:
    tokens = (np.arange(40, dtype=np.int32) * 37) % 250 + 5
    with LlamaContext(model, flash_attn="disabled", **options) as ctx:
        ctx.decode(tokens[:-1])
        ctx.copy_kv_cache_seq(0, 1)
        ctx.decode(tokens[-1:], seq_id=0)
        one = ctx.logits()
        ctx.decode(tokens[-1:], seq_id=1)
        fork = ctx.logits()
        ctx.clear_kv_cache()
        ctx.decode(tokens)
        fresh = ctx.logits()
np.save(sys.argv[2], [one, fork, fresh])
"""


TOGETHER = """
import sys
import numpy as np
from pykvcache import LlamaBatch, LlamaContext, LlamaModel

rows = []
options = {"n_ctx": 512, "n_seq_max": 4, "n_threads": 2, "type_k": "f32", "type_v": "f32"}
with LlamaModel(sys.argv[1]) as model:
    tokens = [(np.arange(24, dtype=np.int32) * step) % 250 + 5 for step in (37, 41, 43, 47)]
    for group in ([0], [1], [2], [3], [0, 1, 2, 3]):
        with LlamaContext(model, flash_attn="disabled", **options) as ctx:
            batch = LlamaBatch(96, 1)
            for seq_id in group:
                batch.add_sequence(tokens[seq_id], seq_id, True)
            ctx.decode(batch)
            rows += [ctx.logits(24 * i + 23) for i in range(len(group))]
np.save(sys.argv[2], rows)
"""


def quantized(path: Path, kind: Kind, model: str = NAME, **sizes: int) -> Path:
    """Write the generated model with its matrices stored as `kind`."""
    info = MODELS[model]
    words = info.vocab()
    plan = info.plan(replace(info.sizes, **sizes), len(words))
    writer = gguf.GGUFWriter(path, plan.arch)
    for key, value in plan.keys.items():
        _add_key(writer, f"{plan.arch}{key}" if key.startswith(".") else key, value)
    words.write(writer)
    for name, tensor in plan.tensors.items():
        values = tensor.values(name, 0)
        is_factor = name.endswith(".weight") and "conv" not in name and "norm" not in name
        if values.ndim == 2 and is_factor:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    finish(writer)
    return path


def logits(model: Path, folder: Path, code: str = CHILD) -> np.ndarray:
    """Rows from a child process: of a sequence, of its fork, and of a fresh run."""
    out = folder / "logits.npy"
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    run = run_forked(["-c", code, model, out], env=env, timeout=120)
    assert run.returncode == 0, f"ended with {run.returncode}: {run.stderr[-500:]}"
    rows: np.ndarray = np.load(out)
    assert np.isfinite(rows).all()
    return rows


@pytest.fixture(scope="module")
def float_logits(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    folder = tmp_path_factory.mktemp("float")
    return logits(quantized(folder / "f32.gguf", Kind.F32), folder)


@pytest.mark.hazard("N17")
@pytest.mark.parametrize("kind", TOO_FAR, ids=lambda kind: kind.name.lower())
def test_decodes_forks_and_repeats(kind: Kind, tmp_path: Path, float_logits: np.ndarray) -> None:
    one, fork, fresh = logits(quantized(tmp_path / "model.gguf", kind), tmp_path)
    np.testing.assert_allclose(one, fork, atol=1e-3)
    # One token and forty take different kernels, which round activations differently.
    np.testing.assert_allclose(one, fresh, atol=0.02)
    assert np.abs(fresh - float_logits[2]).max() < TOO_FAR[kind]


@pytest.mark.hazard("N245")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("mamba", Kind.F16), ("jamba", Kind.F16), ("mamba2", Kind.Q8_0)],
)
def test_recurrent_sequences_of_one_batch_do_not_meet(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    model = quantized(tmp_path / "model.gguf", kind, name, n_embd=256)
    rows = logits(model, tmp_path, TOGETHER)
    np.testing.assert_allclose(rows[4:], rows[:4], atol=1e-3)
