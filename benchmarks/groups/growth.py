"""Group 7: growth of groups 1 to 4 with cells and with sequences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.groups.state import load_everywhere
from benchmarks.groups.throughput import rate
from benchmarks.harness import Answer, Contestant, Plan, Row, counted, interleave, leave_out, show
from benchmarks.models import STORIES
from benchmarks.settings import open_all

TITLE = "growth with cells and sequences"
CELLS = (1024, 4096, 16_384, 65_536)
SEQUENCES = (1, 4, 16, 64, 256)
#: Two bindings and C for calls; ours and C for longer operations.
WHO = ("pykvcache", "C", "llama-cpp-python")
#: Calls that change nothing (or shift back and forth), so that a slice can have several passes
#: even with few sequences.
AGAIN_AND_AGAIN = ("pos_max", "keep", "add", "copy_over", "logits")
#: Halving position 64 six times ends at 1.
HALVES = 6


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure with the story model and one thread."""
    who = {name: contestants[name] for name in WHO if name in contestants}
    rows = []
    for cells in CELLS[: 2 if plan.quick else 4]:
        rows += by_cells(who, cells, plan)
    for sequences in SEQUENCES:
        rows += by_sequences(who, sequences, plan)
    for name in contestants:
        if name not in who:
            leave_out(rows, name, "not asked, for the time it takes: see the tables above")
    return rows


def by_cells(who: Mapping[str, Contestant], cells: int, plan: Plan) -> list[Row]:
    """Measure with one sequence that has half of the cells."""
    refused = load_everywhere(who, cells // 2, n_ctx=cells, n_seq_max=4, threads=1)
    there = {name: c for name, c in who.items() if name not in refused}
    of, table = counted(cells, "cell"), Table(there, plan)
    slices = plan.slices if cells <= 4096 else 4
    for what in ("pos_max", "copy", "remove", "remove_part", "keep", "add", "div", "logits"):
        # C visits every cell for keep, and each read of logits needs a decode: one call is long
        # enough, and 64 would take minutes.
        once = what in ("keep", "logits") and cells > 4096
        table.call(what, of, slices, 1 if once else rounds_of(what, 4))
    one = table.call("decode1", of, min(slices, 2) if cells > 4096 else slices)
    # The same samples as a rate.
    found = {name: [1 / seconds for seconds in s] for name, s in one.samples.items()}
    table.rows.append(Row(f"decode, {of}", "tokens/s", found, dict(one.errors)))
    table.add("prefill of 64 more", of, "tokens/s", rate, "append", tokens=64)
    for what in ("save", "load"):
        table.add(what, of, "s", seconds_of, "state", what=what, slices=4)
    table.add("first token after a fork", of, "s", first_of, "prefix", how="fork", n=cells // 2)
    for name, why in refused.items():
        leave_out(table.rows, name, why)
    return table.rows


def by_sequences(who: Mapping[str, Contestant], sequences: int, plan: Plan) -> list[Row]:
    """Measure with several sequences, in 8,192 cells."""
    of, table = counted(sequences, "sequence"), Table(who, plan)
    n_seq_max = max(2, sequences)
    open_all(who, STORIES, n_ctx=8192, n_seq_max=n_seq_max, threads=1)
    table.ask("fill", n=16)
    calls = ("pos_max", "copy", "remove", "copy_over", "keep", "add", "div", "logits")
    for what in calls:
        table.call(what, of, plan.slices, rounds_of(what, n_seq_max))
    if sequences == SEQUENCES[0]:
        # One call per slice, after the decode that adds the sequence's token.
        table.call("add", of, plan.slices, 1, "first call after a decode: add")
    # All sequences share the first one's cells.
    table.ask("fill", n=256)
    table.ask("keep_state", n=256)
    table.ask("share")
    for what in ("save", "load"):
        table.add(what, of, "s", seconds_of, "state", what=what, slices=10)
    table.add("first token after a fork", of, "s", first_of, "prefix", how="fork", n=256)
    table.add("decode", of, "tokens/s", rate, "decode", parallel=sequences, steps=4, depth=8)
    table.add("prefill of 512", of, "tokens/s", rate, "prefill", parallel=sequences, tokens=512)
    return table.rows


def rounds_of(what: str, n_seq_max: int) -> int:
    """Return the passes over the sequences per slice, for about 64 calls in a row."""
    if what == "div":
        return HALVES if n_seq_max <= 16 else 1
    return max(1, 64 // (n_seq_max - 1)) if what in AGAIN_AND_AGAIN else 1


def seconds_of(answer: Answer) -> float:
    """Return the seconds of an answer."""
    return float(answer["seconds"])


def first_of(answer: Answer) -> float:
    """Return the seconds to the first token."""
    return float(answer["first"])


class Table:
    """Rows with the same contestants."""

    def __init__(self, who: Mapping[str, Contestant], plan: Plan):
        self.who, self.plan = who, plan
        self.rows: list[Row] = []

    def ask(self, do: str, **request: Any) -> None:
        """Send all contestants a request that is not measured."""
        for contestant in self.who.values():
            contestant.ask(do, **request)

    def add(self, name: str, of: str, unit: str, value: Any, do: str, **request: Any) -> Row:
        """Measure one row."""
        brief = do == "call" and request["what"] != "decode1"
        sides = {
            who: partial(c.ask, do, **request)
            for who, c in self.who.items()
            if brief or who != WHO[-1]
        }
        row = interleave(f"{name}, {of}", unit, sides, self.plan, value)
        show(row, *((1e6, "us") if unit == "s" else (1, unit)))
        self.rows.append(row)
        return row

    def call(self, what: str, of: str, slices: int, rounds: int = 1, label: str = "") -> Row:
        """Measure one call, with a sixth of the first table's time per sample."""
        request = {"what": what, "slices": slices, "rounds": rounds, "enough_ms": 10}
        return self.add(label or what, of, "s", seconds_of, "call", **request)
