"""The first screen of the report: the main figures, one line each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import targets
from benchmarks.rows import Rows
from benchmarks.writing import number, table

WHO = ("pykvcache", "C", "llama-cpp-python", "cyllama")


class Figure(NamedTuple):
    """One line: text, group, row and unit scale."""

    text: str
    group: str
    row: str
    scale: float


FIGURES = (
    Figure("highest position of a sequence, ns", "calls", "pos_max", 1e9),
    Figure("copy of a sequence of 16 tokens, ns", "calls", "copy", 1e9),
    Figure("removal of a sequence of 16 tokens, ns", "calls", "remove", 1e9),
    Figure("logits of a token, ns", "calls", "logits", 1e9),
    Figure("batch of 512 tokens from an array, ns", "calls", "batch512", 1e9),
    Figure("decode of one token, 4 MB model, us", "calls", "decode1, stories, 1 thread", 1e6),
    Figure(
        "16 sequences in one decode, 60 MB model, 2 threads, tokens/s",
        "throughput",
        "decode, 30M, 16 parallel, 2 threads",
        1,
    ),
    Figure(
        "TTFT, prefix of 4,096 + 16, nothing cached, ms", "prefix", "first token, cold, 4096", 1e3
    ),
    Figure("TTFT, same prefix forked, ms", "prefix", "first token, fork, 4096", 1e3),
    Figure("TTFT, same prefix from a state in RAM, ms", "prefix", "first token, memory, 4096", 1e3),
    Figure("TTFT, same prefix from a file, ms", "prefix", "first token, file, 4096", 1e3),
    Figure("copy of a state of 64 MiB to a buffer, GB/s", "state", "save, 64 MiB", 1e-9),
)


def compared(rows: dict[str, Rows]) -> str:
    """Write the medians of the chosen rows."""
    lines = []
    for figure in FIGURES:
        row = rows.get(figure.group, {}).get(figure.row)
        if row is not None:
            lines.append([figure.text, *(number(row.median(who) * figure.scale) for who in WHO)])
    return table(["", *WHO], lines)


def judged(rows: dict[str, Rows]) -> str:
    """Write every target with its main figure, and why it is missed if it is."""
    verdicts = targets.judge(rows)
    lines = [[one.text, one.figure.split(";")[0], one.line()[2]] for one in verdicts]
    reasons = [f"- **{one.text}**: {one.line()[3]}" for one in verdicts if one.line()[3]]
    parts = [table(["target", "measured", ""], lines)]
    if reasons:
        parts += ["Why targets are missed:", "\n".join(reasons)]
    return "\n\n".join(parts)


def first_screen(rows: dict[str, Rows]) -> str:
    """Write both tables."""
    return (
        f"{compared(rows)}\n\nMedians. TTFT is the time to first token. "
        "[All tables](benchmarks-tables.md) have every row, with the reason for each dash.\n\n"
        f"## Targets\n\n{judged(rows)}"
    )
