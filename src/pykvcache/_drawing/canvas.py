"""Matplotlib figures, and their conversion to SVG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from pykvcache._extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_svg", "new_figure"]


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
