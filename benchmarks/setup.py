"""Prepares the contestants in build/bench: environments, the C program, our wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import Contestant
from benchmarks.models import BUILD, ROOT

HERE = Path(__file__).resolve().parent
VENDOR = ROOT / "vendor" / "llama.cpp"

#: Requirements for pip. The first is built from source, with the same llama.cpp as ours.
PEERS = {
    "llama-cpp-python": ["--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"],
    "cyllama": ["--only-binary=:all:", "cyllama==0.2.18"],
    "xllamacpp": ["--only-binary=:all:", "xllamacpp==2026.10.11549"],
}
MODULES = {
    "llama-cpp-python": "llama_cpp_python_peer",
    "cyllama": "cyllama_peer",
    "xllamacpp": "xllamacpp_peer",
}
PATHS = {"PYTHONPATH": os.fspath(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
OURS = "pykvcache"
#: Our wheel with ggml's CPU code for several instruction sets.
PORTABLE = ["PYKVCACHE_CPU_COPIES=ON", "build-dir=build/portable-{wheel_tag}"]
INCLUDES = [f"-I{VENDOR / 'include'}", f"-I{VENDOR / 'ggml' / 'include'}"]


def python_of(name: str) -> Path:
    """Return the interpreter of a contestant's environment."""
    return BUILD / name / "bin" / "python"


def run(command: Iterable[str | os.PathLike[str]], **env: str) -> None:
    """Run a step; show its output if it fails."""
    words = [os.fspath(word) for word in command]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(f"{' '.join(words[:4])} ...: " + " / ".join(lines[-3:]))


def pip(python: Path, *arguments: str, **env: str) -> None:
    """Call pip of an environment, creating it if needed."""
    if not python.exists():
        run([sys.executable, "-m", "venv", python.parents[1]])
    run([python, "-m", "pip", "--disable-pip-version-check", *arguments], **env)


def newest(paths: Iterable[Path]) -> float:
    """Return the latest modification time."""
    return max(path.stat().st_mtime for path in paths)


def libraries() -> list[Path]:
    """Return llama.cpp's static libraries of our build, in link order."""
    names = ["libllama.a", "libggml.a", "libggml-cpu.a", "libggml-base.a"]
    # Selected by wheel tag: the build for this machine.
    folders = list((ROOT / "build").glob("cp*/llama.cpp"))
    for folder in [*sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True), BUILD / "c"]:
        found = {p.name: p for p in folder.rglob("lib*.a")}
        if all(name in found for name in names):
            return [found[name] for name in names]
    raise FileNotFoundError("no static llama.cpp in build/: run `make venv`")


def build_llama() -> None:
    """Build llama.cpp like our CMake files, for a tree without a build."""
    options = ["-DBUILD_SHARED_LIBS=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    options += [f"-DLLAMA_BUILD_{x}=OFF" for x in ("COMMON", "TOOLS", "TESTS", "EXAMPLES")]
    options += ["-DLLAMA_BUILD_SERVER=OFF", "-DCMAKE_POSITION_INDEPENDENT_CODE=ON"]
    run(["cmake", "-S", VENDOR, "-B", BUILD / "c", "-G", "Ninja", *options])
    run(["cmake", "--build", BUILD / "c"])


def c_program() -> Path:
    """Compile the plain C side with our llama.cpp."""
    program, sources = BUILD / "bench_c", sorted((HERE / "c").glob("*.c"))
    try:
        archives = libraries()
    except FileNotFoundError:
        build_llama()
        archives = libraries()
    headers = (HERE / "c").glob("*.h")
    if program.exists() and program.stat().st_mtime > newest([*sources, *headers, *archives]):
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    items = [BUILD / f"{source.stem}.o" for source in sources]
    for source, item in zip(sources, items, strict=True):
        run([os.environ.get("CC", "cc"), "-O2", *INCLUDES, "-c", source, "-o", item])
    link([*items, *archives], program)
    return program


def thin_extension() -> Path:
    """Compile the class with empty and unchecked methods; return its folder."""
    folder, source, archives = BUILD / "native", HERE / "c" / "bench_thin.pyx", libraries()
    target = folder / f"bench_thin{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists() and target.stat().st_mtime > newest([source, *archives]):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    text, item = folder / "bench_thin.cpp", folder / "bench_thin.o"
    run([sys.executable, "-m", "cython", "-3", "--cplus", source, "-o", text])
    includes = [f"-I{sysconfig.get_path('include')}", *INCLUDES]
    flags = ["-O3", "-DNDEBUG", "-fPIC", "-fwrapv", "-fvisibility=hidden"]
    run([os.environ.get("CXX", "c++"), *flags, *includes, "-c", text, "-o", item])
    link([item, *archives, "-shared"], target)
    return folder


def link(items: list[str | os.PathLike[str]], target: Path) -> None:
    """Link with llama.cpp's dependencies, and hide its symbols."""
    flags = ["-fopenmp", "-pthread", "-ldl", "-lm", "-Wl,--exclude-libs,ALL", "-o"]
    run([os.environ.get("CXX", "c++"), *items, *flags, target])


def wheel(name: str = OURS, *settings: str) -> Path:
    """Build our wheel in the build folder of ``make venv``, which has llama.cpp already."""
    sources = [p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    folder = BUILD / name / "wheel"
    ready = sorted(folder.glob("*.whl"))
    if ready and ready[-1].stat().st_mtime > newest([*sources, ROOT / "CMakeLists.txt"]):
        return ready[-1]
    shutil.rmtree(folder, ignore_errors=True)
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            *words,
            folder,
            ".",
            *settings,
        ],
        PATH=path,
    )
    return next(folder.glob("*.whl"))


def install_ours(name: str = OURS, *settings: str) -> Path:
    """Install the wheel into a separate environment; return the wheel."""
    built, stamp = wheel(name, *settings), BUILD / name / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < built.stat().st_mtime:
        pip(python_of(name), "install", "--quiet", "--force-reinstall", f"{built}[state,redis]")
        stamp.touch()
    return built


def portable() -> Contestant:
    """Make the portable wheel; raise where copies of ggml's CPU code are not supported."""
    name, prefixes = "portable", ("cmake.define.", "")
    settings = [f"--config-settings={a}{b}" for a, b in zip(prefixes, PORTABLE, strict=True)]
    made = Contestant(name, [os.fspath(python_of(name)), "-m", "benchmarks.peers.ours"], PATHS)
    try:
        install_ours(name, *settings)
    except RuntimeError as error:
        made.missing = f"not installed: {error}"
    return made


def wheel_of(name: str) -> Path:
    """Return a contestant's wheel."""
    return next((BUILD / name / "wheel").glob("*.whl"))


def install_peer(name: str) -> None:
    """Build or fetch a peer's wheel, and install it into a separate environment."""
    stamp, wanted = BUILD / name / ".installed", "\n".join(PEERS[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python, folder, begin = python_of(name), BUILD / name / "wheel", time.perf_counter()
    # Without images and parts for llama.cpp's programs; otherwise built like the package.
    arguments = ["--quiet", "--no-deps", "--wheel-dir", os.fspath(folder)]
    options = "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF"
    pip(python, "wheel", *arguments, *PEERS[name], CMAKE_ARGS=options)
    pip(python, "install", "--quiet", os.fspath(wheel_of(name)), "numpy")
    (BUILD / name / ".seconds").write_text(f"{time.perf_counter() - begin:.0f}")
    stamp.write_text(wanted)


def first_costs() -> dict[str, int]:
    """Return the seconds of building or fetching each peer."""
    return {path.parent.name: int(path.read_text()) for path in BUILD.glob("*/.seconds")}


def contestants(
    peers: Iterable[str] = tuple(PEERS),
) -> tuple[dict[str, Contestant], dict[str, float]]:
    """Prepare all contestants; failed ones stay in the list with the reason.

    Returns
    -------
    tuple
        The contestants by name, and the seconds of preparing each.
    """
    found: dict[str, Contestant] = {}
    took: dict[str, float] = {}
    begin = time.perf_counter()
    install_ours()
    took[OURS] = time.perf_counter() - begin
    begin = time.perf_counter()
    program = c_program()
    native = {**PATHS, "PYKVCACHE_BENCH_NATIVE": os.fspath(thin_extension())}
    took["C"] = time.perf_counter() - begin
    python = os.fspath(python_of(OURS))
    found[OURS] = Contestant(OURS, [python, "-m", "benchmarks.peers.ours"], native)
    found["C"] = Contestant("C", [os.fspath(program)])
    found["thin"] = Contestant("thin", [python, "-m", "benchmarks.peers.thin"], native)

    for name in peers:
        begin = time.perf_counter()
        print(f"making {name}", file=sys.stderr)
        command = [os.fspath(python_of(name)), "-m", f"benchmarks.peers.{MODULES[name]}"]
        found[name] = Contestant(name, command, PATHS)
        try:
            install_peer(name)
        except RuntimeError as error:
            found[name].missing = f"not installed: {error}"
        took[name] = time.perf_counter() - begin
    return found, took
