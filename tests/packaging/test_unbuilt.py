"""A source tree that was never built says what to do, and its array caches work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone: what ``git clone`` gives."""
    folder = tmp_path_factory.mktemp("unbuilt")
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "data")
    shutil.copytree(ROOT / "src" / "pykvcache", folder / "pykvcache", ignore=ignore)
    return folder


def run(tree: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` against ``tree`` and NumPy, without what the environment has installed."""
    numpy_home = Path(np.__file__).parents[1]
    begin = f"import sys; sys.path[:0] = [{str(tree)!r}, {str(numpy_home)!r}]\n"
    # -S: the import hook of an editable install would find the built extension.
    command = [sys.executable, "-I", "-S", "-c", begin + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_needs_the_compiled_layer_says_what_to_do(tree: Path) -> None:
    done = run(tree, "import pykvcache; print(pykvcache.__file__); pykvcache.LlamaModel")
    assert done.returncode == 1
    assert done.stdout.startswith(str(tree))
    assert done.stderr.count("RuntimeWarning: pykvcache is not built") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pykvcache is not built")
    assert "pip install -e ." in last


def test_array_caches_work(tree: Path) -> None:
    code = "from pykvcache.arrays import FlatKVCache; print(FlatKVCache.__module__)"
    done = run(tree, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "pykvcache.arrays.flat"
