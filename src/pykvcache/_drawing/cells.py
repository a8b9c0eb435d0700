"""Draws cells by sequence and position, in memory order, and over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvcache._drawing.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pykvcache.introspection import CellTable

__all__ = ["draw_cells", "draw_history"]

SHARED, FREE = "0.35", "0.93"
#: Colours of sequences, repeated after ten.
COLORS = (*(f"C{i}" for i in range(7)), "C8", "C9", "C6")
Ints = npt.NDArray[np.int32]


def color_of(seq_id: int) -> str:
    """Return the colour of a sequence's unshared cells."""
    return COLORS[seq_id % len(COLORS)]


def draw_cells(table: CellTable, n_streams: int, n_cells: int, title: str) -> Figure:
    """Draw a table of cells: above by sequence and position, below in memory order."""
    stream, cell, pos, members = table.stream, table.cell, table.pos, table.members
    held = np.flatnonzero(members.any(axis=0))
    shares = members.sum(axis=1)
    figure = new_figure(9, 1.9 + 0.22 * min(len(held), 24) + 0.18 * min(n_streams, 24))
    heights = [max(1.0, 0.4 * min(len(held), 24)), max(0.5, 0.25 * min(n_streams, 24))]
    above, below = figure.subplots(2, 1, height_ratios=heights)
    for row, seq_id in enumerate(held):
        mine = np.flatnonzero(members[:, seq_id])
        mine = mine[np.argsort(pos[mine], kind="stable")]
        for begin, n, share in _runs(pos[mine], np.minimum(shares[mine], 2)):
            color = SHARED if share > 1 else color_of(int(seq_id))
            above.broken_barh([(begin - 0.5, n)], (row - 0.4, 0.8), facecolors=color)
    above.set_yticks(range(len(held)), [str(seq_id) for seq_id in held])
    above.set(xlabel="position", ylabel="sequence", title=title)
    above.set_ylim(max(len(held), 1) - 0.4, -0.6)
    if not len(held):
        above.text(0.5, 0.5, "no sequence holds anything", ha="center", transform=above.transAxes)

    owner = np.where(shares > 1, -1, members.argmax(axis=1) if members.size else 0)
    for each in range(max(n_streams, 1)):
        below.broken_barh([(-0.5, n_cells)], (each - 0.4, 0.8), facecolors=FREE)
        here = np.flatnonzero(stream == each)
        here = here[np.argsort(cell[here], kind="stable")]
        for begin, n, value in _runs(cell[here], owner[here]):
            color = SHARED if value < 0 else color_of(value)
            below.broken_barh([(begin - 0.5, n)], (each - 0.4, 0.8), facecolors=color)
    below.set_yticks(range(max(n_streams, 1)))
    below.set(xlabel="cell", ylabel="stream", xlim=(-0.5, max(n_cells, 1) - 0.5))
    below.set_ylim(max(n_streams, 1) - 0.4, -0.6)
    own = color_of(int(held[0])) if len(held) else COLORS[0]
    _explain(figure, own, bool((shares > 1).any()))
    return figure


def _runs(places: Ints, values: npt.NDArray[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, value) of runs of equal values."""
    if not len(places):
        return
    cuts = np.flatnonzero((np.diff(places) > 1) | (np.diff(values) != 0)) + 1
    for run in np.split(np.arange(len(places)), cuts):
        first, last = run[0], run[-1]
        yield int(places[first]), int(places[last] - places[first]) + 1, int(values[first])


def _explain(figure: Figure, own: str, shared: bool) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=own, label="held by one sequence (each has its colour)")]
    if shared:
        patches.append(Patch(color=SHARED, label="shared by several"))
    patches.append(Patch(color=FREE, label="free"))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)


def draw_history(
    seconds: Sequence[float],
    own: Sequence[dict[int, int]],
    shared: Sequence[int],
    n_cells: int,
) -> Figure:
    """Draw the cells of each sequence, shared cells and free cells, stacked."""
    figure = new_figure(9, 3.4)
    axes = figure.subplots()
    ids = sorted({seq_id for sample in own for seq_id in sample})
    areas = [np.array(shared, dtype=np.int64)]
    areas += [np.array([sample.get(seq_id, 0) for sample in own]) for seq_id in ids]
    labels = ["shared"] + [f"sequence {seq_id}" for seq_id in ids]
    colors = [SHARED] + [color_of(seq_id) for seq_id in ids]
    if len(seconds):
        axes.stackplot(seconds, *areas, labels=labels, colors=colors, step="post")
    axes.axhline(n_cells, color="0.2", linewidth=1, linestyle=":")
    axes.set_facecolor(FREE)
    axes.set(xlabel="seconds", ylabel="cells in use", ylim=(0, n_cells * 1.05))
    axes.set_title(f"{n_cells} cells over time")
    if len(seconds) and len(labels) <= 12:
        figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize="small")
    return figure
