"""Runs contestants in turns, and keeps their samples."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

#: The same C program again; the difference is noise.
AGAIN = "C again"

#: Keeps OpenMP threads of waiting processes from spinning.
PAUSE = 0.01


@dataclass(frozen=True)
class Plan:
    """Numbers of samples and slices."""

    samples: int = 7
    few: int = 7
    """Number of samples of measurements that take seconds; fewer in a brief run."""
    slices: int = 150
    quick: bool = False


def few(plan: Plan) -> Plan:
    """Return the plan for what takes seconds."""
    return replace(plan, samples=plan.few)


class Contestant:
    """A process that answers requests one after the other."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None):
        self.name = name
        self.command = list(command)
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str] | None = None
        self.missing: str | None = None
        self.unopened: str | None = None
        """Why its last context could not be opened, if so."""
        self.reported: Answer = {}
        """Settings that its last context reported."""

    def ask(self, do: str, **request: Any) -> Answer:
        """Send a request and return its answer, which has ``error`` on failure."""
        why = self.missing or (self.unopened if do != "open" else None)
        if why is not None:
            return {"error": why}
        if self.process is None:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if "BENCH_STDERR" not in os.environ else None,
                text=True,
                env=self.env,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            # Its context is lost too.
            self.unopened = f"the process ended with {self.close()} at {do!r}"
            return {"error": self.unopened}
        answer: Answer = json.loads(line)
        return answer

    def close(self) -> int | None:
        """End the process; return its exit status."""
        process, self.process = self.process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        process.stdout.close()
        return code


@dataclass
class Row:
    """A measurement: raw samples per contestant, and errors."""

    name: str
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def median(self, who: str) -> float:
        """Return the median of a contestant; NaN without samples."""
        values = self.samples.get(who)
        return statistics.median(values) if values else float("nan")

    def take(
        self,
        who: str,
        answer: Answer,
        value: Callable[[Answer], float] = lambda answer: float(answer["seconds"]),
        note: Sequence[str] = (),
        *,
        warm_up: bool = False,
    ) -> None:
        """Keep a contestant's sample (unless from a warm-up) or its error."""
        if "error" in answer:
            # Remove the project's path from messages.
            self.errors[who] = answer["error"].replace(f"{Path.cwd()}{os.sep}", "")
            self.samples.pop(who, None)
        elif not warm_up:
            self.samples.setdefault(who, []).append(value(answer))
            for key in note:
                if key in answer:
                    self.notes.setdefault(key, {})[who] = answer[key]

    def ratios(self, who: str, other: str) -> list[float]:
        """Return the ratios of two contestants per sample."""
        pairs = zip(self.samples.get(who, []), self.samples.get(other, []), strict=False)
        return [a / b for a, b in pairs if b]

    def as_json(self) -> dict[str, Any]:
        """Return the row for the JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "samples": {who: [float(f"{v:.6g}") for v in s] for who, s in self.samples.items()},
            "errors": self.errors,
            **({"notes": self.notes} if self.notes else {}),
        }


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a round; each contestant is first in turn."""
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]


def counted(n: int, what: str) -> str:
    """Write a count with its noun."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def leave_out(rows: Iterable[Row], who: str, why: str) -> None:
    """Record a reason for rows without samples and error of a contestant."""
    for row in rows:
        if who not in row.samples:
            row.errors.setdefault(who, why)


def interleave(
    name: str,
    unit: str,
    sides: Mapping[str, Callable[[], Answer]],
    plan: Plan,
    value: Callable[[Answer], float] = lambda answer: float(answer["seconds"]),
    note: Sequence[str] = (),
) -> Row:
    """Measure each side in turn, A B C, B C A, C A B, after one round of warm-up.

    The order changes, so that no contestant always follows the same one. Pairs are of one round.

    Parameters
    ----------
    sides
        Function to run for each contestant.
    value
        Function that extracts the sample from an answer.
    note
        Keys of the last answer to keep as notes.
    """
    row = Row(name, unit)
    for turn in range(plan.samples + 1):
        for who in rotated(list(sides), turn):
            if who in row.errors:
                continue
            answer = sides[who]()
            time.sleep(PAUSE)
            row.take(who, answer, value, note, warm_up=not turn)
    return row


def show(row: Row, scale: float, unit: str, base: str = "C") -> None:
    """Print a line about a row to stderr, as progress."""
    cells = []
    for who in row.samples:
        cell = f"{who} {row.median(who) * scale:.4g}"
        if who != base and row.ratios(who, base):
            cell += f" ({statistics.median(row.ratios(who, base)):.2f}x)"
        cells.append(cell)
    cells += [f"{who}: {why}" for who, why in row.errors.items()]
    print(f"  {row.name} [{unit}]: " + ", ".join(cells), file=sys.stderr)


@contextlib.contextmanager
def closing(contestants: Mapping[str, Contestant]) -> Iterator[Mapping[str, Contestant]]:
    """End all processes at the end of the block."""
    try:
        yield contestants
    finally:
        for contestant in contestants.values():
            contestant.close()
