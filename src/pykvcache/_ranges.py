"""Ranges of integers, mostly of tokens: union, gaps, and where a memory can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

__all__ = ["Range", "deepest", "gaps", "overlaps", "union"]

#: A half-open range.
Range: TypeAlias = tuple[int, int]


def union(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges, in order."""
    found: list[Range] = []
    for first, last in sorted(one for one in ranges if one[0] < one[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def overlaps(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Return the intersection of two lists of ranges."""
    seen = list(others)
    return [
        (max(a, first), min(b, last))
        for a, b in some
        for first, last in seen
        if a < last and first < b
    ]


def gaps(covered: Iterable[Range], end: int) -> list[Range]:
    """Return the ranges before an end that are not covered, in order."""
    found: list[Range] = []
    at = 0
    for first, last in sorted(covered):
        if at >= end:
            return found
        if first > at:
            found.append((at, min(first, end)))
        at = max(at, last)
    return [*found, (at, end)] if at < end else found


def deepest(
    limit: int,
    windows: Iterable[Range],
    states: Iterable[int],
    *,
    window_start: Callable[[int], int] | None,
    needs_state: bool,
) -> int:
    """Return the largest number of tokens, up to a limit, at which a memory can be resumed.

    Parameters
    ----------
    limit
        Number of tokens with attention cells.
    windows
        Ranges of tokens with window cells.
    states
        Numbers of tokens after which a recurrent state exists.
    window_start
        Returns the first token whose window cells are needed to resume after n tokens; None if the
        memory has no window.
    needs_state
        Whether the memory can be resumed only at states.
    """
    places = sorted((n for n in states if n <= limit), reverse=True)
    if window_start is None:
        return next(iter(places), 0) if needs_state else limit
    missing = gaps(windows, limit)
    if needs_state:
        for n in places:
            begin = window_start(n)
            if not any(first < n and last > begin for first, last in missing):
                return n
        return 0
    # Resume at or before the gap's start, or far enough after its end.
    while missing and limit:
        first, last = missing.pop()
        if window_start(limit) < last:
            limit = first
    return limit
