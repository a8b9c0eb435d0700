"""What CMake says when a build cannot begin, and that CMAKE_ARGS reaches ggml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = Path(os.environ.get("LLAMA_CPP_SOURCE_DIR") or ROOT / "vendor" / "llama.cpp")

cython_cmake = pytest.importorskip("cython_cmake", reason="needs the build tools")
pytest.importorskip("scikit_build_core", reason="needs the build tools")


def environment(**more: str) -> dict[str, str]:
    """The tests' own tools first on the path, and nothing that steers a build."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CMAKE", "LLAMA", "SKBUILD"))}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return env | more


def refusal(tmp_path: Path, *options: str, **more: str) -> str:
    """Configure, which must fail; the one line that carries our name."""
    modules = Path(cython_cmake.__file__).parent / "cmake"
    env = environment(**more)
    cmake = shutil.which("cmake", path=env["PATH"])
    assert cmake is not None
    done = subprocess.run(
        [
            *(cmake, "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"),
            *(f"-DCMAKE_MODULE_PATH={modules}", f"-DPython_EXECUTABLE={sys.executable}"),
            *options,
        ],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    (line,) = [line.strip() for line in done.stderr.splitlines() if "pykvcache:" in line]
    return line


def test_a_source_dir_that_is_not_llama_cpp(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    line = refusal(tmp_path / "build", LLAMA_CPP_SOURCE_DIR=str(wrong))
    assert f"LLAMA_CPP_SOURCE_DIR={wrong} is not a llama.cpp source tree" in line


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_no_compiler(tmp_path: Path, variable: str) -> None:
    line = refusal(tmp_path, **{variable: "/nonexistent/compiler"})
    name = {"CC": "C", "CXX": "C++"}[variable]
    assert line.startswith(f"pykvcache: no working {name} compiler found")
    assert f"{variable}='/nonexistent/compiler'" in line


def test_a_copy_of_no_known_instruction_set(tmp_path: Path) -> None:
    names = "-DPYKVCACHE_CPU_COPIES=haswell;i486"
    line = refusal(tmp_path, names, LLAMA_CPP_SOURCE_DIR=str(SOURCES))
    if "needs GCC on x86-64 Linux" not in line:
        assert "PYKVCACHE_CPU_COPIES names 'i486'" in line
        assert line.endswith("skylakex, alderlake, haswell, sse42")


def test_cmake_args_reach_ggml(tmp_path: Path) -> None:
    """Making a source distribution configures: the whole way that ``pip install`` takes."""
    tree = tmp_path / "tree"
    for name in ["CMakeLists.txt", "LICENSE", "README.md", "cmake", "pyproject.toml", "src"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    code = (
        "from scikit_build_core.build import build_sdist;"
        "build_sdist('out', {'build-dir': 'configured'})"
    )
    env = environment(
        CMAKE_ARGS="-DGGML_OPENMP=OFF -DGGML_NATIVE=OFF", LLAMA_CPP_SOURCE_DIR=str(SOURCES)
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cache = tree / "configured" / "CMakeCache.txt"
    settings = dict(line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line)
    chosen = {key.split(":")[0]: value for key, value in settings.items()}
    assert chosen["GGML_OPENMP"] == "OFF"
    assert chosen["GGML_NATIVE"] == "OFF"
    # What nobody asked for stays as ggml has it: no backend is named by this project.
    assert chosen["GGML_CUDA"] == "OFF"
    assert chosen["GGML_CPU"] == "ON"
