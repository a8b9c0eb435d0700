"""Every block of Python in the documents runs, and prints what stands after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.doc_blocks import agrees, outputs, read_blocks

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

DOCS = Path(__file__).parents[1] / "docs"
WITH_CODE = [p for p in sorted(DOCS.rglob("*.md")) if read_blocks(p.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda p: p.relative_to(DOCS).as_posix())
def test_code_prints_what_the_document_says(path: Path) -> None:
    blocks = read_blocks(path.read_text(encoding="utf-8"))
    for block, output in zip(blocks, outputs(blocks), strict=True):
        assert agrees(block, output), f"{path}: {block.code}\nprints\n{output}"


def test_the_tutorial_shows_output() -> None:
    blocks = read_blocks((DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert len([block for block in blocks if block.output]) >= 6
