"""docs/guarantees.md names tests that exist, and every hazard once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "guarantees.md"

PROVED = ["ids", "llama.cpp", "pykvcache", "proved by"]
LEFT = ["ids", "what", "why"]

# How many hazards each part of the audit has. What was found since (N) has numbers from 1.
AUDIT = {"M": 39, "D": 40, "S": 34, "C": 25, "V": 8, "L": 3, "T": 5, "F": 2}


def rows(header: list[str]) -> list[list[str]]:
    """The cells of every row below that header."""
    found: list[list[str]] = []
    inside = False
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells == header:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            assert len(cells) == len(header), line
            assert all(cells), line
            found.append(cells)
    assert found, f"no table of {header}"
    return found


def ids(text: str) -> list[str]:
    """``M1, M3-M5`` written out; ``none`` is none."""
    if text == "none":
        return []
    found = []
    for part in text.split(", "):
        match = re.fullmatch(r"([A-Z])([1-9]\d*)(?:-\1([1-9]\d*))?", part)
        assert match, f"{part!r} in {text!r} is no hazard"
        first, last = int(match[2]), int(match[3] or match[2])
        assert first <= last, part
        found += [f"{match[1]}{n}" for n in range(first, last + 1)]
    return found


@cache
def functions(file: str) -> set[str]:
    """Names of the functions at the top of a test file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_hazard_is_in_one_row() -> None:
    proved = Counter(name for row in rows(PROVED) for name in ids(row[0]))
    left = Counter(name for row in rows(LEFT) for name in ids(row[0]))
    assert [name for name, n in (proved + left).items() if n > 1] == []
    named = set(proved) | set(left)
    found_since = {name for name in named if name[0] == "N"}
    assert found_since >= {f"N{n + 1}" for n in range(30)}
    wanted = {f"{part}{n + 1}" for part, size in AUDIT.items() for n in range(size)}
    assert named - found_since == wanted


def test_every_row_names_tests_that_exist() -> None:
    for row in rows(PROVED):
        assert ids(row[0]), row
        for name in row[3].split(", "):
            match = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", name)
            assert match, f"{name} in the row of {row[0]} is no test"
            assert (TESTS / match[1]).is_file(), name
            assert match[2] in functions(match[1]), name


def test_files_named_in_the_text_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[\w-]+/)+[\w.-]+)`", text)
    assert paths
    for path in paths:
        assert any((root / path).exists() for root in (TESTS, TESTS.parent)), path
