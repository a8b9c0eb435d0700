"""Notebook views of sequences and reports: a bar, and text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["bar_html", "table_html"]

WIDTH, HEIGHT = 480, 18
#: Places of tokens, with colours.
PALETTE = {
    "live": "#1b7837",
    "ram": "#5aae61",
    "disk": "#a6dba0",
    "remote": "#d9f0d3",
    "evaluated": "#4575b4",
    "parked": "#998ec3",
    "pending": "#f1a340",
    "to evaluate": "#f1a340",
}


def bar_html(title: str, parts: Sequence[tuple[str, int]], note: str = "") -> str:
    """Return a bar of named parts with a legend; parts of size 0 are omitted."""
    parts = [(name, n) for name, n in parts if n > 0]
    total = sum(n for _, n in parts) or 1
    shapes, legend, at = [], [], 0.0
    for name, n in parts:
        width, color = WIDTH * n / total, PALETTE.get(name, "#999999")
        label = escape(f"{name}: {n}")
        shapes.append(
            f'<rect x="{at:.2f}" width="{width:.2f}" height="{HEIGHT}" fill="{color}">'
            f"<title>{label}</title></rect>"
        )
        legend.append(f'<span style="color:{color}">&#9632;</span> {label}')
        at += width
    return (
        f'<div style="font-family:sans-serif;font-size:90%"><div>{escape(title)}</div>'
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes)}</svg><div>{' &nbsp; '.join(legend)}</div>"
        f"<div>{escape(note)}</div></div>"
    )


def table_html(title: str, rows: Sequence[tuple[str, str]], picture: str = "") -> str:
    """Return a table of names and values with a picture below it."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<div><b>{escape(title)}</b><table>{cells}</table>{picture}</div>"
