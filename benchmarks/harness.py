"""Running contestants by turns, and what is kept of it."""

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

#: The same C program once more: what lies between the two is the machine's.
AGAIN = "C again"

#: OpenMP threads of a process that waits for its turn spin for some milliseconds.
PAUSE = 0.01


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    samples: int = 7
    few: int = 7
    """Samples of what takes seconds; fewer in a brief run."""
    slices: int = 150
    quick: bool = False


def few(plan: Plan) -> Plan:
    """Return the plan for what takes seconds."""
    return replace(plan, samples=plan.few)


class Contestant:
    """A process that answers one request after the other."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None):
        self.name = name
        self.command = list(command)
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str] | None = None
        self.missing: str | None = None
        self.unopened: str | None = None
        """Why its last context could not be opened; nothing is measured without it."""
        self.reported: Answer = {}
        """Settings that its contexts reported, the last ones."""

    def ask(self, do: str, **request: Any) -> Answer:
        """Send a request and wait for its answer; ``error`` tells what could not be done."""
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
            # What it had opened is gone with it.
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
    """One thing measured: raw samples per contestant, and what could not be measured."""

    name: str
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def median(self, who: str) -> float:
        """Return the median of a contestant, NaN if it has none."""
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
        """Keep a sample of a contestant, but for that of a warm-up; or why it has none."""
        if "error" in answer:
            # Where the project lies on this machine is nobody's business.
            self.errors[who] = answer["error"].replace(f"{Path.cwd()}{os.sep}", "")
            self.samples.pop(who, None)
        elif not warm_up:
            self.samples.setdefault(who, []).append(value(answer))
            for key in note:
                if key in answer:
                    self.notes.setdefault(key, {})[who] = answer[key]

    def ratios(self, who: str, other: str) -> list[float]:
        """Return sample by sample ratios of two contestants."""
        pairs = zip(self.samples.get(who, []), self.samples.get(other, []), strict=False)
        return [a / b for a, b in pairs if b]

    def as_json(self) -> dict[str, Any]:
        """Return what the JSON holds."""
        return {
            "name": self.name,
            "unit": self.unit,
            "samples": {who: [float(f"{v:.6g}") for v in s] for who, s in self.samples.items()},
            "errors": self.errors,
            **({"notes": self.notes} if self.notes else {}),
        }


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a round: everybody in turn is the first."""
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]


def counted(n: int, what: str) -> str:
    """Write a number of things."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def leave_out(rows: Iterable[Row], who: str, why: str) -> None:
    """Say why a contestant was not asked, where it has neither samples nor an error."""
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

    Who comes first changes, so that nobody always follows the same one; pairs are of one round.

    Parameters
    ----------
    sides
        What to run for each contestant.
    value
        What of an answer is the sample.
    note
        Keys of the answer to keep beside the samples, from its last answer.
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
    """Print one line about a row to stderr, so that a long run is not silent."""
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
    """End every process at the end."""
    try:
        yield contestants
    finally:
        for contestant in contestants.values():
            contestant.close()
