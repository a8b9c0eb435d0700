"""The configuration of the CI service: it cannot be run here, but its tools can read it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYTHONS = {"cp310", "cp311", "cp312", "cp313", "cp314", "cp314t"}


def said(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not find_spec("cibuildwheel"), reason="pip install --group package")
@pytest.mark.parametrize(
    ("platform", "machine", "tags"),
    [
        ("linux", "x86_64", {"manylinux_x86_64", "musllinux_x86_64"}),
        ("macos", "arm64", {"macosx_arm64"}),
        ("windows", "AMD64", {"win_amd64"}),
    ],
)
def test_wheels_are_made_for_every_python(platform: str, machine: str, tags: set[str]) -> None:
    wanted = ["--platform", platform, "--archs", machine]
    text = said(sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", *wanted)
    assert set(text.split()) == {f"{python}-{tag}" for python in PYTHONS for tag in tags}


@pytest.mark.skipif(not find_spec("check_jsonschema"), reason="pip install --group package")
def test_workflows_are_of_their_schema() -> None:
    schema = ["--builtin-schema", "vendor.github-workflows"]
    said(sys.executable, "-m", "check_jsonschema", *schema, *map(str, WORKFLOWS))
