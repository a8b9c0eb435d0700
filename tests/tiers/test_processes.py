"""Tiers that real processes share, one after the other and at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Fresh, apart
from pykvcache.prefix.stores import FolderStore
from stores.servers import redis_server
from support.models import make_model
from tiers.processes import answer, spawn


def test_a_script_that_is_run_twice_evaluates_its_prompt_once(
    model_folder: Path, tmp_path: Path
) -> None:
    """The program does not close the cache: the end of the interpreter does."""
    path = make_model("llama", model_folder)
    first, second = (answer(spawn("once", path, str(tmp_path), 1, 900)) for _ in range(2))
    assert first["evaluated"] == 900
    assert second["evaluated"] == 1
    assert second["disk"] == 899
    assert apart(np.array(first["row"]), np.array(second["row"])) < 1e-3


def test_killed_processes_leave_blocks_that_are_right(
    model_folder: Path, tmp_path: Path, fresh_logits: Fresh
) -> None:
    """Two write at once and are killed in the middle, in a loop; what they say is right."""
    path = make_model("llama", model_folder)
    tiers, said = str(tmp_path / "tier"), []
    for round_ in range(2):
        processes = [spawn("forever", path, tiers, 10 * round_ + i, 120) for i in range(2)]
        for process in processes:
            assert process.stdout is not None
            said += [json.loads(process.stdout.readline()) for _ in range(2)]
            # Writing behind may take its time: until one has found the prompt that is asked for.
            while round_ and not any(one["seed"] == 1 and one["disk"] >= 120 for one in said):
                said.append(json.loads(process.stdout.readline()))
        time.sleep(0.05 * round_)
        for process in processes:
            process.kill()
            process.communicate()
    for one in said:
        right = fresh_logits("llama", one["prompt"])[:8]
        assert apart(np.array(one["row"]), right) < 1e-3
    last = answer(spawn("once", path, tiers, 1, 120))
    assert last["evaluated"] <= 8


def test_three_processes_share_a_folder_and_a_server(model_folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", model_folder)
    with redis_server(tmp_path) as server:
        tiers = f"{tmp_path / 'tier'},{server.url}"
        assert answer(spawn("once", path, tiers, 1, 300))["evaluated"] == 300
        both = [
            spawn("once", path, where, 1, 300) for where in (server.url, str(tmp_path / "tier"))
        ]
        remote, local = (answer(process) for process in both)
    assert remote["remote"] == local["disk"] == 299


def test_the_end_of_a_process_waits_for_writes_of_a_dropped_cache(
    model_folder: Path, tmp_path: Path
) -> None:
    code = f"""
import gc, time
from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import FolderStore
class Slow(FolderStore):
    def put(self, items):
        time.sleep(1)
        return super().put(items)
ctx = LlamaContext(LlamaModel({str(make_model("llama", model_folder))!r}), n_ctx=256, n_threads=1)
cache = PrefixCache(ctx, block_size=8, tiers=[Slow({str(tmp_path)!r})])
cache.sequence(list(range(5, 50))).evaluate()
del cache
gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    with FolderStore(tmp_path) as store:
        assert len(list(store.entries())) >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_child_ends_at_once(model_folder: Path, tmp_path: Path) -> None:
    """It has neither the threads nor the right to write what the parent has."""
    code = f"""
import os, sys
from pykvcache import LlamaContext, LlamaModel, PrefixCache
model = LlamaModel({str(make_model("llama", model_folder))!r})
ctx = LlamaContext(model, n_ctx=256, n_threads=1)
cache = PrefixCache(ctx, block_size=8, tiers=[{str(tmp_path)!r}])
cache.sequence(list(range(5, 50))).evaluate()
pid = os.fork()
if pid == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
cache.close()
assert cache.stats().tiers[0].written >= 5
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_child_writes_what_its_own_cache_has_at_its_end(
    model_folder: Path, tmp_path: Path
) -> None:
    """As workers of a server do: the cache that a child has made is never closed."""
    code = f"""
import os, sys
from pykvcache import LlamaContext, LlamaModel, PrefixCache
def make(folder):
    model = LlamaModel({str(make_model("llama", model_folder))!r})
    ctx = LlamaContext(model, n_ctx=256, n_threads=1)
    return PrefixCache(ctx, block_size=8, tiers=[{str(tmp_path)!r} + folder])
cache = make("/parent")
cache.sequence(list(range(5, 50))).evaluate()
pid = os.fork()
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
else:
    mine = make("/child")
    sequence = mine.sequence(list(range(5, 50)))
    sequence.evaluate()
    sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for folder in ("parent", "child"):
        with FolderStore(tmp_path / folder) as store:
            assert len(list(store.entries())) >= 5, folder
