"""Rows of a result's JSON."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Row

ORDER = ("pykvcache", "C", "llama-cpp-python", "cyllama", "xllamacpp")
#: Ours without batching: one request after the other.
ALONE = "one by one"
Rows = dict[str, Row]


def rows_of(result: dict[str, Any], group: str) -> Rows:
    """Return the rows of a group by name."""
    found = {}
    for row in result["groups"].get(group, {}).get("rows", []):
        notes = row.get("notes", {})
        found[row["name"]] = Row(row["name"], row["unit"], row["samples"], row["errors"], notes)
    return found
