"""Every public name can be had, and a strict type checker sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pykvcache

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_once() -> None:
    assert len(set(pykvcache.__all__)) == len(pykvcache.__all__)
    for name in pykvcache.__all__:
        assert getattr(pykvcache, name) is not None
    assert dir(pykvcache) == sorted(pykvcache.__all__)


def test_names_loaded_on_use_are_public() -> None:
    """What `__getattr__` can give and ``__all__`` lists are kept in two places, in step."""
    assert set(pykvcache._HOMES) <= set(pykvcache.__all__)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LlamaModle'"):
        pykvcache.LlamaModle  # noqa: B018


def test_a_strict_type_checker_sees_the_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs the lint tools")
    code = "from __future__ import annotations\nimport pykvcache\n"
    code += "".join(f"from pykvcache import {name}\n" for name in pykvcache.__all__)
    code += "model: LlamaModel = LlamaModel('x')\nreveal_type(LlamaContext(model).n_ctx)\n"
    (tmp_path / "user.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "user.py"],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "int"' in done.stdout or "builtins.int" in done.stdout
