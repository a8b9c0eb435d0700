"""Group 4: saving and loading a sequence's state, compared with memcpy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Answer, Contestant, Plan, Row, interleave, leave_out, show
from benchmarks.models import BUILD, STORIES, many_bytes
from benchmarks.settings import open_all
from benchmarks.setup import OURS

TITLE = "state save and load"
SIZES = (1, 16, 64)
#: Bytes of one token of the story model: 4 layers, K and V, 2 heads of 64, f16.
PER_TOKEN = 2048
#: The same for `many_bytes`: 16 layers, 4 heads of 128.
PER_TOKEN_WIDE = 32_768
#: Copies: to an existing buffer, or to a new object.
CALLS = ("memcpy", "save", "load", "load_over", "memcpy_new", "save_new")
#: Files: replace, create, load into an empty sequence, and write existing bytes to a new file.
#: None waits for the disk.
FILES = ("file_save", "file_make", "file_load", "file_write")
#: Work of the main thread while another one counts. For comparison: a hash and a memcpy without
#: the GIL, copying an object with it.
WORK = ("hashing", "memcpy", "copying", "save", "save_new", "load")


class Case(NamedTuple):
    """A context and its measurements."""

    size: int
    threads: int = 2
    wide: bool = False
    everybody: bool = True
    calls: tuple[str, ...] = CALLS + FILES

    @property
    def tokens(self) -> int:
        """Number of cells."""
        return self.size * 1024 * 1024 // (PER_TOKEN_WIDE if self.wide else PER_TOKEN)

    @property
    def label(self) -> str:
        """Suffix of row names."""
        alone = ", 1 thread" if self.threads == 1 else ""
        return f"{self.size} MiB{alone}{', 32 KiB per cell' if self.wide else ''}"


#: All with two threads, which only ours uses; then ours and C with large cells, and one thread.
CASES = (
    *(Case(size) for size in SIZES),
    Case(64, wide=True, everybody=False, calls=CALLS),
    Case(16, threads=1, everybody=False, calls=CALLS),
)


def load_everywhere(
    contestants: Mapping[str, Contestant], tokens: int, model: Path = STORIES, **shape: int
) -> dict[str, str]:
    """Give each contestant the same sequence; return the errors."""
    path = BUILD / f"state-{tokens}.blob"
    opened = open_all(contestants, model, **shape)
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
    for case in CASES:
        if not (plan.quick and case.size > 16):
            rows += measure(case, contestants, plan)
    # Needs both cores: one saves, one counts.
    tokens = SIZES[1 if plan.quick else 2] * 1024 * 1024 // PER_TOKEN
    refused = load_everywhere(contestants, tokens, n_ctx=tokens + 256, n_seq_max=1, threads=1)
    counting = progress({n: c for n, c in contestants.items() if n not in refused}, plan)
    for name, why in refused.items():
        leave_out(counting, name, why)
    return rows + counting


def measure(case: Case, contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure each call in turns."""
    asked = {n: c for n, c in contestants.items() if case.everybody or n in (OURS, "C")}
    refused = load_everywhere(
        asked,
        case.tokens,
        many_bytes() if case.wide else STORIES,
        n_ctx=case.tokens + 256,
        n_seq_max=1,
        threads=case.threads,
    )
    who = {name: c for name, c in asked.items() if name not in refused}
    rows = []
    for what in case.calls:
        most = plan.slices if what in CALLS else 16
        request = {"what": what, "slices": max(3, min(most, 64 // case.size))}
        sides: dict[str, Any] = {
            name: partial(c.ask, "state", **request)
            if what in CALLS
            else partial(c.ask, "file", **request, n=case.tokens, path=path_of(name))
            for name, c in who.items()
            if name == "C" or what != "file_write"
        }
        worth = partial(rate, case.size * 1024 * 1024)
        rows.append(interleave(f"{what}, {case.label}", "bytes/s", sides, plan, worth))
        show(rows[-1], 1e-9, "GB/s")
    for name in who:
        Path(path_of(name)).unlink(missing_ok=True)
    for name in contestants:
        bare = (row for row in rows if row.name.startswith("file_write"))
        leave_out(bare, name, "measured once, in C")
        if name not in asked:
            leave_out(rows, name, "skipped, because its copies are llama.cpp's, as in C")
    copies = (row for row in rows if not row.name.startswith("file_"))
    leave_out(copies, "xllamacpp", "its states are files")
    for name, why in refused.items():
        leave_out(rows, name, why)
    return rows


def path_of(name: str) -> str:
    """Return the path of a contestant's file."""
    return str(BUILD / f"sequence-{name}.file")


def rate(n_bytes: int, answer: Answer) -> float:
    """Return bytes per second."""
    return n_bytes / float(answer["seconds"])


def progress(who: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure how fast another thread counts during each kind of work, in turns."""
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
