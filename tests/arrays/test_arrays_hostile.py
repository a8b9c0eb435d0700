"""Survival of the array caches: hostile calls on every public class, in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrays.fuzz_driver import classes, functions, members
from pykvcache import arrays
from pykvcache.errors import CacheValueError

JUNK: Any = np.array([1, 2])
TESTS = Path(__file__).parents[1]
#: With fewer than these, chance leaves too much out.
CALLS = max(10_000, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "10000")))
SEED = os.environ.get("PYKVCACHE_FUZZ_SEED", "1")


def test_hostile_calls_end_in_documented_exceptions(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "arrays.fuzz_driver", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--calls", str(CALLS), "--seed", SEED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60 + CALLS / 50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    wanted = {f"{kind.__name__}.{name}" for kind in classes() for name in members(kind)}
    wanted |= {one.__name__ for one in (*classes(), *functions())}
    never = wanted - set(counts["called"])
    assert len(never) < len(wanted) / 20, f"never called: {sorted(never)}"
    refused = wanted - set(counts["returned"])
    assert len(refused) < len(wanted) / 4, f"never let through: {sorted(refused)}"


def test_other_types_than_caches_are_type_errors(tmp_path: Path) -> None:
    inputs = arrays.InputCache(None, kv_size=8, num_slots=1, batch_size=4)
    for call in (
        lambda: arrays.can_trim_prompt_cache(JUNK),
        lambda: arrays.trim_prompt_cache(JUNK, 1),
        lambda: arrays.make_prompt_cache(JUNK),
        lambda: arrays.create_attention_mask(np.ones((1, 2)), JUNK),
        lambda: arrays.save_prompt_cache(tmp_path / "file", JUNK),
        lambda: arrays.save_prompt_cache(tmp_path / "file", [], JUNK),
        lambda: arrays.LRUPromptCache().insert_cache("model", [1], JUNK),
        lambda: inputs.shift_discard(JUNK, 0),
        lambda: inputs.shift_slot(JUNK, 0),
        lambda: inputs.load_slot([arrays.Input(1)], JUNK),
    ):
        with pytest.raises(TypeError):
            call()
    assert not [*tmp_path.iterdir()]


def test_names_that_no_file_can_have_are_cache_errors() -> None:
    for call in (
        lambda: arrays.prompt_cache_layout("a\0b"),
        lambda: arrays.load_prompt_cache("a\0b"),
        lambda: arrays.save_prompt_cache("a\0b", [arrays.KVCache()]),
        lambda: arrays.load_prompt_cache("/\ud800"),
    ):
        with pytest.raises(CacheValueError, match="cannot be part of a file name"):
            call()
