"""Survival: thousands of hostile calls in child processes; none may die, hang or surprise.

``PYKVCACHE_FUZZ_CALLS=100000 PYKVCACHE_FUZZ_SEED=7`` make it a long run over other calls; the
drivers beside this file can be run by themselves too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from binding.conftest import TESTS
from support.models import make_model

MODELS = ["llama", "gemma3", "qwen2vl", "mamba", "jamba", "bert", "t5", "lfm2_swa"]
CALLS = int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "1500"))
SEED = os.environ.get("PYKVCACHE_FUZZ_SEED", "1")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(TESTS), "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60 + CALLS / 50,
        check=False,
    )


@pytest.mark.parametrize("name", MODELS)
def test_hostile_calls_end_in_documented_exceptions(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    for needed in (name, "llama", "qwen2vl"):
        make_model(needed, model_folder)
    journal = tmp_path / "journal"
    command = [sys.executable, "-m", "binding.fuzz_driver", name, "--folder", str(model_folder)]
    command += ["--calls", str(CALLS), "--seed", SEED, "--journal", str(journal)]
    done = run(command, tmp_path)
    last = journal.read_text().splitlines()[-3:]
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nlast calls: {last}"
    assert done.stdout.startswith("returned ")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_threads_that_fight_over_contexts_survive(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "binding.thread_driver", str(make_model(name, model_folder))]
    command += ["--steps", str(CALLS // 5), "--seed", SEED]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ClosedError" in done.stdout
