"""The plots of the report, one PNG per group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import Row
from benchmarks.rows import ORDER, Rows, rows_of

COLOURS = dict(zip(ORDER, ("#1f5fa8", "#555555", "#d9822b", "#5a9e4b", "#9a5fb0"), strict=True))
COLOURS["thin"] = "#b0b0b0"


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draw the plots of all groups that have one."""
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
    """Draw grouped bars with whiskers from minimum to maximum."""
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
    axis.set_xticks(range(len(rows)), labels, rotation=30, ha="right", rotation_mode="anchor")
    axis.grid(axis="y", lw=0.3)


def above(axis: Any, title: str) -> None:
    """Put title and legend above the bars."""
    axis.set_title(title, loc="left", pad=20)
    axis.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 0.99))


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, one to three per decade."""
    import matplotlib.ticker as ticks

    axis.set_major_locator(ticks.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(ticks.NullFormatter())


def legend_below(figure: Any) -> None:
    """Put a common legend under all panels."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        handles, names = axis.get_legend_handles_labels()
        found.update(zip(names, handles, strict=True))
    names = [name for name in COLOURS if name in found]
    figure.legend(
        [found[name] for name in names],
        names,
        frameon=False,
        ncols=6,
        loc="outside lower center",
    )


def calls(plt: Any, rows: Rows) -> Any:
    """Draw nanoseconds per call, logarithmic: queries and moves above, tokens and logits below."""
    names = [n for n in rows if not n.startswith(("empty", "decode1"))]
    tokens = [n for n in names if n.startswith(("batch", "logits"))]
    parts = [part for part in ([n for n in names if n not in tokens], tokens) if part]
    figure, axes = plt.subplots(
        len(parts), 1, figsize=(9, 6), constrained_layout=True, squeeze=False
    )
    who = (*ORDER[:2], "thin", *ORDER[2:])
    for axis, part in zip(axes.flat, parts, strict=True):
        bars(axis, [rows[n] for n in part], part, 1e9, who)
        axis.set_yscale("log")
        axis.set_ylabel("ns per call")
        axis.set_title("One call (less is better)", loc="left")
    legend_below(figure)
    return figure


def throughput(plt: Any, rows: Rows) -> Any:
    """Draw tokens per second, one panel per model and kind."""
    panels = [(kind, model) for kind in ("decode", "prefill") for model in ("stories", "30M")]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), constrained_layout=True)
    for axis, (kind, model) in zip(axes.flat, panels, strict=True):
        names = [n for n in rows if n.startswith(f"{kind}, {model}")]
        labels = [n.split(", ", 2)[2].replace(" parallel", " seq") for n in names]
        bars(axis, [rows[n] for n in names], labels, 1, ORDER)
        axis.set_title(f"{kind}, {model} model (more is better)")
        axis.set_ylabel("tokens per second")
    legend_below(figure)
    return figure


def prefix(plt: Any, rows: Rows) -> Any:
    """Draw milliseconds to the first token by length of the shared prefix."""
    figure, axis = plt.subplots(figsize=(9, 3.8))
    names = [n for n in rows if n.startswith("first token")]
    bars(
        axis, [rows[n] for n in names], [n.removeprefix("first token, ") for n in names], 1e3, ORDER
    )
    axis.set_yscale("log")
    plain_numbers(axis.yaxis)
    axis.set_ylabel("ms to the first token")
    above(axis, "First token after a shared prefix (less is better)")
    return figure


def state(plt: Any, rows: Rows) -> Any:
    """Draw GB/s of copies and files, one panel per size."""
    names = [n for n in rows if rows[n].unit == "bytes/s" and n.endswith(" MiB")]
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
    legend_below(figure)
    return figure


def growth(plt: Any, rows: Rows) -> Any:
    """Draw lines over cells and over sequences, logarithmic: times left, rates right."""
    figure, axes = plt.subplots(
        2, 2, figsize=(11, 8.5), constrained_layout=True, width_ratios=(1.25, 1)
    )
    for line, over in zip(axes, ("cell", "sequence"), strict=True):
        for axis, unit, scale in zip(line, ("s", "tokens/s"), (1e6, 1), strict=True):
            found: dict[str, list[tuple[int, Row]]] = {}
            for name, row in rows.items():
                what, _, size = name.rpartition(", ")
                if size.rstrip("s").endswith(over) and row.unit == unit:
                    found.setdefault(what, []).append((int(size.split()[0]), row))
            lines(axis, {what: points for what, points in found.items() if len(points) > 1}, scale)
            axis.set_xlabel(f"{over}s")
            axis.set_ylabel("us per call (less is better)" if unit == "s" else "tokens per second")
    figure.suptitle("Growth: pykvcache (line, dots), C (dotted)")
    return figure


def lines(axis: Any, found: dict[str, list[tuple[int, Row]]], scale: float) -> None:
    """Draw a line per measurement, ours and C's in the same colour."""
    import matplotlib.ticker as ticks

    colours = [f"C{k}" for k in range(10)] + ["black", "gold", "navy", "lime"]
    sizes = sorted({x for points in found.values() for x, _ in points})
    for colour, (what, points) in zip(colours, found.items(), strict=False):
        for who, style in (("pykvcache", "-o"), ("C", ":")):
            known = [(x, row.median(who) * scale) for x, row in points if who in row.samples]
            if known:
                label = what if who == "pykvcache" else None
                axis.plot(*zip(*known, strict=True), style, ms=3, color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [f"{x:,}" for x in sizes])
    axis.xaxis.set_minor_locator(ticks.NullLocator())
    if scale == 1:
        plain_numbers(axis.yaxis)
    axis.grid(lw=0.3)
    axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
