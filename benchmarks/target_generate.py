"""Targets of generating many sequences at once."""

from __future__ import annotations

import re
import statistics

from benchmarks.harness import AGAIN, Row
from benchmarks.verdicts import US, Rows, Verdict, least, medians, span, worst_of

SERVER = "xllamacpp"
#: Allowed time of a step over the bare decode, in microseconds: fixed, and per sequence.
STEP, EACH = 10.0, 2.0
#: Allowed slowdown of a busy sequence by idle cells.
IDLE = 1.05
#: Microseconds.
FORK, SYNC = 300.0, 20.0


def beyond(row: Row, who: str, other: str) -> list[float]:
    """Return, per round, the time of one contestant minus another's, in microseconds."""
    pairs = zip(row.samples.get(who, []), row.samples.get(other, []), strict=False)
    return [(a - b) * 1e6 for a, b in pairs]


def step(groups: dict[str, Rows]) -> Verdict:
    """At most 10 us and 2 us per sequence over the bare decode of the same batch in C."""
    text = f"a generator's step: at most {STEP:.0f} us + {EACH:.0f} us per sequence over C's decode"
    words = []
    for name, row in groups.get("generate", {}).items():
        found = re.match(r"step of (\d+), (.*)", name)
        over = beyond(row, US, "C")
        if found is None or not over:
            continue
        limit = STEP + EACH * int(found[1])
        itself = [abs(x) for x in beyond(row, AGAIN, "C")]
        noise = f", C against C {statistics.median(itself):.0f}" if itself else ""
        many = "" if found[1] == "1" else "s"
        said = f"{found[1]} sequence{many} ({found[2]}): {span(over, 'us', 0)}, "
        said += f"limit {limit:.0f}{noise}"
        words.append((statistics.median(over) - limit, said))
    if not words:
        return Verdict("step", text, "-", None)
    words.sort(reverse=True)
    figure = "; ".join(said for _, said in words)
    return Verdict("step", text, figure, words[0][0] <= 0)


def together(groups: dict[str, Rows]) -> Verdict:
    """At least 0.97 of the C program with the same batches and sampling."""
    text = "8 and 16 sequences at once: at least 0.97 of C with the same batches and sampling"
    rows = {n: r for n, r in groups.get("generate", {}).items() if n.endswith(" at once")}
    found = {name: row.ratios(US, "C") for name, row in rows.items() if row.ratios(US, "C")}
    if not found:
        return Verdict("together", text, "-", None)
    values = medians(found)
    figure = worst_of(found, least(values), "", 3, "workloads")
    figure += "".join(f"; {name} {span(ratios, '', 3)}" for name, ratios in found.items())
    other = {name: row.ratios(AGAIN, "C") for name, row in rows.items() if row.ratios(AGAIN, "C")}
    if other:
        own = medians(other).values()
        figure += f"; C against C {min(own):.3f} to {max(own):.3f}"
    return Verdict("together", text, figure, min(values.values()) >= 0.97)


def server(groups: dict[str, Rows]) -> Verdict:
    """At least twice xllamacpp's server."""
    text = f"8 and 16 sequences at once: at least twice {SERVER}'s server"
    rows = groups.get("generate", {})
    found = {name: row.ratios(US, SERVER) for name, row in rows.items() if row.ratios(US, SERVER)}
    if not found:
        return Verdict("server", text, "-", None)
    values = medians(found)
    figure = worst_of(found, least(values), "times", 2, "workloads")
    loop = {name: ratios for name in found if (ratios := rows[name].ratios("C", SERVER))}
    if loop:
        by_c = medians(loop).values()
        figure += f"; C's own loop {min(by_c):.2f} to {max(by_c):.2f} times"
    return Verdict("server", text, figure, min(values.values()) >= 2)


def idle(groups: dict[str, Rows]) -> Verdict:
    """At most 1.05 of the time alone, after idle sequences were parked and cells moved down."""
    text = f"a busy sequence next to 8,000 idle cells: at most {IDLE} of the time alone"
    rows = groups.get("generate", {})
    alone = rows.get("the same alone")
    parked = next((row for name, row in rows.items() if name.startswith("token next to")), None)
    if alone is None or parked is None or not alone.samples or not parked.samples:
        return Verdict("idle", text, "-", None)
    ratios = [a / b for a, b in zip(parked.samples[US], alone.samples[US], strict=True)]
    first = rows.get("the same at first")
    figure = span(ratios, "", 3)
    if first is not None and first.samples:
        before = [a / b for a, b in zip(first.samples[US], alone.samples[US], strict=True)]
        figure += f"; before they are parked {span(before, '', 2)}"
    return Verdict("idle", text, figure, statistics.median(ratios) <= IDLE)


def fork(groups: dict[str, Rows]) -> Verdict:
    """At most 0.3 ms for 4,096 tokens."""
    return _edit(
        groups, "fork", f"`LlamaSequence.fork` of 4,096 tokens: at most {FORK:.0f} us", FORK
    )


def sync(groups: dict[str, Rows]) -> Verdict:
    """At most 20 us for 4,096 unchanged tokens."""
    return _edit(
        groups,
        "sync",
        f"`LlamaSequence.sync` to 4,096 unchanged tokens: at most {SYNC:.0f} us",
        SYNC,
    )


def _edit(groups: dict[str, Rows], what: str, text: str, limit: float) -> Verdict:
    row = groups.get("generate", {}).get(f"{what} of 4,096 tokens")
    if row is None or not row.samples:
        return Verdict(f"edit_{what}", text, "-", None)
    ours = [seconds * 1e6 for seconds in row.samples[US]]
    return Verdict(f"edit_{what}", text, span(ours, "us", 1), statistics.median(ours) <= limit)
