"""What a type checker knows of the public names: the choices of options, what `kv` gives."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

pykvcache = pytest.importorskip("pykvcache")
pytest.importorskip("pykvcache._native.lib", exc_type=ImportError)
pytest.importorskip("mypy", reason="needs the lint tools")
enums = pytest.importorskip("pykvcache.enums")

PAIRS = [
    "AttentionType",
    "FlashAttention",
    "GgmlType",
    "LoadMode",
    "PoolingType",
    "RopeScalingType",
    "SplitMode",
]


@pytest.mark.parametrize("name", PAIRS)
def test_the_names_are_those_of_the_enumeration(name: str) -> None:
    kind: type[IntEnum] = getattr(enums, name)
    assert set(get_args(getattr(enums, f"{name}Name"))) == {m.name.lower() for m in kind}


@pytest.mark.parametrize("kind", [pykvcache.LlamaModel, pykvcache.LlamaContext])
def test_no_option_is_any_text(kind: type) -> None:
    """A path is; what has a list of choices is not."""
    hints: dict[str, Any] = get_type_hints(kind.__init__)
    for name in inspect.signature(kind).parameters:
        assert name == "path" or str not in (hints[name], *get_args(hints[name])), name


def test_every_kind_of_memory_is_a_choice() -> None:
    text = inspect.getdoc(pykvcache.LlamaContext.memory_kind) or ""
    for kind in get_args(enums.MemoryKind):
        assert f'"{kind}"' in text


GOOD = """
from pykvcache import LlamaContext, LlamaModel
from pykvcache.kv import CacheView, SequenceKV
import numpy as np, numpy.typing as npt
from typing import Any

model = LlamaModel("x", load_mode="mmap", split_mode="row")
ctx = LlamaContext(model, type_k="q8_0", flash_attn="auto", pooling_type="mean")
held: SequenceKV = ctx.kv(0)
keys: npt.NDArray[Any] = ctx.kv(0, dtype=np.float32, rope=False).layers[0].keys
view: CacheView = ctx.kv(0, copy=False).layers[0].keys
ctx.write_kv(ctx.kv(0, copy=False), 1)
ctx.write_kv(held.select([0]), 1)
if ctx.memory_kind == "sliding-window":
    ctx.cells("window")
"""
BAD = [
    'LlamaContext(model, type_k="f99")',
    'LlamaContext(model, flash_attn="on")',
    'LlamaContext(model, pooling_type="max")',
    'LlamaContext(model, attention_type="x")',
    'LlamaContext(model, rope_scaling_type="x")',
    'LlamaModel("x", load_mode="fast")',
    'LlamaModel("x", split_mode="no")',
    'ctx.cells("all")',
    "ctx.save_sequence(0, 'file')",
    "ctx.write_kv(0, held)",
    "held = ctx.kv(0, copy=False)",
]


def checked(tmp_path: Path, code: str) -> list[str]:
    """Return what mypy says of a user's file, line by line."""
    (tmp_path / "user.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(tmp_path / "user.py")],
        capture_output=True,
        text=True,
        cwd=Path(pykvcache.__file__).parents[2],
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_type_checker_sees_the_names_and_the_choices(tmp_path: Path) -> None:
    """One run: it takes seconds."""
    homes = ("", ".enums", ".errors", ".generate", ".kv", ".state")
    imports = "".join(
        f"from pykvcache{home} import {name}\n"
        for home in homes
        for name in importlib.import_module(f"pykvcache{home}").__all__
    )
    good = imports + GOOD + "reveal_type(ctx.n_ctx)\n"
    first = len(good.splitlines()) + 1
    said = checked(tmp_path, good + "\n".join(BAD) + "\n")
    wrong = [int(line.split(":")[1]) for line in said if " error: " in line]
    assert set(wrong) == set(range(first, first + len(BAD))), said
    assert [line for line in said if "Revealed type is" in line and "int" in line]
