"""The screen of the demo: coloured with rich, plain text without it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = ["Screen", "open_screen"]

WIDTH = 80


class Screen:
    """Plain text, for terminals and pipes alike; the base of the coloured one."""

    def heading(self, text: str) -> None:
        """Begin a part of the demo."""
        print(f"\n{text}\n{'-' * len(text)}")

    def line(self, text: str) -> None:
        """Write one remark."""
        print(textwrap.fill(text, WIDTH))

    def legend(self) -> None:
        """Say how the model's own words are marked."""
        self.line("Text by the model is in [brackets], after the text that it was given.")

    def given(self, label: str, given: str, written: str) -> None:
        """Write text of the model after text that it was given."""
        text = f"{given}[{written}]" if given else written
        lead = f"{label}: " if label else ""
        for part in _paragraphs(text):
            print(textwrap.fill(part, WIDTH, initial_indent=f"  {lead}", subsequent_indent="  "))
            lead = ""

    def figures(self, text: str) -> None:
        """Write figures."""
        print(textwrap.fill(f"=> {text}", WIDTH, subsequent_indent="   "))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table; the columns between the first and the last are numbers."""
        cells = [[column.replace("\n", " ") for column in columns], *map(list, rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        for number, row in enumerate(cells):
            print(_aligned(row, widths))
            if number == 0:
                print("  ".join("-" * width for width in widths))


class _RichScreen(Screen):
    """The same in colour, as wide as the terminal."""

    def __init__(self, rich: Any) -> None:
        self._rich = rich
        self._console = rich.Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = WIDTH
        # No colour in a pipe, on a dumb terminal, or with NO_COLOR.
        self._coloured = self._console.color_system is not None and not self._console.no_color

    def heading(self, text: str) -> None:
        self._console.print()
        self._console.print(self._rich.Text(text, style="bold cyan"))

    def line(self, text: str) -> None:
        self._console.print(self._rich.Text(text))

    def legend(self) -> None:
        if not self._coloured:
            super().legend()
            return
        text = self._rich.Text("Text by the model is ")
        text.append("green", style="green")
        text.append(", the text that it was given is ")
        text.append("dim", style="dim")
        self._console.print(text + self._rich.Text("."))

    def given(self, label: str, given: str, written: str) -> None:
        text = self._rich.Text()
        if label:
            text.append(f"{label}: ", style="bold")
        text.append(given, style="dim")
        # Without colour, brackets show the model's own words.
        plain = given and not self._coloured
        text.append(f"[{written}]" if plain else written, style="green")
        self._console.print(self._rich.Padding(text, (0, 0, 0, 2), expand=False))

    def figures(self, text: str) -> None:
        self._console.print(self._rich.Text(f"=> {text}", style="yellow"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = self._rich.Table(box=self._rich.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for number, column in enumerate(columns):
            inner = 0 < number < len(columns) - 1
            table.add_column(column, justify="right" if inner else "left", no_wrap=True)
        for row in rows:
            last = self._rich.Text(row[-1], style=_verdict_style(row[-1]))
            table.add_row(*map(self._rich.Text, row[:-1]), last)
        self._console.print(table)


def open_screen(*, plain: bool = False) -> Screen:
    """Return a coloured screen if rich is installed, otherwise a plain one."""
    if plain:
        return Screen()
    try:
        from types import SimpleNamespace

        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("(for colour: pip install 'pykvcache[cli]')", file=sys.stderr)
        return Screen()
    return _RichScreen(
        SimpleNamespace(
            SIMPLE_HEAD=SIMPLE_HEAD, Console=Console, Padding=Padding, Table=Table, Text=Text
        )
    )


def _verdict_style(verdict: str) -> str:
    if verdict.startswith("yes"):
        return "green"
    return "bold red" if verdict.startswith("NO") else "yellow"


def _paragraphs(text: str) -> list[str]:
    return [part for part in text.split("\n") if part.strip()] or [""]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    cells = (
        cell.rjust(width) if 0 < number < last else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
