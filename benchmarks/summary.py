"""The first screen of the report: the main figures, one line each."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import targets
from benchmarks.rows import Rows
from benchmarks.writing import number, table

WHO = ("pykvcache", "C", "llama-cpp-python", "cyllama")


class Figure(NamedTuple):
    """One line: text, group, row and unit scale; `note` is what to show in place of samples."""

    text: str
    group: str
    row: str
    scale: float
    note: str = ""


FIGURES = (
    Figure("highest position of a sequence, ns", "calls", "pos_max", 1e9),
    Figure("copy of a sequence of 16 tokens, ns", "calls", "copy", 1e9),
    Figure("removal of a sequence of 16 tokens, ns", "calls", "remove", 1e9),
    Figure("logits of a token, ns", "calls", "logits", 1e9),
    Figure("batch of 512 tokens from an array, ns", "calls", "batch512", 1e9),
    Figure("decode of one token, story model, us", "calls", "decode1, stories, 1 thread", 1e6),
    Figure(
        "16 sequences in one decode, 30M model, 2 threads, tokens/s",
        "throughput",
        "decode, 30M, 16 parallel, 2 threads",
        1,
    ),
    Figure(
        "TTFT, 30M model, prefix of 4,096 + 16, nothing cached, ms",
        "prefix",
        "first token, cold, 4096",
        1e3,
    ),
    Figure("TTFT, same prefix forked, ms", "prefix", "first token, fork, 4096", 1e3),
    Figure("TTFT, same prefix from a state in RAM, ms", "prefix", "first token, memory, 4096", 1e3),
    Figure("TTFT, same prefix from a file, ms", "prefix", "first token, file, 4096", 1e3),
    Figure(
        "copy of a state of 64 MiB to a buffer, story model, GB/s", "state", "save, 64 MiB", 1e-9
    ),
)


#: Contestants on a real model; xllamacpp runs llama-server.
SERVERS = {
    "pykvcache": "pykvcache",
    "xllamacpp": "llama-server",
    "llama-cpp-python": "llama-cpp-python",
}
_OVER = "another question over 3,200 tokens, 20 MiB"
_FOLDER = "another question over 1,500 tokens, a folder of 24 MiB"
_CHATS = "chat, 16 sessions of 3 turns"
_TURN = "chat, save, load, take back a turn, 5 new tokens"
_GEMMA = "Gemma 3 270M: "
_BELOW = (
    "llama-server was restarted without saved slots, so it evaluates the prompt again. Where "
    "the table is blank, nothing was measured."
)
#: {total} and {ideal} are notes of the row.
ON_GEMMA = (
    Figure(
        "16 chats of 3 turns: tokens evaluated, out of {total} in all prompts "
        "({ideal} of them are new, the minimum)",
        "real",
        _CHATS,
        1,
    ),
    Figure("the same chats: size of the cache afterwards, MB", "real", _CHATS, 1e-6, "bytes"),
    Figure(
        "new question about a document of 3,200 tokens, cache of 20 MiB: "
        "tokens evaluated, out of {total}",
        "real",
        _OVER,
        1,
    ),
    Figure(
        "new question after a restart, folder of 24 MiB: tokens evaluated, out of {total}",
        "real",
        _FOLDER,
        1,
    ),
    Figure(
        "chat after a restart, last turn replaced: tokens evaluated, out of {total}",
        "real",
        _TURN,
        1,
    ),
    Figure(
        "server, 16 shorter chats of 6 turns: tokens evaluated ({ideal} are new, the minimum)",
        "serve",
        f"{_GEMMA}16 chats of 6 turns, with memory for it",
        1,
    ),
    Figure(
        "server, TTFT for a prompt of 3,000 tokens that was evaluated before a restart, ms",
        "serve",
        f"{_GEMMA}first token of 3,000 known ones after a restart",
        1e3,
    ),
    Figure(
        "server, TTFT for a prompt of 64 uncached tokens, ms",
        "serve",
        f"{_GEMMA}first token of 64 new ones",
        1e3,
    ),
    Figure("server, 16 clients: tokens/s", "serve", f"{_GEMMA}16 clients, 64 tokens each", 1),
)


def on_gemma(rows: dict[str, Rows]) -> str:
    """Write what prompts cost on a real model; README.md has the same table."""
    lines = []
    for figure in ON_GEMMA:
        row = rows.get(figure.group, {}).get(figure.row)
        if row is None:
            continue
        notes = {name: f"{of.get('pykvcache', 0):,}" for name, of in row.notes.items()}
        of = (
            row.notes[figure.note] if figure.note else {who: row.median(who) for who in row.samples}
        )
        form = "{:,.0f}".format if row.unit == "tokens" and not figure.note else number
        shown = (form(of[who] * figure.scale) if who in of else "" for who in SERVERS)
        lines.append([figure.text.format(**notes), *shown])
    head = ["Gemma 3 270M (Q4_K_M)", *SERVERS.values()]
    return f"{table(head, lines)}\n\n{_BELOW}" if lines else ""


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
    # The worst figure comes first.
    lines = [[one.text, one.figure.split(";")[0], one.line()[2]] for one in verdicts]
    reasons = [f"- **{one.text}**: {one.line()[3]}" for one in verdicts if one.line()[3]]
    parts = [table(["target", "measured", ""], lines)]
    if reasons:
        parts += ["Why targets are missed:", "\n".join(reasons)]
    return "\n\n".join(parts)


def first_screen(rows: dict[str, Rows]) -> str:
    """Write both tables."""
    return (
        f"{on_gemma(rows)}\n\n{compared(rows)}\n\nMedians. TTFT is the time to first token. "
        "[All tables](benchmarks-tables.md) have every row, with the reason for each dash.\n\n"
        f"## Targets\n\n{judged(rows)}"
    )
