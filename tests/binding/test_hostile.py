"""Survival: thousands of hostile calls in child processes; none may die, hang or surprise.

``PYKVCACHE_FUZZ_CALLS=100000 PYKVCACHE_FUZZ_SEED=7`` make it a long run over other calls, which is
what ``make fuzz`` does; the drivers beside this file can be run by themselves too.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from binding.fuzz_driver import GIVEN, KINDS, MEMBERS
from pykvcache import BatchGenerator, LlamaSequence, PrefixCache
from pykvcache.state import PartialState
from support.forks import run_forked
from support.models import make_model
from support.sanitizer import SLOWER

MODELS = ["llama", "gemma3", "jamba", "bert"]
MODELS += [pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2vl", "mamba", "t5", "lfm2_swa")]
NEED_MEMORY = ["context_state", "get_partial_state", "set_partial_state", "set_state", "write_kv"]
NEED_MEMORY += [
    f"{verb}_{what}" for verb in ("save", "load", "restore") for what in ("context", "sequence")
]
NEED_MEMORY += ["save_llama_file", "load_llama_file", "kv_cache_seq_add", "kv_cache_seq_div"]
CALLS = int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "1500"))
SEED = os.environ.get("PYKVCACHE_FUZZ_SEED", "1")


def run(
    command: list[str], folder: Path, imports: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return run_forked(
        command,
        cwd=folder,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        timeout=(60 + CALLS / 25) * SLOWER,
        imports=imports,
    )


@pytest.mark.parametrize("name", MODELS)
def test_hostile_calls_end_in_documented_exceptions(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    for needed in (name, "llama", "qwen2vl"):
        make_model(needed, model_folder)
    journal = tmp_path / "journal"
    given = [name, str(model_folder), str(CALLS), SEED, str(journal)]
    command = ["-m", "binding.fuzz_driver", *given]
    done = run(command, tmp_path, ("matplotlib.figure", "matplotlib.patches"))
    last = journal.read_text().splitlines()[-3:]
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nlast calls: {last}"
    counts = json.loads(done.stdout.splitlines()[-1])
    # No other process was closed.
    assert sum(counts["called"].values()) > 0.9 * CALLS
    assert counts["checked contexts"] >= CALLS // 1000
    # Not every memory gives everything.
    given = {"llama": {*GIVEN} - {PartialState}, "lfm2_swa": {PartialState}}
    kinds = [*KINDS, *given.get(name, ())]
    if name in ("bert", "t5"):
        # They have no sequences of this kind.
        sequences = (LlamaSequence, BatchGenerator, PrefixCache)
        kinds = [kind for kind in kinds if kind not in sequences]
    members = {f"{kind.__name__}.{name}" for kind in kinds for name in MEMBERS[kind][0]}
    assert members <= set(counts["called"]), "never called"
    # Nonsense alone would prove little: most calls must have come through, too.
    refused = members - set(counts["returned"])
    if name == "bert":  # which has no memory
        needs_memory = {f"LlamaContext.{member}" for member in NEED_MEMORY}
        members, refused = members - needs_memory, refused - needs_memory
    assert len(refused) < len(members) / 5, f"never let through: {sorted(refused)}"


@pytest.mark.parametrize("name", ["gemma3", "jamba"])
def test_threads_that_fight_over_contexts_survive(
    name: str, model_folder: Path, tmp_path: Path
) -> None:
    given = [str(make_model(name, model_folder)), str(CALLS // 5), SEED]
    done = run(["-m", "binding.thread_driver", *given], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ClosedError" in done.stdout
