"""Overhead of our code on a decode and its batch, compared with C and with another build.

    python -m benchmarks.decode_overhead [--against OTHER_PYTHON] [--rounds 15]

One thread, and models so small that a decode is mostly overhead. C is `benchmarks/c/` with this
build's static libraries. ``--against`` names an interpreter with its own pykvcache, for example the
build before a change. The processes take turns, so that all have the same noise. A sample is the
best of many slices, a figure the median over rounds; the last columns are medians of each round's
difference from C.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from functools import partial

from benchmarks.groups.calls import IN_C
from benchmarks.harness import Contestant, Plan, Row, closing, interleave
from benchmarks.models import ROOT, STORIES, tiny
from benchmarks.settings import open_all
from benchmarks.setup import c_program
from benchmarks.targets import differences

BATCHES = ("logits", "batch1", "batch1_list", "batch512", "batch512_list", "batch512_new")
PARALLEL = (1, 4, 16)


def measure(contestants: dict[str, Contestant], plan: Plan) -> list[Row]:
    """Measure batch calls on the story model, and decodes on two models, in turns."""
    rows: list[Row] = []
    for model, path in (("tiny", tiny()), ("stories", STORIES)):
        open_all(contestants, path, n_ctx=1024, n_seq_max=64, threads=1)
        for contestant in contestants.values():
            contestant.ask("fill", n=16)
        for what in (*BATCHES, "decode1") if model == "stories" else ("decode1",):
            sides = {
                name: partial(
                    c.ask, "call", what=IN_C.get(what, what) if name == "C" else what, slices=100
                )
                for name, c in contestants.items()
            }
            rows.append(interleave(f"{what}, {model}", "s", sides, plan))
        for n in PARALLEL:
            steps = {
                name: partial(c.ask, "decode", parallel=n, steps=32)
                for name, c in contestants.items()
            }
            rows.append(interleave(f"LlamaBatch of {n}, {model}", "s", steps, plan))
    return rows


def show(rows: list[Row], names: list[str]) -> None:
    """Print a table in microseconds."""
    others = [name for name in names if name != "C"]
    heads = [*names, *(f"{name} over C" for name in others)]
    print("| us |", " | ".join(heads), "|")
    print("|---|" + "---:|" * len(heads))
    for row in rows:
        cells = [f"{row.median(name) * 1e6:,.3f}" for name in names]
        for name in others:
            over = differences(row, name, "C")
            cells.append(f"{statistics.median(over) * 1e6:,.3f}" if over else "-")
        print(f"| {row.name} |", " | ".join(cells), "|")
        for name, why in row.errors.items():
            print(f"{name}: {why}", file=sys.stderr)


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", action="append", default=[], metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    env = {"PYTHONPATH": os.fspath(ROOT), "OMP_WAIT_POLICY": "passive"}
    contestants = {"C": Contestant("C", [os.fspath(c_program())], env)}
    for python in [*options.against, sys.executable]:
        name = "this build" if python == sys.executable else python
        contestants[name] = Contestant(name, [python, "-m", "benchmarks.peers.ours"], env)
    with closing(contestants):
        show(measure(contestants, Plan(samples=options.rounds)), list(contestants))


if __name__ == "__main__":
    main()
