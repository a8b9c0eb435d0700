"""docs/kv-arrays.md: its code runs, and its figures are those that the tests hold."""

from __future__ import annotations

import re
from pathlib import Path

from .test_kv_values import BOUND

TEXT = (Path(__file__).parents[2] / "docs" / "kv-arrays.md").read_text(encoding="utf-8")


def test_the_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "kv-arrays.md", "exec"), names)


def test_the_bounds_are_those_that_are_tested() -> None:
    header, _, row = re.findall(r"^\|.*\|$", TEXT[TEXT.index("| f16 | bf16") :], re.M)[:3]
    names, bounds = (re.findall(r"[\w.^-]+", line) for line in (header, row))
    assert {n: eval(b.replace("^", "**")) for n, b in zip(names, bounds, strict=True)} == BOUND
