"""Python code in new processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.forks import run_forked
from support.sanitizer import SLOWER

__all__ = ["assert_quiet", "child", "forked"]

# Otherwise every abort first tries to start a debugger.
NO_BACKTRACE = {"GGML_NO_BACKTRACE": "1"}
QUIET = {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(Path(__file__).parents[1])}


def child(
    code: str, *args: object, timeout: float = 30, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run code in a new process."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout * SLOWER,
        env=os.environ | NO_BACKTRACE | QUIET,
        check=False,
    )


def forked(
    code: str, *args: object, timeout: float = 30, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """As `child`, in a process that need not import the package (`support.forks`)."""
    env = os.environ | NO_BACKTRACE
    return run_forked(["-c", code, *args], stdin=stdin, env=env, timeout=timeout * SLOWER)


def assert_quiet(done: subprocess.CompletedProcess[str]) -> None:
    """Check that a process ended well and wrote nothing."""
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    assert done.stdout == ""
