"""Formatting of numbers and tables in the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def number(value: float) -> str:
    """Write a number with about three digits."""
    if math.isnan(value):
        return "-"
    size = abs(value)
    if 0 < size < 0.1:
        return f"{value:.2g}" if size >= 1e-4 else f"{value:.6f}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def spread(values: list[float], scale: float = 1) -> str:
    """Write the median with minimum and maximum."""
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{number(middle * scale)} ({number(low * scale)} to {number(high * scale)})"


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table; the first column is text, the others numbers."""
    head = list(header)
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *map(list, lines)])
