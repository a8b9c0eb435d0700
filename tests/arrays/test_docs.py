"""docs/array-caches.md: its examples run, and its table names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import arrays
from pykvcache.arrays import RotatingKVCache, SWACache

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "array-caches.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_example_runs(number: int) -> None:
    exec(compile(BLOCKS[number], f"array-caches.md, example {number}", "exec"), {})


def test_there_are_examples_of_every_family() -> None:
    for name in ("CausalCache", "InputCache", "KVCache", "BatchKVCache", "FlatKVCache"):
        assert any(re.search(rf"\b{name}\(|\b{name}\.", block) for block in BLOCKS)


def test_every_class_is_mentioned() -> None:
    classes = [name for name in arrays.__all__ if name.endswith("Cache") and name not in ("Cache",)]
    assert len(classes) > 15
    for name in classes:
        assert f"`{name}" in TEXT, name


def seen(key: Any, visible: Any) -> list[int]:
    return sorted(key[visible].ravel().astype(int).tolist())


@pytest.mark.parametrize("window", [2, 5])
def test_windows_of_both_meanings_agree(window: int) -> None:
    cells, ring = SWACache(window - 1), RotatingKVCache(window)
    cells.init(np.float32, 1, 100, 4)
    for start in range(0, 20, 2):
        positions = np.arange(start, start + 2)
        new = positions.astype(np.float32)
        cells.start_forward(positions, [0, 0])
        cells.put(new.reshape(2, 1, 1), new.reshape(2, 1, 1))
        key, _, mask = cells.get()
        ring_mask = ring.make_mask(2, return_array=True)
        assert isinstance(ring_mask, np.ndarray)
        keys, _ = ring.update(new.reshape(1, 1, 2, 1), new.reshape(1, 1, 2, 1))
        for row, position in enumerate(positions):
            expected = list(range(max(0, position - window + 1), position + 1))
            assert seen(key[:, 0, 0], mask[row] == 0) == expected
            assert seen(keys[0, 0, :, 0], ring_mask[row]) == expected


# The table ----------------------------------------------------------------------------------


@cache
def names_in(path: str) -> frozenset[str]:
    """Functions, classes, methods and assigned names of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def rows() -> list[list[str]]:
    """Cells of the rows under the heading that begins the tables of what the originals do."""
    _, _, part = TEXT.partition("\n## Item by item\n")
    lines = [line for line in part.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if not row[0].startswith(("item", "---"))]


def test_the_table_is_whole() -> None:
    assert len(rows()) > 150
    for row in rows():
        assert len(row) == 4, row
        item, name, tests, _ = row
        assert item, row
        assert name, row
        assert "::" in tests or tests.startswith("does not apply:"), row


def test_every_test_in_the_table_exists() -> None:
    for row in rows():
        text = " ".join(row)
        named = re.findall(r"`(tests/\S+?\.py)::([\w.]+)`", text)
        assert len(named) == text.count("::"), row
        for path, test in named:
            assert set(test.split(".")) <= names_in(path), f"{path}::{test}"
