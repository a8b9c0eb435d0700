"""Tiers that real processes share, one after the other and at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memory.kit import apart
from pykvcache.prefix.stores import FolderStore
from support.models import make_model
from tiers.worker import answer, spawn


def test_a_script_that_is_run_twice_evaluates_its_prompt_once(
    model_folder: Path, tmp_path: Path
) -> None:
    """The program does not close the cache: the end of the interpreter does."""
    path = make_model("llama", model_folder)
    first, second = (answer(spawn(path, str(tmp_path), 1, 900)) for _ in range(2))
    assert first["evaluated"] == 900
    assert second["evaluated"] == 1
    assert second["disk"] == 899
    assert apart(np.array(first["row"]), np.array(second["row"])) < 1e-3


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
