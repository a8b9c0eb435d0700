"""What ``make wheel`` left in ``dist/``: its contents, and that each works elsewhere."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
SMOKE = ROOT / "tests" / "smoke.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DIST.is_dir(), reason="no dist/: 'make wheel' fills it"),
]

SOURCES = {"CMakeLists.txt", "LICENSE", "licenses", "cmake", "ggml", "include", "src", "vendor"}
WHEEL_NAMES = [
    r"pykvcache/(\w+/)*\w+\.pyi?",
    r"pykvcache/py\.typed",
    r"pykvcache/_native/lib\.[\w-]+\.(so|pyd)",
    r"pykvcache/data/stories\.gguf",
    r"pykvcache/licenses/llama\.cpp\.LICENSE",
    r"pykvcache-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)",
]


@pytest.fixture(scope="module")
def wheel() -> Path:
    (path,) = DIST.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist() -> Path:
    (path,) = DIST.glob("*.tar.gz")
    return path


def sources(suffixes: tuple[str, ...]) -> set[str]:
    found = (p for p in (ROOT / "src").rglob("*") if p.name.endswith(suffixes))
    return {p.relative_to(ROOT / "src").as_posix() for p in found}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert not {n for n in names if not any(re.fullmatch(p, n) for p in WHEEL_NAMES)}
    assert sources((".py", ".pyi", "py.typed")) <= names
    for pattern in WHEEL_NAMES:
        assert any(re.fullmatch(pattern, name) for name in names), pattern


def test_the_sdist_holds_what_a_build_reads(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    written = sources(
        (".py", ".pyi", ".pyx", ".pxi", ".pxd", ".h", ".c", ".cpp", ".txt", "py.typed")
    )
    assert {f"src/{name}" for name in written} <= names
    llama = {n.split("/")[2] for n in names if n.startswith("vendor/llama.cpp/")}
    assert llama == SOURCES | {".pykvcache-lock"}
    assert {"vendor/fetch.py", "vendor/llama.cpp.lock", "models/stories.gguf"} <= names
    top = {n.split("/")[0] for n in names}
    assert not top & {".git", ".venv", ".ci", "build", "dist", "benchmarks", "wheelhouse"}
    assert not {n for n in names if n.endswith((".so", ".pyc", ".o", ".a"))}


class Place:
    """A virtual environment and an empty folder, away from the repository."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True, symlinks=os.name != "nt")
        bin_dir = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.python = bin_dir / ("python.exe" if os.name == "nt" else "python")
        self.empty = folder / "empty"
        self.empty.mkdir()
        self.smoke = shutil.copy(SMOKE, self.empty)

    def run(self, *arguments: str, qemu: str = "", **more: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LLAMA_CPP"))}
        env["PATH"] = os.pathsep.join([str(self.python.parent), env["PATH"]])
        done = subprocess.run(
            [*(["qemu-x86_64", "-cpu", qemu] if qemu else []), str(self.python), *arguments],
            cwd=self.empty, env=env | more, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def try_it(self) -> None:
        said = self.run(str(self.smoke))
        assert "works" in said
        assert str(ROOT) not in said


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_wheel_works_elsewhere(place: Place, wheel: Path) -> None:
    place.run("-m", "pip", "install", "--quiet", str(wheel))
    place.try_it()


linux = pytest.mark.skipif(sys.platform != "linux", reason="what auditwheel says of a wheel")


@linux
def test_the_wheel_is_for_others_and_small(wheel: Path) -> None:
    """auditwheel gave it the tag, and had no library to add: see the names above."""
    assert "-manylinux_" in wheel.name or "-musllinux_" in wheel.name
    assert wheel.stat().st_size < 15e6


@linux
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64")
@pytest.mark.parametrize(("processor", "copy"), [("Nehalem", "sse42"), ("Haswell", "haswell")])
def test_the_wheel_works_on_an_older_processor(
    place: Place, wheel: Path, processor: str, copy: str
) -> None:
    if not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64: apt-get install qemu-user")
    place.run("-m", "pip", "install", "--quiet", str(wheel))
    ask = "import pykvcache; print(pykvcache.system_info()['cpu'])"
    assert place.run("-c", ask, qemu=processor).strip() == copy
    assert "works" in place.run(str(place.smoke), qemu=processor)


def test_the_sdist_builds_without_a_download(place: Place, sdist: Path) -> None:
    requirements = ["scikit-build-core", "cython", "cython-cmake", "cmake", "ninja", "numpy"]
    place.run("-m", "pip", "install", "--quiet", "--upgrade", "pip", *requirements)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    place.run("-m", "pip", "install", "--no-build-isolation", str(sdist), **offline)
    place.try_it()


def test_the_version_is_the_same_everywhere(wheel: Path, sdist: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found
    assert wheel.name.startswith(f"pykvcache-{found[1]}-cp{sys.version_info[0]}")
    assert sdist.name == f"pykvcache-{found[1]}.tar.gz"
