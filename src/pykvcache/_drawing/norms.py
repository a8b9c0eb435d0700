"""Draws the norms of keys and values by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvcache._drawing.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_norms"]


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
