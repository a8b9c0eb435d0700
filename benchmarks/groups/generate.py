"""Group 9: many generations at once, cost of a step, idle cells, forks and syncs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.groups.throughput import rate
from benchmarks.harness import (
    AGAIN,
    Answer,
    Contestant,
    Plan,
    Row,
    closing,
    interleave,
    rotated,
    show,
)
from benchmarks.models import STORIES, tiny
from benchmarks.rows import ALONE
from benchmarks.settings import open_all

TITLE = "many generations at once"
OURS = "pykvcache"
#: Workloads, and the number of sequences at once.
WORKLOADS = {"best": ("best of 8", 8), "prompts": ("16 prompts", 16), "arrivals": ("arrivals", 16)}
PARALLEL = (1, 8, 16)
IDLE = 8000
LONG = 4096
#: Launches per sample of a step, which is short and depends on the memory layout.
LAUNCHES = 6
#: Runs per sample of a workload of 50 to 500 ms; the fastest counts.
SLICES = 3


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure the story model with two threads, and steps with one."""
    again = Contestant(AGAIN, contestants["C"].command)
    with closing({AGAIN: again}):
        everybody = {who: c for who, c in contestants.items() if who != "cyllama"}
        rows = workloads({**everybody, AGAIN: again}, plan)
        close = {who: c for who, c in {**everybody, AGAIN: again}.items() if who in NEAR}
        rows += steps(close, plan)
        return rows + sequences({OURS: contestants[OURS]}, plan)


NEAR = (OURS, "C", AGAIN)


def workloads(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure tokens per second of whole workloads, including prompts and sampling."""
    # A quick run has only the first workload.
    asked = list(WORKLOADS.items())[: 1 if plan.quick else 3]
    rows = {what: Row(f"{name}, {slots} at once", "tokens/s") for what, (name, slots) in asked}
    for turn in range(plan.samples + 1):
        anew(contestants, STORIES, n_ctx=4096, n_seq_max=16, threads=2)
        for what, (_, slots) in asked:
            for who in rotated([*contestants, ALONE], turn):
                if who not in rows[what].errors:
                    one = contestants[OURS if who == ALONE else who]
                    alone = {"alone": True} if who == ALONE else {}
                    ask = partial(one.ask, "many", what=what, slots=slots, **alone)
                    rows[what].take(who, fastest(ask, SLICES), rate, warm_up=not turn)
    for row in rows.values():
        show(row, 1, "tokens/s")
    return list(rows.values())


def fastest(ask: Callable[[], Answer], n: int) -> Answer:
    """Return the fastest of some answers, or the first that is an error."""
    answers = []
    for _ in range(n):
        answers.append(ask())
        if "error" in answers[-1]:
            return answers[-1]
    return max(answers, key=rate)


def anew(contestants: Mapping[str, Contestant], model: Path, **shape: Any) -> None:
    """Open the same context in new processes."""
    for contestant in contestants.values():
        contestant.close()
    open_all(contestants, model, **shape)


def steps(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure a step of a `BatchGenerator`, and the bare decode of the same batch in C.

    Each sample uses new processes, because the model's place in memory changes a decode by more
    than a step costs.
    """
    rows: list[Row] = []
    for name, path in (("tiny", tiny()), ("stories", STORIES)):
        those = {n: Row(f"step of {n}, {name}", "s") for n in PARALLEL[: 2 if plan.quick else 3]}
        for turn in range(LAUNCHES * plan.samples + 1):
            anew(contestants, path, n_ctx=2048, n_seq_max=16, threads=1)
            for n, row in those.items():
                for who in rotated(list(contestants), turn):
                    if who not in row.errors:
                        row.take(who, one_step(who, contestants[who], n), warm_up=not turn)
        rows += those.values()
    for row in rows:
        show(row, 1e6, "us")
    return rows


def one_step(who: str, contestant: Contestant, n: int) -> Answer:
    """Ask for the fastest of 32 steps, or decodes."""
    return contestant.ask("steps" if who == OURS else "decode", parallel=n, steps=32)


def sequences(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure a token next to idle cells, and edits of a long sequence."""
    ours = contestants[OURS]
    open_all(contestants, STORIES, n_ctx=3 * LONG, n_seq_max=32, threads=1)
    answers: list[Answer] = []

    cells = IDLE // 8 if plan.quick else IDLE

    def idle() -> Answer:
        answers.append(ours.ask("idle", cells=cells))
        return answers[-1]

    parked = interleave(f"token next to {cells:,} idle cells, parked", "s", {OURS: idle}, plan)
    rows = [parked]
    if OURS in parked.samples:
        for key, name in (("first", "the same at first"), ("alone", "the same alone")):
            rows.append(Row(name, "s", {OURS: [float(answer[key]) for answer in answers[1:]]}))
    for what in ("fork", "sync"):
        side = {OURS: partial(ours.ask, "sequence", what=what, n=LONG)}
        rows.append(interleave(f"{what} of {LONG:,} tokens", "s", side, plan))
    for row in rows:
        show(row, 1e6, "us")
    return rows
