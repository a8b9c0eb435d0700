"""The screen of the demo: colour on a terminal, plain text elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

import click

__all__ = ["Screen"]

WIDTH = 80
WIDEST = 100
#: Characters around the model's own words while lines are broken; replaced before printing.
START, END = "\x02", "\x03"


class Screen:
    """Writes the demo's headings, texts, figures and table; with `plain` without colour."""

    def __init__(self, *, plain: bool = False) -> None:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self.width = min(shutil.get_terminal_size().columns, WIDEST) if is_terminal else WIDTH
        is_dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self.has_color = is_terminal and not plain and not is_dumb

    def heading(self, text: str) -> None:
        """Begin a part of the demo."""
        self._write(f"\n{text}", fg="cyan", bold=True)
        if not self.has_color:
            self._write("-" * len(text))

    def line(self, text: str) -> None:
        """Write a remark."""
        self._write(textwrap.fill(text, self.width))

    def legend(self) -> None:
        """Say how the model's own words are marked."""
        if self.has_color:
            own, given = click.style("green", fg="green"), click.style("dim", dim=True)
            self._write(f"Text by the model is {own}, the text that it was given is {given}.")
        else:
            self.line("Text by the model is in [brackets], after the text that it was given.")

    def given(self, label: str, given: str, written: str) -> None:
        """Write text of the model after text that it was given."""
        text = f"{given}{START}{written}{END}"
        lead = f"  {label}: " if label else "  "
        lines = []
        for part in text.split("\n"):
            if part.strip(f" {START}{END}"):
                lines.append(
                    textwrap.fill(part, self.width, initial_indent=lead, subsequent_indent="  ")
                )
                lead = "  "
            else:  # an empty line may hold a mark
                lines[-1:] = ["".join([*lines[-1:], part.strip()])]
        shown = "\n".join(lines)
        if not self.has_color:
            self._write(shown.replace(START, "[" if given else "").replace(END, "]" * bool(given)))
            return
        n = len(label) + 3 if label else 0
        before, _, own = shown[n:].rstrip(END).partition(START)
        parts = click.style(shown[:n], bold=True), click.style(before, dim=True)
        self._write("".join([*parts, click.style(own, fg="green")]))

    def figures(self, text: str) -> None:
        """Write figures."""
        self._write(textwrap.fill(f"=> {text}", self.width, subsequent_indent="   "), fg="yellow")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the columns between the first and the last are numbers."""
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

        def aligned(row: Sequence[str]) -> list[str]:
            first, *middle = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            return [row[0].ljust(len(first)), *middle[:-1], row[-1]]

        self._write("  ".join(aligned(columns)), bold=True)
        self._write("  ".join("-" * width for width in widths), dim=True)
        for row in rows:
            *cells, verdict = aligned(row)
            style = {"yes": "green", "NO,": "red"}.get(verdict[:3].rstrip(), "yellow")
            last = click.style(verdict, fg=style, bold=style == "red" or None)
            self._write("  ".join([*cells, last]))

    def _write(self, text: str, **style: object) -> None:
        click.echo(click.style(text, **style) if style else text, color=self.has_color)  # type: ignore[arg-type]
