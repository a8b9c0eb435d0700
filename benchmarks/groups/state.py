"""Group 4: saving and loading a sequence's state, beside memcpy of as many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, show
from benchmarks.models import BUILD, STORIES

TITLE = "state save and load"
SIZES = (1, 16, 64)
#: Bytes of one token of the story model: 4 layers, K and V, 2 heads of 64, f16.
PER_TOKEN = 2048
#: Who fills what: into a buffer that is there, or into a new object.
CALLS = ("memcpy", "save", "load", "load_over", "memcpy_new", "save_new")
#: Of a file: replace one, make one, load it into nothing; and write as many bytes that are there
#: already to a new one. None waits for the disk.
FILES = ("file_save", "file_make", "file_load", "file_write")


def load_everywhere(
    contestants: Mapping[str, Contestant], tokens: int, **shape: Any
) -> dict[str, Contestant]:
    """Give each contestant the same sequence; return those that took it."""
    path = BUILD / f"state-{tokens}.blob"
    took = {}
    for who, contestant in contestants.items():
        if who == "xllamacpp":
            continue
        contestant.ask("open", model=str(STORIES), n_batch=512, threads=1, **shape)
        if who == "pykvcache":
            contestant.ask("make_blob", n=tokens, path=str(path))
        answer = contestant.ask("load_blob", path=str(path))
        if "error" in answer or not answer.get("bytes"):
            answer = contestant.ask("fill", n=tokens)
            if "error" not in answer:
                answer = contestant.ask("keep_state", n=tokens)
        if "error" not in answer:
            took[who] = contestant
    path.unlink(missing_ok=True)
    return took


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure 1, 16 and 64 MiB of the story model's state."""
    rows = []
    for size in SIZES[: 2 if plan.quick else 3]:
        tokens = size * 1024 * 1024 // PER_TOKEN
        some = {w: c for w, c in contestants.items() if w != "cyllama" or size == 1}
        who = load_everywhere(some, tokens, n_ctx=tokens + 256, n_seq_max=1)
        slices = max(3, min(plan.slices, 64 // size))
        n_bytes = size * 1024 * 1024
        for what in CALLS:
            sides: dict[str, Any] = {
                name: partial(c.ask, "state", what=what, slices=slices) for name, c in who.items()
            }
            rows.append(
                interleave(
                    f"{what}, {size} MiB",
                    "bytes/s",
                    sides,
                    plan,
                    partial(rate, n_bytes),
                )
            )
            show(rows[-1], 1e-9, "GB/s")
        for what in FILES:
            sides = {
                name: partial(
                    c.ask,
                    "file",
                    what=what,
                    n=tokens,
                    slices=slices,
                    path=str(BUILD / f"sequence-{name}.file"),
                )
                for name, c in who.items()
            }
            rows.append(
                interleave(f"{what}, {size} MiB", "bytes/s", sides, plan, partial(rate, n_bytes))
            )
            show(rows[-1], 1e-9, "GB/s")
        for name in who:
            (BUILD / f"sequence-{name}.file").unlink(missing_ok=True)
        if size == SIZES[-1] or plan.quick:
            rows += progress(who, plan)
    return rows


def rate(n_bytes: int, answer: Answer) -> float:
    """Return bytes per second."""
    return n_bytes / float(answer["seconds"])


def progress(who: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure how fast another thread counts meanwhile."""

    def counted(answer: Answer) -> float:
        return float(answer["per_second"])

    rows = []
    for what in ("nothing", "save", "load"):
        sides: dict[str, Any] = {
            name: partial(c.ask, "progress", what=what) for name, c in who.items() if name != "C"
        }
        rows.append(interleave(f"counting during {what}", "1/s", sides, plan, counted, ["calls"]))
        show(rows[-1], 1e-6, "M/s", "pykvcache")
    return rows
