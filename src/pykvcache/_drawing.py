"""Figures of a context's contents, and bars and tables for notebooks.

Figures need matplotlib (extra ``plot``), without pyplot, so no global state changes. Bars and
tables are SVG and HTML that need no library.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvcache.errors import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pykvcache.introspection import CellTable
    from pykvcache.prefix.tree_view import TreeNode

__all__ = [
    "bar_html",
    "draw_cells",
    "draw_history",
    "draw_norms",
    "draw_tree",
    "figure_svg",
    "new_figure",
    "table_html",
]

Ints = npt.NDArray[np.integer[Any]]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: {how_to_install('plot')}") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    # For notebooks without pyplot.
    setattr(figure, "_repr_svg_", lambda: figure_svg(figure))  # noqa: B010
    return figure


def figure_svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element."""
    out = io.StringIO()
    options: dict[str, Any] = {"metadata": {"Date": None}}
    figure.savefig(out, format="svg", **options)
    text = out.getvalue()
    return text[text.index("<svg") :]


# Cells --------------------------------------------------------------------------------------------

SHARED, FREE = "0.35", "0.93"
#: Colours of sequences, repeated after ten.
COLORS = (*(f"C{i}" for i in range(7)), "C8", "C9", "C6")


def _color_of(seq_id: int) -> str:
    """Return the colour of a sequence's unshared cells."""
    return COLORS[seq_id % len(COLORS)]


def draw_cells(table: CellTable, n_streams: int, n_cells: int, title: str) -> Figure:
    """Draw a table of cells: above by sequence and position, below in memory order."""
    held = np.flatnonzero(table.members.any(axis=0))
    is_shared = table.members.sum(axis=1) > 1
    owners = np.where(is_shared, -1, table.members.argmax(axis=1) if len(table) else 0)
    n_rows, n_streams = max(len(held), 1), max(n_streams, 1)
    figure = new_figure(9, 1.9 + 0.22 * min(len(held), 24) + 0.18 * min(n_streams, 24))
    heights = [max(1.0, 0.4 * min(len(held), 24)), max(0.5, 0.25 * min(n_streams, 24))]
    above, below = figure.subplots(2, 1, height_ratios=heights)
    for row, seq_id in enumerate(held):
        mine = table.members[:, seq_id]
        _draw_row(above, row, table.pos[mine], owners[mine])
    above.set_yticks(range(len(held)), [str(seq_id) for seq_id in held])
    above.set(xlabel="position", ylabel="sequence", title=title, ylim=(n_rows - 0.4, -0.6))
    if not len(held):
        above.text(0.5, 0.5, "no sequence holds anything", ha="center", transform=above.transAxes)
    for row in range(n_streams):
        here = table.stream == row
        below.broken_barh([(-0.5, n_cells)], (row - 0.4, 0.8), facecolors=FREE)
        _draw_row(below, row, table.cell[here], owners[here])
    below.set_yticks(range(n_streams))
    below.set(xlabel="cell", ylabel="stream", xlim=(-0.5, max(n_cells, 1) - 0.5))
    below.set_ylim(n_streams - 0.4, -0.6)
    own = _color_of(int(held[0]) if len(held) else 0)
    _explain_cells(figure, own, bool(is_shared.any()))
    return figure


def _draw_row(axes: Axes, row: int, places: Ints, owners: Ints) -> None:
    """Draw cells at their places, neighbours of one owner as one bar; -1 owns shared cells."""
    if not len(places):
        return
    order = np.argsort(places, kind="stable")
    places, owners = places[order], owners[order]
    cuts = np.flatnonzero((np.diff(places) > 1) | (np.diff(owners) != 0)) + 1
    for run in np.split(np.arange(len(places)), cuts):
        begin, end, owner = int(places[run[0]]), int(places[run[-1]]) + 1, int(owners[run[0]])
        color = SHARED if owner < 0 else _color_of(owner)
        axes.broken_barh([(begin - 0.5, end - begin)], (row - 0.4, 0.8), facecolors=color)


def _explain_cells(figure: Figure, own: str, is_shared: bool) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=own, label="held by one sequence (each has its colour)")]
    if is_shared:
        patches.append(Patch(color=SHARED, label="shared by several"))
    patches.append(Patch(color=FREE, label="free"))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)


def draw_history(
    seconds: Sequence[float],
    own: Sequence[dict[int, int]],
    shared: Sequence[int],
    n_cells: int,
) -> Figure:
    """Draw the cells of each sequence, shared cells and free cells over time, stacked."""
    figure = new_figure(9, 3.4)
    axes = figure.subplots()
    ids = sorted({seq_id for sample in own for seq_id in sample})
    areas = [shared, *([sample.get(seq_id, 0) for sample in own] for seq_id in ids)]
    labels = ["shared", *(f"sequence {seq_id}" for seq_id in ids)]
    colors = [SHARED, *map(_color_of, ids)]
    if len(seconds):
        axes.stackplot(seconds, *areas, labels=labels, colors=colors, step="post")
    axes.axhline(n_cells, color="0.2", linewidth=1, linestyle=":")
    axes.set_facecolor(FREE)
    axes.set(xlabel="seconds", ylabel="cells in use", ylim=(0, n_cells * 1.05))
    axes.set_title(f"{n_cells} cells over time")
    if len(seconds) and len(labels) <= 12:
        figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize="small")
    return figure


# Keys and values ----------------------------------------------------------------------------------


def draw_norms(
    positions: npt.NDArray[np.int32],
    layers: Sequence[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]],
    title: str,
) -> Figure:
    """Draw the norms of keys and values; a row for each head of each layer.

    ``layers`` are (layer, keys, values) of shape (tokens, heads, width).
    """
    figure = new_figure(10, 1.6 + min(6.0, 0.14 * sum(k.shape[1] for _, k, _ in layers)))
    panels = figure.subplots(1, 2, sharey=True)
    given = (("keys", [k for _, k, _ in layers]), ("values", [v for _, _, v in layers]))
    for axes, (name, arrays) in zip(panels, given, strict=True):
        rows = [np.linalg.norm(array.astype(np.float32), axis=-1).T for array in arrays]
        grid = np.concatenate(rows) if rows else np.zeros((0, len(positions)))
        image = axes.imshow(grid, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axes, label=f"norm of {name}")
        axes.set(title=f"{title}: {name}", xlabel="token")
        edges = np.cumsum([0] + [len(row) for row in rows])
        for edge in edges[1:-1]:
            axes.axhline(edge - 0.5, color="white", linewidth=0.8)
        middles = (edges[:-1] + edges[1:] - 1) / 2
        every = max(1, len(layers) // 16)
        axes.set_yticks(middles[::every], [str(layer) for layer, _, _ in layers][::every])
    panels[0].set_ylabel("layer (a row for each head)")
    return figure


# The tree of a prefix cache -----------------------------------------------------------------------

_MOST_ROWS = 120
_MOST_LETTERS = 24  # maximum length of a namespace's name
_FONT = "DejaVu Sans"


def draw_tree(nodes: Sequence[TreeNode], title: str) -> Figure:
    """Draw nodes as bars from left to right by token, branches below each other."""
    shown = [
        (node, first, min(n, _MOST_ROWS - first))
        for node, (first, n) in zip(nodes, _rows_of(nodes), strict=True)
        if first < _MOST_ROWS
    ]
    n_rows = max((first + n for _, first, n in shown), default=1)
    figure = new_figure(9, 1.4 + 0.24 * max(n_rows, 2))
    axes = figure.subplots()
    end = max((node.start + node.n_tokens for node, _, _ in shown), default=1)
    most = max((node.uses for node, _, _ in shown), default=0)
    spaces: dict[str, list[int]] = {}
    for node, first, n in shown:
        _draw_node(axes, node, first, n, end, most)
        if node.depth == 0:
            spaces.setdefault(node.namespace, []).extend((first, first + n))
    if any(spaces):  # more than the default namespace
        places = [(min(rows) + max(rows)) / 2 - 0.5 for rows in spaces.values()]
        names = [_cut(_printable(repr(name)), _MOST_LETTERS) for name in spaces]
        axes.set_yticks(places, names, parse_math=False, family=_FONT)
    else:
        axes.set_yticks([])
    if not shown:
        axes.text(0.5, 0.5, "nothing is kept", ha="center", transform=axes.transAxes)
    if len(shown) < len(nodes):
        title += f"; {len(nodes) - len(shown):,} of {len(nodes):,} parts are not shown"
    axes.set(xlabel="token", title=title, xlim=(0, end), ylim=(n_rows - 0.4, -0.6))
    axes.spines[["top", "right", "left"]].set_visible(False)
    _explain_tree(figure, [node for node, _, _ in shown], most)
    return figure


def _rows_of(nodes: Sequence[TreeNode]) -> Iterable[tuple[int, int]]:
    """Return the first row of each node and its number of rows, which is its number of leaves."""
    firsts: list[int] = []
    counts: list[int] = []
    path: list[int] = []
    n_leaves = 0
    for at, node in enumerate(nodes):
        firsts.append(n_leaves)
        counts.append(0)
        path[node.depth :] = [at]
        if at + 1 == len(nodes) or nodes[at + 1].depth <= node.depth:
            n_leaves += 1
            for one in path:
                counts[one] += 1
    return zip(firsts, counts, strict=True)


def _shade(uses: int, most: int) -> str:
    """Return a colour, darker for more frequent use."""
    share = uses / most if most else 0.0
    red, green, blue = (round(a + (b - a) * share) for a, b in ((222, 33), (235, 113), (247, 181)))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _draw_node(axes: Axes, node: TreeNode, first: int, n: int, end: int, most: int) -> None:
    from matplotlib.patches import Rectangle

    middle = first + n / 2 - 0.5
    axes.add_patch(
        Rectangle(
            (node.start, first - 0.45),
            node.n_tokens,
            n - 0.1,
            facecolor=_shade(node.uses, most),
            edgecolor="C3" if node.is_held else "white",
            linewidth=1.4 if node.is_held else 0.6,
            hatch=None if node.n_blocks else "////",
        )
    )
    if node.has_checkpoint:
        axes.plot(node.start + node.n_tokens, middle, "k>", markersize=4, clip_on=False)
    room = int(node.n_tokens / end * 105)  # 105 letters of this size fit the whole width
    if room >= 4:
        axes.text(
            node.start + end * 0.004,
            middle,
            _printable(_cut(node.text, room)),
            parse_math=False,
            fontsize=7,
            va="center",
            color="white" if node.uses > 0.6 * most else "0.2",
            clip_on=True,
            family=_FONT,
        )


def _cut(text: str, n: int) -> str:
    """Return a text, cut to n letters."""
    return text if len(text) <= n else text[: n - 1] + "…"


def _printable(text: str) -> str:
    """Return a text with dots for characters that the font lacks."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont(_FONT)).get_charmap()
    return "".join(letter if ord(letter) in known and letter >= " " else "·" for letter in text)


def _explain_tree(figure: Figure, nodes: Sequence[TreeNode], most: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(color=_shade(0, 1), label="not used again")]
    if most:
        label = f"used {most} times" if most > 1 else "used once"
        handles.append(Patch(color=_shade(1, 1), label=label))
    if any(node.is_held for node in nodes):
        handles.append(Patch(facecolor="white", edgecolor="C3", label="held"))
    if not all(node.n_blocks for node in nodes):
        handles.append(
            Patch(facecolor=_shade(0, 1), edgecolor="white", hatch="////", label="after last block")
        )
    if any(node.has_checkpoint for node in nodes):
        handles.append(
            Line2D([], [], color="k", marker=">", linestyle="", markersize=4, label="checkpoint")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


# Notebooks ----------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 480, 18
#: Places of tokens, with colours.
_PALETTE = {
    "live": "#1b7837",
    "ram": "#5aae61",
    "disk": "#a6dba0",
    "remote": "#d9f0d3",
    "evaluated": "#4575b4",
    "parked": "#998ec3",
    "pending": "#f1a340",
    "to evaluate": "#f1a340",
}


def bar_html(title: str, parts: Iterable[tuple[str, int]], note: str = "") -> str:
    """Return a bar of named parts with a legend; parts of size 0 are omitted."""
    parts = [(name, n) for name, n in parts if n > 0]
    total = sum(n for _, n in parts) or 1
    shapes, legend, at = [], [], 0.0
    for name, n in parts:
        width, color = _WIDTH * n / total, _PALETTE.get(name, "#999999")
        label = escape(f"{name}: {n}")
        shapes.append(
            f'<rect x="{at:.2f}" width="{width:.2f}" height="{_HEIGHT}" fill="{color}">'
            f"<title>{label}</title></rect>"
        )
        legend.append(f'<span style="color:{color}">&#9632;</span> {label}')
        at += width
    return (
        f'<div style="font-family:sans-serif;font-size:90%"><div>{escape(title)}</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}</svg><div>{' &nbsp; '.join(legend)}</div>"
        f"<div>{escape(note)}</div></div>"
    )


def table_html(title: str, rows: Iterable[tuple[str, str]], picture: str = "") -> str:
    """Return a table of names and values with a picture below it."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table>{picture}</div>"
