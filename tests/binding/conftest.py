"""Fixtures for the tests of the compiled layer's Python face."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.forks import run_forked
from support.models import make_model
from support.sanitizer import SLOWER

TESTS = Path(__file__).resolve().parent.parent

# These tests import the package at the top, so without its compiled layer none can be collected.
if importlib.util.find_spec("pykvcache._native.lib") is None:
    collect_ignore_glob = ["test_*.py"]

needs_timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no signal timers")

Child = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def path(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


@pytest.fixture
def child() -> Child:
    """``child(code, *args, stdin=, timeout=30)``: run Python code in a new process."""

    def run(
        code: str, *args: object, timeout: float = 30, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        env = os.environ | {
            # Otherwise every abort first tries to start a debugger.
            "GGML_NO_BACKTRACE": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": str(TESTS),
        }
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout * SLOWER,
            env=env,
            check=False,
        )

    return run


@pytest.fixture
def forked() -> Child:
    """As `child`, in a process that need not import the package (`support.forks`)."""

    def run(
        code: str, *args: object, timeout: float = 30, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"GGML_NO_BACKTRACE": "1"}
        return run_forked(["-c", code, *args], stdin=stdin, env=env, timeout=timeout * SLOWER)

    return run


def assert_quiet(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert done.stdout == ""
