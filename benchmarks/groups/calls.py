"""Group 1: what one call costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, show
from benchmarks.models import STORIES, medium, tiny

TITLE = "cost of one call"

#: Each call with the empty method that takes as many arguments.
CALLS = {
    "pos_max": "empty1",
    "pos_min": "empty1",
    "can_shift": "empty0",
    "copy": "empty2",
    "copy_part": "empty4",
    "copy_over": "empty2",
    "remove": "empty1",
    "remove_part": "empty4",
    "keep": "empty1",
    "add": "empty4",
    "div": "empty4",
    "can_resume": "empty2",
    "logits": "empty0",
    "batch1": "empty2",
    "batch1_list": "empty2",
    "batch512": "empty2",
    "batch512_list": "empty2",
    "batch512_new": "empty4",
}
EMPTY = ("empty0", "empty1", "empty2", "empty4")
#: What C is asked for where it has one name for what has two in Python.
IN_C = {"batch1_list": "batch1", "batch512_list": "batch512", "batch512_new": "batch512"}


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure every call on the story model, and one-token decodes on three models."""
    who = {name: c for name, c in contestants.items() if name != "xllamacpp"}
    rows = []
    shape = {"n_ctx": 256, "n_seq_max": 64, "n_batch": 512, "threads": 1}
    for contestant in who.values():
        contestant.ask("open", model=str(STORIES), **shape)
        contestant.ask("fill", n=16)
    for what in EMPTY:
        side = {"pykvcache": partial(who["pykvcache"].ask, "call", what=what)}
        rows.append(interleave(what, "s", side, plan, note=["statement"]))
    for what in CALLS:
        rows.append(one_call(who, what, plan))
        show(rows[-1], 1e9, "ns")
    for name, path in (("tiny", tiny()), ("stories", STORIES), ("30M", medium())):
        for threads in (1, 2):
            for contestant in who.values():
                contestant.ask(
                    "open", model=str(path), **{**shape, "n_seq_max": 2, "threads": threads}
                )
                contestant.ask("fill", n=16)
            row = one_call(who, "decode1", plan, slices=4 if name == "30M" else 20)
            row.name = f"decode1, {name}, {threads} thread{'s' if threads > 1 else ''}"
            rows.append(row)
            show(row, 1e6, "us")
    return rows


def one_call(
    who: Mapping[str, Contestant], what: str, plan: Plan, slices: int | None = None
) -> Row:
    """Measure one call of everybody."""

    def side(name: str, contestant: Contestant) -> Answer:
        asked = IN_C.get(what, what) if name == "C" else what
        return contestant.ask("call", what=asked, slices=slices or plan.slices)

    sides: dict[str, Any] = {
        name: partial(side, name, contestant) for name, contestant in who.items()
    }
    return interleave(what, "s", sides, plan, note=["statement"])
