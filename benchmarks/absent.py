"""Explains the dashes in tables: what was not measured, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from typing import Any

from benchmarks.harness import Row, leave_out
from benchmarks.verdicts import US

Rows = dict[str, Row]

#: Prefixes of rows that only we have.
ALONE = {
    "reuse": ("nothing shared", "restore"),
    "real": ("another question", "12 prompts", "save, load", "chat, save"),
}

#: The size at the end of a row's name.
SIZE = re.compile(r", (\d[\d,]*(?: [A-Za-z]+)?)$")


def explained(rows: Rows, result: Mapping[str, Any], group: str) -> Rows:
    """Mark every contestant and row without samples or error as not asked."""
    if group in ("arrays", "portable"):  # ours and NumPy, or ours twice
        return rows
    # Rows that only we have.
    alone = ("empty", *ALONE.get(group, ()))
    names = [name for name, said in result["versions"].items() if isinstance(said, dict)]
    for name in names:
        if name != "thin" or group == "calls":
            leave_out(
                (
                    row
                    for row in rows.values()
                    if not row.name.startswith(alone) and not (name == US and is_varied(row, names))
                ),
                name,
                "not asked",
            )
    return rows


def is_varied(row: Row, names: Collection[str]) -> bool:
    """Whether a row compares variants of our own, such as with and without write-behind."""
    return bool(row.samples) and not any(who in names for who in row.samples)


def listed(rows: Rows) -> str:
    """List what was not measured: a line for each reason."""
    # "prefix there" has the same errors as "first token"; "empty" exists only for us.
    shown = [row for row in rows.values() if not row.name.startswith(("prefix there", "empty"))]
    sizes: dict[str, list[str]] = {}
    for row in shown:
        sizes.setdefault(stem(row.name, rows), []).append(row.name)
    why: dict[tuple[str, str], list[str]] = {}
    for row in shown:
        for who, error in row.errors.items():
            why.setdefault((who, error), []).append(row.name)
    lines: dict[str, list[str]] = {}
    for (who, error), names in why.items():
        what = in_short(names, sizes, rows)
        lines.setdefault(f"{what}: {error}", []).append(who)
    return "\n".join(
        ["Not measured:", "", *(f"- {', '.join(who)}: {text}" for text, who in lines.items())]
        if lines
        else []
    )


def stem(name: str, rows: Container[str]) -> str:
    """Return a row's name without its size, unless another row has that name."""
    short = SIZE.sub("", name)
    return name if short in rows else short


def in_short(names: list[str], sizes: Mapping[str, list[str]], rows: Container[str]) -> str:
    """Name rows; with sizes only if not all sizes are meant."""
    if set(names) == {name for group in sizes.values() for name in group}:
        return "everything here"
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(stem(name, rows), []).append(name)
    words = []
    for what, some in found.items():
        ends = [SIZE.search(name) for name in some]
        part = ", ".join(end.group(1) for end in ends if end)
        whole = len(some) == len(sizes[what]) or not part
        words.append(f"`{what}`" if whole else f"`{what}` ({part})")
    return ", ".join(words)
