"""Group 1: what one call costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
    rows = {what: Row(what, "s") for what in (*EMPTY, *CALLS)}
    shape = {"n_ctx": 256, "n_seq_max": 64, "n_batch": 512, "threads": 1}
    for turn in range(plan.samples + 1):
        # New processes for each sample: where things happen to lie in memory is part of the noise.
        for contestant in who.values():
            contestant.close()
            contestant.ask("open", model=str(STORIES), **shape)
            contestant.ask("fill", n=16)
        for what, row in rows.items():
            asked = {"pykvcache": who["pykvcache"]} if what in EMPTY else who
            for name, contestant in asked.items():
                if name not in row.errors:
                    take(row, turn, name, ask(name, contestant, what, plan))
    for row in rows.values():
        show(row, 1e9, "ns")
    found = list(rows.values())
    for name, path in (("tiny", tiny()), ("stories", STORIES), ("30M", medium())):
        for threads in (1, 2):
            for contestant in who.values():
                sizes = {**shape, "n_seq_max": 2, "threads": threads}
                contestant.ask("open", model=str(path), **sizes)
                contestant.ask("fill", n=16)
            sides = {n: partial(ask, n, c, "decode1", plan) for n, c in who.items() if n != "thin"}
            label = f"decode1, {name}, {threads} thread{'s' if threads > 1 else ''}"
            found.append(interleave(label, "s", sides, plan, note=["statement"]))
            show(found[-1], 1e6, "us")
    return found


def ask(name: str, contestant: Contestant, what: str, plan: Plan) -> Answer:
    """Ask for one call."""
    asked = IN_C.get(what, what) if name == "C" else what
    return contestant.ask("call", what=asked, slices=plan.slices)


def take(row: Row, turn: int, name: str, answer: Answer) -> None:
    """Keep a sample, but for the round of warm-up."""
    if "error" in answer:
        row.errors[name] = answer["error"]
    elif turn:
        row.samples.setdefault(name, []).append(float(answer["seconds"]))
        row.notes.setdefault("statement", {})[name] = answer.get("statement", "")
