"""Group 7: how the figures of groups 1 to 4 grow with cells and with sequences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.groups.state import load_everywhere
from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, show
from benchmarks.models import STORIES

TITLE = "growth with cells and sequences"
CELLS = (1024, 4096, 16_384, 65_536)
SEQUENCES = (1, 4, 16, 64, 256)
WHO = ("pykvcache", "C", "llama-cpp-python")


def rate(answer: Answer) -> float:
    """Return tokens per second."""
    return float(answer["tokens"]) / float(answer["seconds"])


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure with the story model; a half of the cells is held by one sequence."""
    who = {name: contestants[name] for name in WHO if name in contestants}
    rows = []
    for cells in CELLS[: 2 if plan.quick else 4]:
        there = load_everywhere(who, cells // 2, n_ctx=cells, n_seq_max=4)
        slices = plan.slices if cells <= 4096 else 4
        for what in ("pos_max", "copy", "remove", "remove_part", "add", "decode1"):
            sides = ask(there, "call", what=what, slices=slices)
            rows.append(interleave(f"{what}, {cells} cells", "s", sides, plan))
            show(rows[-1], 1e6, "us")
        for what in ("save", "load"):
            sides = ask(there, "state", what=what, slices=4)
            rows.append(interleave(f"{what}, {cells} cells", "s", sides, plan))
            show(rows[-1], 1e6, "us")
        sides = ask(there, "prefix", how="fork", n=cells // 2)
        rows.append(
            interleave(
                f"first token after a fork, {cells} cells",
                "s",
                sides,
                plan,
                lambda a: float(a["first"]),
            )
        )
        show(rows[-1], 1e3, "ms")
    for sequences in SEQUENCES:
        shape = {"n_ctx": 8192, "n_seq_max": max(2, sequences), "n_batch": 512, "threads": 1}
        for contestant in who.values():
            contestant.ask("open", model=str(STORIES), **shape)
            contestant.ask("fill", n=16)
        for what in ("pos_max", "copy", "remove", "keep", "add"):
            sides = ask(who, "call", what=what, slices=plan.slices)
            rows.append(interleave(f"{what}, {sequences} sequences", "s", sides, plan))
            show(rows[-1], 1e9, "ns")
        sides = ask(who, "decode", parallel=sequences, steps=4, depth=8)
        rows.append(interleave(f"decode, {sequences} sequences", "tokens/s", sides, plan, rate))
        show(rows[-1], 1, "tokens/s")
    return rows


def ask(who: Mapping[str, Contestant], do: str, **request: Any) -> dict[str, Any]:
    """Return the same request for everybody."""
    return {name: partial(c.ask, do, **request) for name, c in who.items()}
