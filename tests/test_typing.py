"""What a type checker knows of the public names: the choices of options, what `kv` gives."""

from __future__ import annotations

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

PAIRS = [
    "AttentionType",
    "FlashAttention",
    "GgmlType",
    "LoadMode",
    "PoolingType",
    "RopeScalingType",
    "SplitMode",
]


def names(alias: Any) -> set[str]:
    """The texts of a union of literals."""
    return {text for literal in get_args(alias) for text in get_args(literal)}


@pytest.mark.parametrize("name", PAIRS)
def test_the_names_are_those_of_the_enumeration(name: str) -> None:
    kind: type[IntEnum] = getattr(pykvcache, name)
    assert names(getattr(pykvcache, f"{name}Name")) == {m.name.lower() for m in kind}


@pytest.mark.parametrize("kind", [pykvcache.LlamaModel, pykvcache.LlamaContext])
def test_no_option_is_any_text(kind: type) -> None:
    """A path is; what has a list of choices is not."""
    hints: dict[str, Any] = get_type_hints(kind.__init__)
    for name in inspect.signature(kind).parameters:
        assert name == "path" or str not in (hints[name], *get_args(hints[name])), name


def test_every_kind_of_memory_is_a_choice() -> None:
    text = inspect.getdoc(pykvcache.LlamaContext.memory_kind) or ""
    for kind in names(pykvcache.MemoryKind):
        assert f'"{kind}"' in text


GOOD = """
from pykvcache import CacheView, LlamaContext, LlamaModel, SequenceKV
import numpy as np, numpy.typing as npt
from typing import Any

model = LlamaModel("x", load_mode="mmap", split_mode="row")
ctx = LlamaContext(model, type_k="q8_0", flash_attn="auto", pooling_type="mean")
arrays: SequenceKV = ctx.kv(0)
keys: npt.NDArray[Any] = ctx.kv(0, dtype=np.float32, rope=False).layers[0].keys
view: CacheView = ctx.kv(0, copy=False).layers[0].keys
ctx.write_kv(ctx.kv(0, copy=False), 1)
ctx.write_kv(arrays.select([0]), 1)
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
    "ctx.write_kv(0, arrays)",
    "arrays = ctx.kv(0, copy=False)",
]


def test_a_type_checker_sees_the_choices(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    first = len(GOOD.splitlines()) + 1
    file.write_text(GOOD + "\n".join(BAD) + "\n")
    root = Path(pykvcache.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(file)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=300,
        check=False,
    )
    wrong = [int(line.split(":")[1]) for line in done.stdout.splitlines() if " error: " in line]
    assert set(wrong) == set(range(first, first + len(BAD))), done.stdout
