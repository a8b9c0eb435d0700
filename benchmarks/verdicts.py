"""A target with its figure, and formatting of figures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks import texts
from benchmarks.harness import Row

Rows = dict[str, Row]

US = "pykvcache"


@dataclass(frozen=True)
class Verdict:
    """One target with its figure."""

    key: str
    text: str
    figure: str
    met: bool | None

    def line(self) -> list[str]:
        """Return a row of the table."""
        if self.met is None:
            word = "not measured" if self.figure == "-" else "lost in noise"
            return [self.text, self.figure, word, ""]
        why = "" if self.met else texts.REASONS.get(self.key, "")
        return [self.text, self.figure, "met" if self.met else "missed", why]


def span(values: list[float], unit: str, digits: int, scale: float = 1) -> str:
    """Write the median with its unit, the minimum and the maximum."""
    low, middle, high = (
        f"{v * scale:,.{digits}f}" for v in (min(values), statistics.median(values), max(values))
    )
    return f"{middle}{unit and ' '}{unit} ({low} to {high})"


def worst_of(
    found: dict[str, list[float]], worst: str, unit: str, digits: int, what: str = "rows"
) -> str:
    """Write the worst of several figures with its name, and their number."""
    return f"{span(found[worst], unit, digits)}, the worst of {len(found)} {what} (`{worst}`)"


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each."""
    return {name: statistics.median(values) for name, values in found.items()}


def least(values: dict[str, float]) -> str:
    """Return the name of the lowest."""
    return min(values, key=values.__getitem__)


def below(values: dict[str, float], limit: float) -> str:
    """List the figures below a limit; "" if none."""
    low = [f"{name} {value:.2f}" for name, value in values.items() if value < limit]
    return "; below: " + ", ".join(low) if low else ""
