"""Facts about the machine, versions and models of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.harness import Contestant
from benchmarks.models import ROOT, STORIES, medium, n_parameters


def first_line(path: str, key: str) -> str | None:
    """Return the value of the first line of a ``/proc`` file that begins with a key."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def output_of(*command: str) -> str | None:
    """Return a command's output; None if it does not exist."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (done.stdout or done.stderr).strip().partition("\n")[0] or None


def machine() -> dict[str, Any]:
    """Return the machine and its load."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": first_line("/proc/cpuinfo", "model name") or platform.processor(),
        "cpus": os.cpu_count(),
        "memory": first_line("/proc/meminfo", "MemTotal"),
        "system": platform.platform(terse=True),
        "load": os.getloadavg(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def versions(contestants: Mapping[str, Contestant]) -> dict[str, Any]:
    """Return the versions that every contestant reports."""
    lock = (ROOT / "vendor" / "llama.cpp.lock").read_text().split(" ", 1)[0]
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "compiler": output_of(os.environ.get("CC", "cc"), "--version"),
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "llama.cpp": f"the sources in {lock}",
    }
    for name, contestant in contestants.items():
        found[name] = contestant.ask("facts")
        contestant.close()
    return found


def models() -> dict[str, Any]:
    """Return facts about the models."""
    return {
        "stories": {"bytes": STORIES.stat().st_size, "what": "the embedded model"},
        "30M": {
            "bytes": medium().stat().st_size,
            "parameters": n_parameters(),
            "what": "llama, 8 layers, 32,000 tokens, random f16 weights",
        },
    }
