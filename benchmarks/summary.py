"""The first screen of the report: what most readers want to know, one line each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import targets
from benchmarks.rows import Rows
from benchmarks.writing import number, table

WHO = ("pykvcache", "C", "llama-cpp-python", "cyllama")


class Figure(NamedTuple):
    """One line: a row of a group, how it is called and in what unit."""

    text: str
    group: str
    row: str
    scale: float


FIGURES = (
    Figure("highest position of a sequence, ns", "calls", "pos_max", 1e9),
    Figure("copy of a sequence of 16 tokens, ns", "calls", "copy", 1e9),
    Figure("its removal, ns", "calls", "remove", 1e9),
    Figure("logits of a token, ns", "calls", "logits", 1e9),
    Figure("batch of 512 tokens from an array, ns", "calls", "batch512", 1e9),
    Figure("decode of one token, 4 MB model, us", "calls", "decode1, stories, 1 thread", 1e6),
    Figure(
        "16 sequences in one decode, 60 MB model, 2 threads, tokens/s",
        "throughput",
        "decode, 30M, 16 parallel, 2 threads",
        1,
    ),
    Figure("first token, 4,096 tokens evaluated, ms", "prefix", "first token, cold, 4096", 1e3),
    Figure("the same from a fork, ms", "prefix", "first token, fork, 4096", 1e3),
    Figure("the same from a state in memory, ms", "prefix", "first token, memory, 4096", 1e3),
    Figure("the same from a file, ms", "prefix", "first token, file, 4096", 1e3),
    Figure("state of 64 MiB into a buffer, GB/s", "state", "save, 64 MiB", 1e-9),
)


def compared(rows: dict[str, Rows]) -> str:
    """Write the medians of the chosen rows, side by side."""
    lines = []
    for figure in FIGURES:
        row = rows.get(figure.group, {}).get(figure.row)
        if row is not None:
            lines.append([figure.text, *(number(row.median(who) * figure.scale) for who in WHO)])
    return table(["", *WHO], lines)


def judged(rows: dict[str, Rows]) -> str:
    """Write every target with its figure alone; the whole of it stands further below."""
    lines = [
        [verdict.text, verdict.figure.split(";")[0], verdict.line()[2]]
        for verdict in targets.judge(rows)
    ]
    return table(["target", "measured", ""], lines)


def first_screen(rows: dict[str, Rows]) -> str:
    """Write both tables."""
    return (
        f"{compared(rows)}\n\nMedians; a dash is explained in the part that the line is from. "
        f"What was aimed at:\n\n{judged(rows)}"
    )
