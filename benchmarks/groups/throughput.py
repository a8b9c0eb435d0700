"""Group 2: tokens per second, decode and prefill, at 1, 4 and 16 sequences in parallel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.harness import (
    AGAIN,
    Answer,
    Contestant,
    Plan,
    Row,
    closing,
    counted,
    interleave,
    show,
)
from benchmarks.models import STORIES, medium
from benchmarks.settings import open_all

TITLE = "decode and prefill throughput"
PARALLEL = (1, 4, 16)


def rate(answer: Answer) -> float:
    """Return tokens per second."""
    return float(answer["tokens"]) / float(answer["seconds"])


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure both models with 1 and with 2 threads."""
    again = Contestant(AGAIN, contestants["C"].command)
    with closing({**contestants, AGAIN: again}) as everybody:
        return measure(everybody, plan)


def measure(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure both models in turns."""
    rows = []
    models = {"stories": (STORIES, 32, 512), "30M": (medium(), 8, 128)}
    for name, (path, steps, prompt) in models.items():
        for threads in (1, 2):
            open_all(contestants, path, n_ctx=1024, n_seq_max=16, threads=threads)
            requests: list[tuple[str, dict[str, Any]]] = [
                *(("decode", {"parallel": n, "steps": steps}) for n in PARALLEL),
                *(("prefill", {"parallel": n, "tokens": prompt}) for n in PARALLEL),
            ]
            for do, request in requests:
                sides: dict[str, Any] = {
                    who: partial(c.ask, do, **request) for who, c in contestants.items()
                }
                place = f"{request['parallel']} parallel, {counted(threads, 'thread')}"
                label = f"{do}, {name}, {place}"
                rows.append(interleave(label, "tokens/s", sides, plan, rate, ["tokens"]))
                show(rows[-1], 1, "tokens/s")
    return rows
