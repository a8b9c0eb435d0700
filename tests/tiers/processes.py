"""Workers of worker.py in processes of their own: started, spoken to and ended by tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def spawn(
    task: str, model: Path, tiers: str, seed: int, n: int, **options: str
) -> subprocess.Popen[bytes]:
    """Start a worker; the options are some of `PrefixCache`."""
    command = [sys.executable, "-m", "tiers.worker", task, str(model), tiers, str(seed), str(n)]
    command.append(json.dumps(options))
    env = os.environ | {"PYTHONPATH": str(TESTS), "GGML_NO_BACKTRACE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stdin=pipe, env=env)


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for a worker's end; return the last thing that it said."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def say(process: subprocess.Popen[bytes], text: bytes = b"go\n") -> None:
    """Let a worker that waits go on."""
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for the next thing that a worker says."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def evaluated_at_once(n_workers: int, task: str, model: Path, tiers: str, n: int) -> list[int]:
    """Return how many tokens each of some workers evaluates that all begin when all are ready."""
    processes = [spawn(task, model, tiers, 1, n) for _ in range(n_workers)]
    try:
        for process in processes:
            assert line(process)["ready"]
        for process in processes:
            say(process)
        return [line(process)["evaluated"] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
