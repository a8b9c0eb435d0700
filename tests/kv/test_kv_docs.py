"""docs/kv-arrays.md: its figures are those that the tests hold."""

from __future__ import annotations

import re
from pathlib import Path

from .test_kv_values import BOUND

TEXT = (Path(__file__).parents[2] / "docs" / "kv-arrays.md").read_text(encoding="utf-8")


def test_the_bounds_are_those_that_are_tested() -> None:
    header, _, row = re.findall(r"^\|.*\|$", TEXT[TEXT.index("| f16 | bf16") :], re.M)[:3]
    names, bounds = (re.findall(r"[\w.^-]+", line) for line in (header, row))
    assert {n: eval(b.replace("^", "**")) for n, b in zip(names, bounds, strict=True)} == BOUND
