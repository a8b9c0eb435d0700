"""Group 4: saving and loading a sequence's state, beside memcpy of as many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, leave_out, show
from benchmarks.models import BUILD, STORIES
from benchmarks.settings import open_all
from benchmarks.setup import OURS

TITLE = "state save and load"
SIZES = (1, 16, 64)
#: Bytes of one token of the story model: 4 layers, K and V, 2 heads of 64, f16.
PER_TOKEN = 2048
#: Who fills what: into a buffer that is there, or into a new object.
CALLS = ("memcpy", "save", "load", "load_over", "memcpy_new", "save_new")
#: Of a file: replace one, make one, load it into nothing; and write as many bytes that are there
#: already to a new one. None waits for the disk.
FILES = ("file_save", "file_make", "file_load", "file_write")
#: What the main thread does while another one counts: first work without the interpreter's lock
#: (a hash, a memcpy) and with it (copying an object), to compare with.
WORK = ("hashing", "memcpy", "copying", "save", "save_new", "load")


def load_everywhere(
    contestants: Mapping[str, Contestant], tokens: int, **shape: int
) -> dict[str, str]:
    """Give each contestant the same sequence; return why some could not take it."""
    path = BUILD / f"state-{tokens}.blob"
    opened = open_all(contestants, STORIES, **shape)
    contestants[OURS].ask("make_blob", n=tokens, path=str(path))
    refused = {}
    for who, contestant in contestants.items():
        answer = opened[who]
        if "error" not in answer:
            answer = contestant.ask("load_blob", path=str(path))
        if "error" not in answer and not answer.get("bytes"):
            answer = {"error": "it refused the state"}
        if "error" in answer:
            refused[who] = answer["error"]
    path.unlink(missing_ok=True)
    return refused


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure 1, 16 and 64 MiB of the story model's state."""
    rows = []
    sizes = SIZES[: 2 if plan.quick else 3]
    # Two threads, of which only ours makes use; then ours with one, beside C.
    for threads, size in [*((2, size) for size in sizes), *((1, size) for size in sizes[1:])]:
        tokens = size * 1024 * 1024 // PER_TOKEN
        shape = {"n_ctx": tokens + 256, "n_seq_max": 1, "threads": threads}
        refused = load_everywhere(contestants, tokens, **shape)
        who = {name: c for name, c in contestants.items() if name not in refused}
        found = measure(who, size, threads, plan)
        for name in who:
            Path(path_of(name)).unlink(missing_ok=True)
        if threads == 1:
            for name in contestants:
                if name not in (OURS, "C"):
                    leave_out(found, name, "copies with one thread in the rows of two, too")
        # Both of the machine's cores are needed: one that saves and one that counts.
        if (threads, size) == (1, sizes[-1]):
            found += progress(who, plan)
        for name in contestants:
            leave_out(
                (r for r in found if r.name.startswith("file_write")), name, "measured once, in C"
            )
        leave_out(
            (r for r in found if not r.name.startswith("file_")),
            "xllamacpp",
            "its states are files",
        )
        for name, why in refused.items():
            leave_out(found, name, why)
        rows += found
    return rows


def measure(who: Mapping[str, Contestant], size: int, threads: int, plan: Plan) -> list[Row]:
    """Let all take turns at each call."""
    n_bytes = size * 1024 * 1024
    rows = []
    for what in (*CALLS, *FILES) if threads > 1 else CALLS:
        request: dict[str, Any] = {
            "what": what,
            "slices": max(3, min(plan.slices, 64 // size)),
        }
        file = {"n": n_bytes // PER_TOKEN}
        sides: dict[str, Any] = {
            name: partial(c.ask, "state", **request)
            if what in CALLS
            else partial(c.ask, "file", **request, **file, path=path_of(name))
            for name, c in who.items()
            if name == "C" or (what != "file_write" and (threads > 1 or name == OURS))
        }
        label = f"{what}, {size} MiB" + (", 1 thread" if threads == 1 else "")
        rows.append(interleave(label, "bytes/s", sides, plan, partial(rate, n_bytes)))
        show(rows[-1], 1e-9, "GB/s")
    return rows


def path_of(name: str) -> str:
    """Return the file that a contestant writes."""
    return str(BUILD / f"sequence-{name}.file")


def rate(n_bytes: int, answer: Answer) -> float:
    """Return bytes per second."""
    return n_bytes / float(answer["seconds"])


def progress(who: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure how fast another thread counts meanwhile; all kinds of work within each round."""
    pythons = {name: c for name, c in who.items() if name not in ("C", "xllamacpp")}
    sides: dict[str, Any] = {
        f"{name} {what}": partial(c.ask, "progress", what=what)
        for what in WORK
        for name, c in pythons.items()
    }
    mixed = interleave("counting", "1/s", sides, plan, lambda a: float(a["per_second"]))
    rows = []
    for what in WORK:
        row = Row(f"counting during {what}", "1/s")
        for name in pythons:
            side = f"{name} {what}"
            if side in mixed.samples:
                row.samples[name] = mixed.samples[side]
            if side in mixed.errors:
                row.errors[name] = mixed.errors[side]
        leave_out([row], "C", "no interpreter, no lock")
        leave_out([row], "xllamacpp", "its server works in a thread of its own")
        show(row, 1e-6, "M/s", "pykvcache")
        rows.append(row)
    return rows
