"""The Markdown report, written from the JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import absent, plots, summary, targets, texts
from benchmarks.harness import AGAIN, Row
from benchmarks.models import ROOT
from benchmarks.remote import LOCAL, SERVERS
from benchmarks.rows import ALONE, ORDER, Rows, rows_of
from benchmarks.writing import number, spread, table

CALLED = ("C", "thin", "llama-cpp-python", "cyllama")
DECODED = ("C", "llama-cpp-python", "cyllama")
REUSED = ("pykvcache", "llama-cpp-python", "xllamacpp")
COUNTED = ("pykvcache", "llama-cpp-python", "cyllama")


def plain(rows: Iterable[Row], scale: float, base: str = "C") -> str:
    """Write rows: ours and its ratio with spread, the others as medians."""
    rows = list(rows)
    present = {who for row in rows for who in row.samples}
    others = [w for w in (*ORDER, "NumPy", "numpy", "array caches alone") if w in present]
    others = [w for w in others if w not in ("pykvcache", base)]
    lines = []
    for row in rows:
        line = [row.name, spread(row.samples.get("pykvcache", []), scale)]
        if base in present:
            line += [number(row.median(base) * scale), spread(row.ratios("pykvcache", base))]
        lines.append(line + [number(row.median(who) * scale) for who in others])
    header = ["", "pykvcache"] + ([base, f"pykvcache / {base}"] if base in present else [])
    return table(header + others, lines)


def calls(rows: Rows) -> str:
    """Write group 1."""
    from benchmarks.groups.calls import CALLS

    lines = []
    for what, empty in CALLS.items():
        row = rows.get(what)
        if row is None:
            continue
        over = targets.over_c(row, rows.get(empty))
        peers = [number(row.median(who) * 1e9) for who in CALLED]
        times = spread(row.ratios("llama-cpp-python", "pykvcache"))
        statement = row.notes.get("statement", {}).get("pykvcache", what).replace("\n", "; ")
        ours = spread(row.samples.get("pykvcache", []), 1e9)
        thin = spread(targets.over_thin(row), 1e9)
        lines.append([f"`{statement}`", ours, *peers, spread(over, 1e9), thin, times])
    header = ["ns per call", "pykvcache", *CALLED, "over C plus an empty method"]
    header += ["over thin", "llama-cpp-python / pykvcache"]
    empties = ", ".join(
        f"{number(row.median('pykvcache') * 1e9)} ns (`{row.notes['statement']['pykvcache']}`)"
        for name, row in rows.items()
        if name.startswith("empty")
    )
    decodes = [row for name, row in rows.items() if name.startswith("decode1")]
    extra = [
        [
            row.name,
            spread(row.samples.get("pykvcache", []), 1e6),
            *(number(row.median(who) * 1e6) for who in DECODED),
            spread(targets.differences(row, "pykvcache", "C"), 1e6),
            spread(targets.differences(row, AGAIN, "C"), 1e6),
        ]
        for row in decodes
    ]
    second = ["us per one-token decode", "pykvcache", *DECODED, "over C", f"{AGAIN}, over C"]
    return f"{table(header, lines)}\n\nEmpty methods: {empties}.\n\n{table(second, extra)}"


def prefix(rows: Rows) -> str:
    """Write group 3; the number of evaluated tokens comes first."""
    first = [row for name, row in rows.items() if name.startswith("first token")]
    lines = []
    for row in first:
        tokens = row.notes.get("evaluated", {})
        counts = sorted({int(n) for n in tokens.values()})
        ready = rows.get(row.name.replace("first token", "prefix there"))
        lines.append(
            [
                row.name.removeprefix("first token, "),
                " or ".join(f"{n:,}" for n in counts),
                spread(row.samples.get("pykvcache", []), 1e3),
                number(ready.median("pykvcache") * 1e3) if ready else "-",
                *(number(row.median(w) * 1e3) for w in ORDER[1:]),
            ]
        )
    head = ["way, shared tokens", "tokens evaluated", "pykvcache, ms", "of it: prefix there"]
    return table([*head, *ORDER[1:]], lines)


def counting(rows: Rows) -> str:
    """Write how far another thread counts, absolutely and relative to hashing."""
    base = rows.get("counting during hashing")
    lines = []
    for row in rows.values():
        if row.unit == "1/s":
            line = [row.name]
            for who in COUNTED:
                line.append(number(row.median(who) * 1e-6))
                pairs = zip(
                    row.samples.get(who, []),
                    base.samples.get(who, []) if base else [],
                    strict=False,
                )
                line.append(spread([a / b for a, b in pairs]))
            lines.append(line)
    head = [word for who in COUNTED for word in (who, "of hashing")]
    return table(["millions per second", *head], lines)


def grown(rows: Rows) -> str:
    """Write group 7: by cells, then by sequences; times, then rates."""
    parts = []
    for over in ("cell", "sequence"):
        for unit, scale, words in (("s", 1e6, "us"), ("tokens/s", 1, "tokens per second")):
            there = [r for r in rows.values() if r.unit == unit and over in r.name.split(", ")[-1]]
            if there:
                parts += [f"By {over}s, {words}:", plain(there, scale)]
    return "\n\n".join(parts)


def in_pairs(rows: Rows) -> str:
    """Write group 8: portable and native wheel with their ratio, then RPC servers."""
    scales = {"tokens/s": (1.0, "tokens/s"), "s": (1e3, "ms"), "bytes": (1e-6, "MB")}
    lines = []
    remote = []
    for row in rows.values():
        scale, unit = scales[row.unit]
        line = [f"{row.name}, {unit}"]
        if SERVERS in row.samples:
            line += [spread(row.samples.get(who, []), scale) for who in (SERVERS, LOCAL)]
            remote.append([*line, spread(row.ratios(SERVERS, LOCAL))])
            continue
        line += [spread(row.samples.get(who, []), scale) for who in ("portable", "native")]
        line += [spread(row.ratios(who, "native")) for who in ("portable", "native again")]
        lines.append(line)
    head = ["", "portable", "native", "portable / native", "native again / native"]
    second = table(["", SERVERS, LOCAL, "ratio"], remote)
    return table(head, lines) + (f"\n\n{second}" if remote else "")


def generated(rows: Rows) -> str:
    """Write group 9: rates of workloads, then times."""
    others = (ALONE, "llama-cpp-python", "xllamacpp")
    first, second = [], []
    for row in rows.values():
        scale = 1.0 if row.unit == "tokens/s" else 1e6
        line = [row.name, spread(row.samples.get("pykvcache", []), scale)]
        line.append(number(row.median("C") * scale))
        if row.unit == "tokens/s":
            line.append(spread(row.ratios("pykvcache", "C")))
            first.append(line + [number(row.median(who)) for who in others])
        else:
            over = spread(targets.differences(row, "pykvcache", "C"), 1e6)
            again = spread(targets.differences(row, AGAIN, "C"), 1e6)
            second.append([*line, over, again])
    head = ["tokens per second", "pykvcache", "C", "pykvcache / C", *others]
    last = ["us", "pykvcache", "C, the decode alone", "over C", f"{AGAIN}, over C"]
    return f"{table(head, first)}\n\n{table(last, second)}"


def tiered(rows: Rows) -> str:
    """Write group 10: times of first tokens, then the cost of writing and of slow tiers."""
    lines = []
    for row in rows.values():
        scale = {"s": 1e3, "ratio": 1.0}[row.unit]
        for who in row.samples or row.errors:
            name = row.name if who == "pykvcache" else f"{row.name}: {who}"
            figure = spread(row.samples[who], scale) if who in row.samples else row.errors[who]
            lines.append([name, figure])
    return table(["*compared with evaluating*: a ratio", "ms"], lines)


def reused(rows: Rows) -> str:
    """Write the tokens that each evaluated and the new ones, then the times."""
    lines = []
    for row in rows.values():
        if row.unit != "tokens":
            continue
        new = row.notes.get("ideal", {})
        total = max(row.notes.get("total", {"": 0}).values())
        line = [row.name, f"{total:,}"]
        for who in REUSED:
            if who in row.samples:
                line.append(f"{row.samples[who][0]:,.0f} ({new.get(who, 0):,})")
            else:
                line.append("-")
        lines.append(line)
    times = [
        [row.name, who, spread(values, 1e3)]
        for row in rows.values()
        if row.unit == "s"
        for who, values in row.samples.items()
    ]
    first = table(["tokens evaluated (new)", "of all prompts", *REUSED], lines)
    return first + "\n\n" + table(["", "", "ms"], times) if times else first


def served(rows: Rows) -> str:
    """Write both servers, and the same work without one."""
    scales = {"s": (1e3, "ms"), "bytes": (2**-20, "MiB")}
    lines = []
    for row in rows.values():
        scale, unit = scales.get(row.unit, (1, row.unit))
        alone = next((who for who in row.samples if who not in ("pykvcache", "xllamacpp")), "")
        sides = (spread(row.samples.get(who, []), scale) for who in ("pykvcache", "xllamacpp"))
        lines.append([f"{row.name}, {unit}", *sides, spread(row.samples.get(alone, []), scale)])
    return table(["", "pykvcache", "xllamacpp", "alone"], lines)


#: Marks around the README's table.
BEGIN, END = "<!-- python -m benchmarks.report writes this table -->", "<!-- end -->"

WRITERS: dict[str, Callable[[Rows], str]] = {
    "calls": calls,
    "throughput": lambda rows: plain(rows.values(), 1),
    "generate": generated,
    "prefix": prefix,
    "tiers": tiered,
    "state": lambda rows: (
        plain([r for r in rows.values() if r.unit == "bytes/s"], 1e-9) + "\n\n" + counting(rows)
    ),
    "arrays": lambda rows: plain(rows.values(), 1e6, base="NumPy"),
    "footprint": lambda rows: "\n\n".join(
        plain([r for r in rows.values() if r.unit == unit], scale, base)
        for unit, scale, base in (("bytes", 2**-10, "C"), ("s", 1e3, "numpy"))
    ),
    "growth": grown,
    "reuse": reused,
    "real": reused,
    "serve": served,
    "portable": in_pairs,
}


def rows_by_group(result: dict[str, Any]) -> dict[str, Rows]:
    """Return the rows of every measured group."""
    return {
        name: absent.explained(rows_of(result, name), result, name) for name in result["groups"]
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write the report, and next to it the page with all tables."""
    groups, rows = result["groups"], rows_by_group(result)
    parts = [texts.head(result)]
    if groups:
        parts += [summary.first_screen(rows), texts.details(result)]
    parts.append(texts.TAIL)
    save(parts, path)
    parts = [texts.tables_head()]
    if groups:
        lines = [verdict.line()[:3] for verdict in targets.judge(rows)]
        parts += ["## Targets", table(["target", "measured", ""], lines)]
    for name, writer in WRITERS.items():
        if name not in groups:
            continue
        title = groups[name]["title"]
        parts += [f"## {title[0].upper()}{title[1:]}", texts.GROUPS[name], writer(rows[name])]
        if name in texts.PLOTS:
            parts.append(f"![{title}](benchmarks/{name}.png)")
        missing = absent.listed(rows[name])
        if missing:
            parts.append(missing)
    if groups:
        parts.append(texts.machine(result))
    save(parts, path.with_name(f"{path.stem}-tables.md"))


def save(parts: Iterable[str], path: Path) -> None:
    """Write a page, with names as the report shows them."""
    text = "\n\n".join(parts)
    for name, shown in texts.SHOWN.items():
        text = text.replace(name, shown)
    path.write_text(text + "\n")


def write_readme(result: dict[str, Any], path: Path) -> None:
    """Put the table of a real model into README.md."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    text = summary.on_gemma(rows_by_group(result))
    path.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    """Rewrite the report from a JSON: ``python -m benchmarks.report docs/benchmarks.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("json", type=Path, help="the JSON of a run")
    path = parser.parse_args().json
    result = json.loads(path.read_text())
    write(result, path.with_suffix(".md"))
    if path.resolve().parent == ROOT / "docs":
        write_readme(result, ROOT / "README.md")
    plots.draw(result, path.parent / "benchmarks")


if __name__ == "__main__":
    main()
