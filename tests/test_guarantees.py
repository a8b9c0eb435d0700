"""docs/guarantees.md names tests that exist, and every hazard once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "guarantees.md"

LEFT = ["ids", "what", "why"]

# How many hazards each part of the audit has. What was found since has numbers with an N.
AUDIT = {"M": 39, "D": 40, "S": 34, "C": 25, "V": 8, "L": 3, "T": 5, "F": 2}


class Hazard(NamedTuple):
    """One entry: what llama.cpp does, what is done here, and the tests that prove it."""

    ids: str
    llama: str
    here: str
    tests: list[tuple[str, str]]


def hazards() -> list[Hazard]:
    """Read every entry of the page: ``- **ids** what. **Here:** what.`` and lines of tests."""
    found = []
    text = DOCUMENT.read_text(encoding="utf-8")
    for block in re.findall(r"^- \*\*[A-Z]\d.*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE):
        head, *files = re.split(r"\n  - ", block)
        whole = re.fullmatch(r"- \*\*(.+?)\*\* (.+) \*\*Here:\*\* (.+)", " ".join(head.split()))
        assert whole, f"not '- **ids** what. **Here:** what.': {block}"
        tests = []
        for line in files:
            file, _, names = " ".join(line.split()).partition(": ")
            tests += [(file.strip("`"), name.strip("`")) for name in names.split(", ")]
        found.append(Hazard(whole[1], whole[2], whole[3], tests))
    assert found
    return found


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


def test_every_hazard_is_in_one_entry() -> None:
    proved = Counter(name for hazard in hazards() for name in ids(hazard.ids))
    left = Counter(name for row in rows(LEFT) for name in ids(row[0]))
    assert [name for name, n in (proved + left).items() if n > 1] == []
    named = set(proved) | set(left)
    found_since = {name for name in named if name[0] == "N"}
    # Their numbers may have gaps: they are given out before the entries are written.
    assert {f"N{n + 1}" for n in range(81)} <= found_since
    wanted = {f"{part}{n + 1}" for part, size in AUDIT.items() for n in range(size)}
    assert named - found_since == wanted


def test_every_entry_names_tests_that_exist() -> None:
    for hazard in hazards():
        assert ids(hazard.ids)
        assert hazard.tests, f"{hazard.ids} has no test"
        for file, name in hazard.tests:
            assert (TESTS / file).is_file(), f"{file} of {hazard.ids}"
            assert name in functions(file), f"{file}: {name} of {hazard.ids}"


def test_every_line_can_be_read() -> None:
    """An entry that is written as a row of a table, or in one long line, is none."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("| N") or line.startswith("| M")]
    assert not [line for line in tables if "::" in line], "entries are lists: see those above it"
    assert not [line for line in lines if len(line) > 150 and not line.startswith("|")]


def test_files_named_in_the_text_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[\w-]+/)+[\w.-]+)`", text)
    assert paths
    for path in paths:
        assert any((root / path).exists() for root in (TESTS, TESTS.parent)), path
