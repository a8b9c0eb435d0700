"""Write docs/reference/hazards.md: each id of docs/guarantees.md, and the tests that carry it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = DOCS / "reference" / "hazards.md"
KINDS = "MDSCVLTFN"
HEADER = """# Hazards and their tests

Each row is a hazard of [Guarantees](../guarantees.md) and the tests that guard against it.
`python tests/hazards.py` writes this page from the `hazard` markers of the tests in `tests/`.

| id | tests |
|---|---|
"""


def listed_ids() -> list[str]:
    """Return the ids in the first column of the tables of guarantees.md, ranges expanded."""
    ids = []
    for row in re.findall(r"^\| ([^|]*\d) \|", (DOCS / "guarantees.md").read_text("utf-8"), re.M):
        for kind, first, last in re.findall(r"([A-Z])(\d+)(?:-[A-Z](\d+))?", row):
            ids += [f"{kind}{n}" for n in range(int(first), int(last or first) + 1)]
    return ids


@functools.cache
def marked_tests() -> dict[str, list[str]]:
    """Return the tests (``file::name``) that carry each id, in the order of ids."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for id_ in _ids(node):
                    name = f"{path.relative_to(TESTS).as_posix()}::{node.name}"
                    found.setdefault(id_, []).append(name)
    return {id_: found[id_] for id_ in sorted(found, key=lambda i: (KINDS.index(i[0]), int(i[1:])))}


def _ids(test: ast.FunctionDef) -> Iterator[str]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.hazard":
            yield from map(ast.literal_eval, mark.args)


def page() -> str:
    """Return the page as it should be."""
    rows = (f"| {i} | {'<br>'.join(f'`{t}`' for t in ts)} |\n" for i, ts in marked_tests().items())
    return HEADER + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
    PAGE.write_text(page(), encoding="utf-8")
