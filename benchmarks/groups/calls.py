"""Group 1: cost of one call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from benchmarks.harness import (
    AGAIN,
    Answer,
    Contestant,
    Plan,
    Row,
    closing,
    counted,
    interleave,
    leave_out,
    rotated,
    show,
)
from benchmarks.models import STORIES, medium, tiny
from benchmarks.settings import open_all
from benchmarks.setup import OURS

TITLE = "cost of one call"

#: Each call, with the empty method of as many arguments.
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
SHAPE = {"n_ctx": 256, "threads": 1}
#: C's names of calls that have two names in Python.
IN_C = {"batch1_list": "batch1", "batch512_list": "batch512", "batch512_new": "batch512"}


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure every call on the story model, and one-token decodes on three models."""
    who = {name: c for name, c in contestants.items() if name != "xllamacpp"}
    rows = one_call(who, plan) + one_token(who, plan)
    theirs = [row for row in rows if row.name not in EMPTY]
    leave_out(theirs, "xllamacpp", "a server: no context, memory or batch to call")
    leave_out(theirs, "thin", "there for the memory operations alone")
    return rows


def one_call(who: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure every call in new processes for each sample."""
    rows = {what: Row(what, "s") for what in (*EMPTY, *CALLS)}
    for turn in range(plan.samples + 1):
        # New processes, because the memory layout is part of the noise.
        for contestant in who.values():
            contestant.close()
        open_all(who, STORIES, n_seq_max=64, **SHAPE)
        for contestant in who.values():
            contestant.ask("fill", n=16)
        for what, row in rows.items():
            asked = [OURS] if what in EMPTY else rotated(list(who), turn)
            for name in asked:
                if name not in row.errors:
                    answer = ask(name, who[name], what, plan)
                    row.take(name, answer, note=["statement"], warm_up=not turn)
    for row in rows.values():
        show(row, 1e9, "ns")
    return list(rows.values())


def one_token(who: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure decodes of one token; the same C program twice shows the noise."""
    again = Contestant(AGAIN, who["C"].command)
    rows = []
    with closing({AGAIN: again}):
        sides = {name: c for name, c in who.items() if name != "thin"} | {AGAIN: again}
        for name, path in (("tiny", tiny()), ("stories", STORIES), ("30M", medium())):
            for threads in (1, 2):
                open_all(sides, path, n_seq_max=2, **{**SHAPE, "threads": threads})
                for contestant in sides.values():
                    contestant.ask("fill", n=16)
                asks = {n: partial(ask, n, c, "decode1", plan) for n, c in sides.items()}
                label = f"decode1, {name}, {counted(threads, 'thread')}"
                rows.append(interleave(label, "s", asks, plan, note=["statement"]))
                show(rows[-1], 1e6, "us")
    return rows


def ask(name: str, contestant: Contestant, what: str, plan: Plan) -> Answer:
    """Ask for one call."""
    asked = IN_C.get(what, what) if name in ("C", AGAIN) else what
    return contestant.ask("call", what=asked, slices=plan.slices)
