"""The plots of the report, one PNG per group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from benchmarks.report import ORDER, Rows, rows_of

COLOURS = dict(zip(ORDER, ("#1f5fa8", "#555555", "#d9822b", "#5a9e4b", "#9a5fb0"), strict=True))
#: A rate in calls, bytes or tokens is drawn from zero; times spread over decades.
LOG = {"calls", "prefix", "growth"}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draw every group of the result that has a plot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    makers = {
        "calls": calls,
        "throughput": throughput,
        "prefix": prefix,
        "state": state,
        "growth": growth,
    }
    for name, maker in makers.items():
        rows = rows_of(result, name)
        if not rows:
            continue
        figure = maker(plt, rows)
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)


def bars(axis: Any, rows: list[Row], labels: list[str], scale: float, who: tuple[str, ...]) -> None:
    """Draw grouped bars with whiskers from the lowest to the highest sample."""
    there = [w for w in who if any(w in row.samples for row in rows)]
    width = 0.8 / max(1, len(there))
    for k, name in enumerate(there):
        at = [i + (k - (len(there) - 1) / 2) * width for i in range(len(rows))]
        middle = [row.median(name) * scale for row in rows]
        low = [m - min(r.samples.get(name, [0])) * scale for m, r in zip(middle, rows, strict=True)]
        high = [
            max(r.samples.get(name, [0])) * scale - m for m, r in zip(middle, rows, strict=True)
        ]
        whiskers = [[max(0.0, v) for v in side] for side in (low, high)]
        axis.bar(
            at,
            middle,
            width,
            label=name,
            color=COLOURS.get(name),
            yerr=whiskers,
            error_kw={"lw": 0.7, "ecolor": "#00000080"},
        )
    axis.set_xticks(range(len(rows)), labels, rotation=30, ha="right")
    axis.grid(axis="y", lw=0.3)


def above(axis: Any, title: str) -> None:
    """Put the title, and the legend under it, above the bars."""
    axis.set_title(title, loc="left", pad=20)
    axis.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 0.99))


def calls(plt: Any, rows: Rows) -> Any:
    """Nanoseconds per call, logarithmic."""
    names = [n for n in rows if not n.startswith(("empty", "decode1")) and n != "batch512_new"]
    figure, axis = plt.subplots(figsize=(9, 3.6))
    bars(axis, [rows[n] for n in names], names, 1e9, ORDER)
    axis.set_yscale("log")
    axis.set_ylabel("ns per call")
    above(axis, "One call (less is better)")
    return figure


def throughput(plt: Any, rows: Rows) -> Any:
    """Tokens per second, one panel per model and kind."""
    panels = [(kind, model) for kind in ("decode", "prefill") for model in ("stories", "30M")]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for axis, (kind, model) in zip(axes.flat, panels, strict=True):
        names = [n for n in rows if n.startswith(f"{kind}, {model}")]
        labels = [n.split(", ", 2)[2].replace(" parallel", " seq") for n in names]
        bars(axis, [rows[n] for n in names], labels, 1, ORDER)
        axis.set_title(f"{kind}, {model} model (more is better)")
        axis.set_ylabel("tokens per second")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, ncols=5, loc="outside lower center")
    return figure


def prefix(plt: Any, rows: Rows) -> Any:
    """Milliseconds to the first token by length of the shared prefix."""
    figure, axis = plt.subplots(figsize=(9, 3.8))
    names = [n for n in rows if n.startswith("first token")]
    bars(
        axis, [rows[n] for n in names], [n.removeprefix("first token, ") for n in names], 1e3, ORDER
    )
    axis.set_yscale("log")
    axis.set_ylabel("ms to the first token")
    above(axis, "First token after a shared prefix (less is better)")
    return figure


def state(plt: Any, rows: Rows) -> Any:
    """GB/s of copies and of files, one panel per size."""
    names = [n for n in rows if rows[n].unit == "bytes/s"]
    sizes = list(dict.fromkeys(n.rpartition(", ")[2] for n in names))
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(11, 6), constrained_layout=True, squeeze=False
    )
    for column, size in enumerate(sizes):
        for axis, files in zip(axes[:, column], (False, True), strict=True):
            there = [n for n in names if n.endswith(f", {size}") and n.startswith("file_") is files]
            bars(axis, [rows[n] for n in there], [n.split(", ")[0] for n in there], 1e-9, ORDER)
            axis.set_title(f"{'files' if files else 'in memory'}, {size} (more is better)")
            axis.set_ylabel("GB/s")
    handles, words = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, words, frameon=False, ncols=5, loc="outside lower center")
    return figure


def growth(plt: Any, rows: Rows) -> Any:
    """Lines over cells and over sequences, both logarithmic."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), constrained_layout=True)
    kinds = (
        ("cells", "s", 1e6, "us"),
        ("sequences", "s", 1e6, "us"),
        ("sequences", "tokens/s", 1, "tokens/s"),
    )
    for axis, (over, unit, scale, label) in zip(axes, kinds, strict=True):
        found: dict[str, list[tuple[int, Row]]] = {}
        for name, row in rows.items():
            what, _, size = name.rpartition(", ")
            if size.endswith(over) and row.unit == unit:
                found.setdefault(what, []).append((int(size.split()[0]), row))
        for k, (what, points) in enumerate(found.items()):
            for who, style in (("pykvcache", "-o"), ("C", ":")):
                known = [(x, row.median(who) * scale) for x, row in points if who in row.samples]
                if known:
                    text = what if who == "pykvcache" else None
                    axis.plot(*zip(*known, strict=True), style, ms=3, color=f"C{k}", label=text)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(over)
        axis.set_ylabel(label)
        axis.grid(lw=0.3)
        axis.legend(frameon=False, fontsize=6, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    figure.suptitle("Growth: pykvcache (line), C (dotted)")
    return figure
