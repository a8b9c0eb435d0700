"""Draws a tree of tokens: each run is a bar of its length, with its children to the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pykvcache._drawing.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pykvcache.prefix.tree_view import TreeNode

__all__ = ["draw_tree"]

_MOST_ROWS = 120
_MOST_LETTERS = 24  # maximum length of a group's name
_FONT = "DejaVu Sans"


def rows_of(bars: Sequence[TreeNode]) -> list[tuple[int, int]]:
    """Return the first row of each node and its number of rows, which is its number of leaves."""
    rows: list[tuple[int, int]] = [(0, 0)] * len(bars)
    open_bars: list[int] = []
    n_leaves = 0

    def close(down_to: int) -> None:
        nonlocal n_leaves
        while len(open_bars) > down_to:
            at = open_bars.pop()
            first = rows[at][0]
            n_leaves = max(n_leaves, first + 1)  # a leaf
            rows[at] = first, n_leaves - first

    group = None
    for at, bar in enumerate(bars):
        close(0 if bar.namespace != group else bar.depth)
        group = bar.namespace
        rows[at] = n_leaves, 1
        open_bars.append(at)
    close(0)
    return rows


def draw_tree(bars: Sequence[TreeNode], title: str) -> Figure:
    """Draw bars from left to right by token, branches below each other."""
    rows = rows_of(bars)
    n_rows = max((first + n for first, n in rows), default=1)
    shown = [(bar, row) for bar, row in zip(bars, rows, strict=True) if row[0] < _MOST_ROWS]
    n_rows = min(n_rows, _MOST_ROWS)
    figure = new_figure(9, 1.4 + 0.24 * max(n_rows, 2))
    axes = figure.subplots()
    end = max((bar.start + bar.n_tokens for bar, _ in shown), default=1)
    most = max((bar.uses for bar, _ in shown), default=0)
    for bar, (first, n) in shown:
        _draw(axes, bar, first, min(n, _MOST_ROWS - first), end, most)
    groups: dict[str, list[int]] = {}
    for bar, (first, n) in shown:
        if bar.depth == 0:
            groups.setdefault(bar.namespace, []).extend((first, min(first + n, n_rows)))
    if any(groups):  # more than the default group
        places = [(min(rows) + max(rows)) / 2 - 0.5 for rows in groups.values()]
        names = [_cut(_printable(repr(name)), _MOST_LETTERS) for name in groups]
        axes.set_yticks(places, names, parse_math=False, family=_FONT)
    else:
        axes.set_yticks([])
    if not shown:
        axes.text(0.5, 0.5, "nothing is kept", ha="center", transform=axes.transAxes)
    if len(shown) < len(bars):
        title += f"; {len(bars) - len(shown):,} of {len(bars):,} parts are not shown"
    axes.set(xlabel="token", title=title, xlim=(0, end), ylim=(n_rows - 0.4, -0.6))
    axes.spines[["top", "right", "left"]].set_visible(False)
    _explain(figure, [bar for bar, _ in shown])
    return figure


def _shade(uses: int, most: int) -> str:
    """Return a colour, darker for more frequent use."""
    share = 0.0 if not most else uses / most
    red, green, blue = (round(a + (b - a) * share) for a, b in ((222, 33), (235, 113), (247, 181)))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _draw(axes: Axes, bar: TreeNode, first: int, n: int, end: int, most: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (bar.start, first - 0.45),
            bar.n_tokens,
            n - 0.1,
            facecolor=_shade(bar.uses, most),
            edgecolor="C3" if bar.is_held else "white",
            linewidth=1.4 if bar.is_held else 0.6,
            hatch="////" if not bar.n_blocks else None,
        )
    )
    if bar.has_checkpoint:
        axes.plot(bar.start + bar.n_tokens, first + n / 2 - 0.5, "k>", markersize=4, clip_on=False)
    room = int(bar.n_tokens / end * 105)  # 105 letters of this size fit the whole width
    if room >= 4:
        middle = first + n / 2 - 0.5
        dark = most and bar.uses > 0.6 * most
        axes.text(
            bar.start + end * 0.004,
            middle,
            _printable(_cut(bar.text, room)),
            parse_math=False,
            fontsize=7,
            va="center",
            color="white" if dark else "0.2",
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


def _explain(figure: Figure, bars: Sequence[TreeNode]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    most = max((bar.uses for bar in bars), default=0)
    handles: list[Patch | Line2D] = [Patch(color=_shade(0, 1), label="not used again")]
    if most:
        handles.append(
            Patch(color=_shade(1, 1), label=f"used {most} times" if most > 1 else "used once")
        )
    if any(bar.is_held for bar in bars):
        handles.append(Patch(facecolor="white", edgecolor="C3", label="held"))
    if any(not bar.n_blocks for bar in bars):
        handles.append(
            Patch(facecolor=_shade(0, 1), edgecolor="white", hatch="////", label="after last block")
        )
    if any(bar.has_checkpoint for bar in bars):
        handles.append(
            Line2D([], [], color="k", marker=">", linestyle="", markersize=4, label="checkpoint")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
