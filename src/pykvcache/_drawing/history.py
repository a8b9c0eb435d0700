"""Draws the number of used cells over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pykvcache._drawing.canvas import new_figure
from pykvcache._drawing.cells import FREE, SHARED, color_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_history"]


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
