"""``vendor/fetch.py``: one clear line for every way to fail, and nothing half done."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "llama_cpp_python-0.3.36"

# A source distribution that pip can read without downloading anything for it.
BACKEND = f"""
import os
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = os.path.join(folder, "{NAME}.dist-info")
    os.mkdir(info)
    with open(os.path.join(info, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 0.3.36\\n")
    return os.path.basename(info)
def build_wheel(*args, **kwargs): raise NotImplementedError
def build_sdist(*args, **kwargs): raise NotImplementedError
"""
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n",
    "backend.py": BACKEND,
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
    'backend-path = ["."]\n',
    "README.md": "not wanted",
    "vendor/llama.cpp/README.md": "not wanted",
    "vendor/llama.cpp/models/ggml-vocab.gguf": "not wanted",
    "vendor/llama.cpp/models/templates/one.jinja": "a template",
    "vendor/llama.cpp/common/chat.h": "// another header",
    "vendor/llama.cpp/include/llama.h": "// the header",
    "vendor/llama.cpp/src/llama.cpp": "// the source",
}


def make_sdist(folder: Path) -> Path:
    path = folder / f"{NAME}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"{NAME}/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


class Vendor:
    """A ``vendor`` folder of its own, whose pip sees one folder and no network."""

    def __init__(self, folder: Path) -> None:
        self.vendor = folder / "vendor"
        self.wares = folder / "wares"
        self.vendor.mkdir()
        self.wares.mkdir()
        shutil.copy(ROOT / "vendor" / "fetch.py", self.vendor)
        self.target = self.vendor / "llama.cpp"

    def lock(self, digest: str) -> None:
        text = f"llama-cpp-python==0.3.36 --hash=sha256:{digest}\n"
        (self.vendor / "llama.cpp.lock").write_text(text)

    def offer(self) -> None:
        self.lock(hashlib.sha256(make_sdist(self.wares).read_bytes()).hexdigest())

    def fetch(self) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.upper().startswith("PIP_")}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
        env |= {"PIP_FIND_LINKS": str(self.wares)}
        command = [sys.executable, str(self.vendor / "fetch.py")]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def refusal(self) -> str:
        """Fetch, which must fail with one line and leave nothing behind; the line."""
        done = self.fetch()
        assert done.returncode == 1
        assert not self.target.exists()
        (line,) = done.stderr.splitlines()
        assert line.startswith("pykvcache: ")
        return line


@pytest.fixture
def shelf(tmp_path: Path) -> Vendor:
    return Vendor(tmp_path)


def test_what_the_build_reads_is_unpacked_once(shelf: Vendor) -> None:
    shelf.offer()
    done = shelf.fetch()
    assert done.stdout.strip() == str(shelf.target), done.stderr
    names = {p.relative_to(shelf.target).as_posix() for p in shelf.target.rglob("*.*")}
    wanted = {"common/chat.h", "include/llama.h", "models/templates/one.jinja", "src/llama.cpp"}
    assert names == {".pykvcache-lock", *wanted}
    shutil.rmtree(shelf.wares)  # an equal stamp needs no network
    assert shelf.fetch().returncode == 0
    shelf.lock("0" * 64)
    assert shelf.fetch().returncode == 1
    assert (shelf.target / "include" / "llama.h").is_file()


def test_what_cannot_be_downloaded_is_refused(shelf: Vendor) -> None:
    shelf.lock("0" * 64)
    line = shelf.refusal()
    assert "cannot download" in line
    assert "LLAMA_CPP_SOURCE_DIR" in line
    shelf.offer()
    shelf.lock("0" * 64)
    assert "do not match the hash in vendor/llama.cpp.lock" in shelf.refusal()


def test_an_archive_without_llama_cpp(shelf: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FILES, "vendor/llama.cpp/include/llama.h")
    shelf.offer()
    assert "holds no llama.cpp sources" in shelf.refusal()
