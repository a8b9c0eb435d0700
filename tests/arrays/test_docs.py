"""docs/array-caches.md: its examples run, and it names every class."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pykvcache import arrays

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "array-caches.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_example_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"array-caches.md, example {number}", "exec"), {})


def test_every_class_is_mentioned() -> None:
    classes = [name for name in arrays.__all__ if name.endswith("Cache") and name not in ("Cache",)]
    assert len(classes) > 15
    for name in classes:
        assert f"`{name}" in TEXT, name
