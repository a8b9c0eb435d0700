"""Memory that runs out: allocations of every operation fail, and nothing ends the process.

A child process preloads the allocator of support/faults.c. Here a few allocations of each operation
fail; ``PYKVCACHE_FAULTS=all`` makes it all of them, which is what ``make fuzz`` does: as many as
``PYKVCACHE_FAULTS_SECONDS`` leave time for on each model, in an order that the seed makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from binding.conftest import TESTS
from binding.fault_operations import OPERATIONS
from support.builds import PLAIN
from support.models import make_model
from support.sanitizer import SLOWER

ALL = os.environ.get("PYKVCACHE_FAULTS") == "all"
SECONDS = os.environ.get("PYKVCACHE_FAULTS_SECONDS", "inf")
SEED = os.environ.get("PYKVCACHE_FUZZ_SEED", "1")
MODELS = ["llama", "jamba"] + ALL * ["gemma3", "t5", "mamba", "bert", "deepseek4", "lfm2_swa"]
# Of a device: where its memory is read and written.
ON_A_DEVICE = [
    *("get_state", "get_whole", "set_state", "set_whole", "restore", "partial", "write_kv"),
    *([] if PLAIN else ["compact"]),
]
# The plain build does not compact.
NOT_ON_LLAMA = {"encode", "partial"} | ({"compact"} if PLAIN else set())

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="preloads a library"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler"),
    pytest.mark.skipif(SLOWER > 1, reason="the sanitizers have an allocator of their own"),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The allocator that fails."""
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    source = TESTS / "support" / "faults.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def run_with_faults(
    name: str, faults: Path, model_folder: Path, tmp_path: Path, more: list[str]
) -> dict[str, Any]:
    """Run the driver; return its counts."""
    make_model(name, model_folder)
    journal = tmp_path / "journal"
    command = [sys.executable, "-m", "binding.fault_driver", name, "--folder", str(model_folder)]
    command += ["--journal", str(journal), "--seed", SEED]
    command += ["--seconds", SECONDS] if ALL else ["--points", "2"]
    command += more
    done = subprocess.run(
        command,
        env=os.environ
        | {"LD_PRELOAD": str(faults), "PYTHONPATH": str(TESTS), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=(60 + float(SECONDS) * 2 if float(SECONDS) < 1e6 else None) if ALL else 120,
        check=False,
    )
    assert done.returncode == 0, f"{journal.read_text()}\n{done.stderr[-3000:]}"
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_a_failed_allocation_is_an_error_and_no_more(
    name: str, faults: Path, model_folder: Path, tmp_path: Path
) -> None:
    counts = run_with_faults(name, faults, model_folder, tmp_path, [])
    assert counts["raised"] > 0.8 * counts["runs"]
    if name == "llama":
        assert set(counts["tried"]) == set(OPERATIONS) - NOT_ON_LLAMA
    assert {"create", "load", "text"} <= set(counts["tried"])
    assert counts["tried"]["create"] > 500, "the preloaded allocator counts nothing"


READING = """
import ctypes, sys
import numpy as np
from pykvcache import LlamaContext, LlamaModel
faults = ctypes.CDLL(None)
faults.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int]
faults.faults_disarm.restype = faults.faults_counted.restype = ctypes.c_long
ctx = LlamaContext(LlamaModel(sys.argv[1]), n_ctx=256, n_threads=1, flash_attn="disabled")
ctx.decode(np.arange(60) + 5)
for seq in (0, None):
    wanted = bytes(ctx.get_state(seq))
    faults.faults_arm(0, 0)
    ctx.get_state(seq)
    faults.faults_disarm()
    for n in range(1, faults.faults_counted() + 1):
        faults.faults_arm(n, 0)
        try:
            ctx.get_state(seq)
            said = "nothing"
        except Exception as error:
            said = type(error).__name__
        faults.faults_disarm()
        assert bytes(ctx.get_state(seq)) == wanted
        print(said)
"""


@pytest.mark.parametrize("name", ["llama", *(["gemma3"] if ALL else [])])
def test_reading_a_state_without_memory_breaks_nothing(
    name: str, faults: Path, model_folder: Path
) -> None:
    """Each of its allocations fails in turn: the error is a `MemoryError`, and all goes on."""
    done = subprocess.run(
        [sys.executable, "-c", READING, str(make_model(name, model_folder))],
        env=os.environ | {"LD_PRELOAD": str(faults), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.split()
    assert said.count("MemoryError") > 3
    assert set(said) <= {"MemoryError", "nothing"}


@pytest.mark.parametrize("name", ["llama", *(["gemma3", "jamba"] if ALL else [])])
def test_a_copy_between_streams_that_fails_leaves_no_half_of_it(
    name: str, faults: Path, model_folder: Path, tmp_path: Path
) -> None:
    """llama.cpp notes it in two lists, and read past the shorter one with the next decode."""
    more = ["--streams", "--only", "copy", "--points", "1000"]
    counts = run_with_faults(name, faults, model_folder, tmp_path, more)
    assert counts["raised"] == counts["runs"] > 20


# Encoders give no states in these operations.
@pytest.mark.parametrize("name", ["llama", *(["jamba", "gemma3", "mamba"] if ALL else [])])
def test_a_failed_transfer_to_a_device_changes_nothing(
    name: str, faults: Path, model_folder: Path, tmp_path: Path
) -> None:
    more = ["--hidden", "--only", ",".join(ON_A_DEVICE)]
    counts = run_with_faults(name, faults, model_folder, tmp_path, more)
    assert counts["raised"] > 0.5 * counts["runs"]
    assert len(counts["tried"]) >= len(ON_A_DEVICE) - 2
