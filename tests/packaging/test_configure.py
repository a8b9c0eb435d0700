"""What CMake says when a build cannot begin, and that CMAKE_ARGS reaches ggml."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINNED = ROOT / "vendor" / "llama.cpp"
SOURCES = Path(os.environ.get("LLAMA_CPP_SOURCE_DIR") or PINNED)
HAS_COPIES = sys.platform == "linux" and platform.machine() == "x86_64"

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


def other_llama_cpp(folder: Path, header: str, old: str, new: str) -> Path:
    """The pinned sources by links, but for one word in one header."""
    if not (SOURCES / header).is_file():
        pytest.skip("llama.cpp's sources are elsewhere")
    for part in ("include", "src"):
        (folder / part).mkdir(parents=True)
        for path in (SOURCES / part).iterdir():
            (folder / part / path.name).symlink_to(path)
    (folder / "ggml").symlink_to(SOURCES / "ggml")
    text = (SOURCES / header).read_text(encoding="utf-8")
    assert old in text
    (folder / header).unlink()
    (folder / header).write_text(text.replace(old, new), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_what_cannot_be_built_is_said_in_one_line(tmp_path: Path) -> None:
    """One build folder, in which the compilers are looked for once."""
    build, wrong = tmp_path / "build", tmp_path / "wrong"
    wrong.mkdir()
    said = refusal(build, LLAMA_CPP_SOURCE_DIR=str(wrong))
    assert f"LLAMA_CPP_SOURCE_DIR={wrong} is not a llama.cpp source tree" in said

    header, line = "include/llama.h", "#define LLAMA_STATE_SEQ_VERSION "
    states = other_llama_cpp(tmp_path / "states", header, line, line + "9")
    said = refusal(build, LLAMA_CPP_SOURCE_DIR=str(states))
    assert f"the llama.cpp in {states} writes states of version '9" in said
    assert "3 and 4 are known here" in said

    members = other_llama_cpp(tmp_path / "members", "src/llama-kv-cells.h", "seq_pos", "by_seq")
    said = refusal(build, LLAMA_CPP_SOURCE_DIR=str(members))
    assert f"the llama.cpp in {members} is not one that this version fits (error: " in said
    assert "seq_pos" in said
    assert "-DPYKVCACHE_PLAIN=ON" in said

    copies = "-DPYKVCACHE_CPU_COPIES=haswell;i486"
    # The pinned sources, which are not tried first.
    own = {} if SOURCES == PINNED else {"LLAMA_CPP_SOURCE_DIR": str(SOURCES)}
    said = refusal(build, copies, **own)
    if "needs GCC on x86-64 Linux" not in said:
        assert "PYKVCACHE_CPU_COPIES names 'i486'" in said
        assert said.endswith("skylakex, alderlake, haswell, sse42")


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_no_compiler(tmp_path: Path, variable: str) -> None:
    line = refusal(tmp_path, **{variable: "/nonexistent/compiler"})
    name = {"CC": "C", "CXX": "C++"}[variable]
    assert line.startswith(f"pykvcache: no working {name} compiler found")
    assert f"{variable}='/nonexistent/compiler'" in line


def configured(tree: Path, arguments: str) -> dict[str, str]:
    """Make a source distribution, which configures; the settings of the CMake cache."""
    for name in ["CMakeLists.txt", "LICENSE", "README.md", "cmake", "pyproject.toml", "src"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    code = (
        "from scikit_build_core.build import build_sdist;"
        "build_sdist('out', {'build-dir': 'configured'})"
    )
    env = environment(CMAKE_ARGS=arguments, LLAMA_CPP_SOURCE_DIR=str(SOURCES))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cache = tree / "configured" / "CMakeCache.txt"
    settings = dict(line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line)
    return {key.split(":")[0]: value for key, value in settings.items()}


@pytest.mark.slow
def test_cmake_args_reach_ggml(tmp_path: Path) -> None:
    """The whole way that ``pip install`` takes, with a llama.cpp of one's own."""
    wanted = "-DGGML_LLAMAFILE=OFF -DGGML_NATIVE=OFF"
    wanted += " -DPYKVCACHE_CPU_COPIES='haswell;sse42'" * HAS_COPIES
    chosen = configured(tmp_path / "tree", wanted)
    assert chosen["GGML_LLAMAFILE"] == "OFF"
    assert chosen["GGML_NATIVE"] == "OFF"
    # What nobody asked for stays as ggml has it: no backend is named by this project.
    assert chosen["GGML_OPENMP"] == "ON"
    assert chosen["GGML_CUDA"] == "OFF"
    assert chosen["GGML_CPU"] == "ON"
    if HAS_COPIES:
        header = (tmp_path / "tree" / "configured" / "cpu" / "cpu_copies.h").read_text()
        assert header.split() == ["#define", "PYKV_CPU_COPIES(X)", "X(haswell)", "X(sse42)"]
