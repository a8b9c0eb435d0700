"""Which of ggml's CPU code runs, and what an import says where none of it can."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykvcache import system_info
from pykvcache._native import lib

SMOKE = Path(__file__).parents[1] / "smoke.py"
CHOICES: tuple[str, ...] = system_info()["cpu_choices"]
QEMU = "qemu-x86_64"
# What Linux calls them in /proc/cpuinfo.
LINUX_NAMES = {"sse3": "pni", "lzcnt": "abm"}
ASK = "import pykvcache; print(pykvcache.system_info()['cpu'])"

x86 = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="for x86-64 Linux"
)


def python(
    *arguments: str, cpu: str | None = None, qemu: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run this Python on this processor or on the one that ``qemu`` names."""
    env = {k: v for k, v in os.environ.items() if k != "PYKVCACHE_CPU"} | {"GGML_NO_BACKTRACE": "1"}
    if cpu is not None:
        env["PYKVCACHE_CPU"] = cpu
    before = [QEMU, "-cpu", qemu] if qemu else []
    return subprocess.run(
        [*before, sys.executable, *arguments],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def emulated(processor: str, code: str, cpu: str | None = None) -> subprocess.CompletedProcess[str]:
    if not shutil.which(QEMU):
        pytest.skip(f"no {QEMU}: apt-get install qemu-user")
    return python("-c", code, cpu=cpu, qemu=processor)


@x86
def test_features_are_those_that_linux_reports() -> None:
    (line, *_) = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
    ]
    reported = set(line.split())
    has = {LINUX_NAMES.get(name, name) for name in lib.cpu_features()}
    assert has, "a processor that can run this has SSE3"
    assert not has - reported
    # What the processor has and this layer did not see would keep a build from it.
    known = {"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "f16c", "fma", "abm"}
    known |= {"bmi1", "avx2", "bmi2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"}
    assert not (reported & known) - has


@pytest.mark.parametrize("name", CHOICES)
def test_each_copy_that_can_run_here_computes(name: str) -> None:
    done = python(str(SMOKE), cpu=name)
    if done.returncode and "this processor lacks" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert "works" in done.stdout
    assert python("-c", ASK, cpu=name).stdout.strip() == name


def test_the_best_is_chosen_unless_asked() -> None:
    done = python("-c", ASK)
    assert done.returncode == 0, done.stderr
    able = [name for name in CHOICES if python("-c", ASK, cpu=name).returncode == 0]
    assert done.stdout.strip() == able[0]
    assert python("-c", ASK, cpu="").stdout == done.stdout


@pytest.mark.parametrize("name", ["i486", "hasw\u00e9ll"])
def test_a_name_that_is_not_there_is_an_error_at_every_import(name: str) -> None:
    code = (
        "import pykvcache\n"
        "for i in range(2):\n"
        "    try: pykvcache.system_info()\n"
        "    except ImportError as error: print(ascii(str(error)))\n"
        "import pykvcache.arrays\n"
    )
    done = python("-c", code, cpu=name)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert f"PYKVCACHE_CPU is {name!a}" in first.replace('"', "")
    assert all(choice in first for choice in CHOICES)


@pytest.mark.hazard("N70")
@x86
@pytest.mark.parametrize(("processor", "lacks"), [("Nehalem", "avx"), ("Haswell", "avx512f")])
def test_another_processor_is_served_or_refused(processor: str, lacks: str) -> None:
    done = emulated(processor, ASK)
    fit = {"Nehalem": "sse42", "Haswell": "haswell"}[processor]
    if fit in CHOICES:
        assert done.stdout.strip() == fit, done.stderr
    else:
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1, "the import ended the process"
        assert last.startswith("ImportError: this build of pykvcache (")
        assert f" {lacks}" in last
        assert "pip install --no-binary pykvcache pykvcache" in last


@x86
@pytest.mark.skipif("zen4" not in CHOICES, reason="a build with one copy")
def test_a_copy_that_cannot_run_is_not_used_when_asked() -> None:
    last = emulated("Haswell", ASK, cpu="zen4").stderr.splitlines()[-1]
    assert last.startswith("ImportError: PYKVCACHE_CPU is 'zen4', and this processor lacks avx512")
    assert last.endswith("it can run haswell, sse42")
