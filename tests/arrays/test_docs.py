"""docs/array-caches.md: its examples run, and its table of windows is true."""

from __future__ import annotations

import re
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


def test_every_family_has_examples() -> None:
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
