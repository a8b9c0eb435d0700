"""Group 8: the portable wheel compared with a native one, and a model over RPC."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import remote, setup
from benchmarks.groups.footprint import imports
from benchmarks.harness import Answer, Contestant, Plan, Row, closing, interleave, show
from benchmarks.models import WEIGHTS, medium
from benchmarks.settings import open_all

TITLE = "the portable wheel and a native build"
PORTABLE, NATIVE, AGAIN = "portable", "native", "native again"
STEPS, PROMPT = 8, 128


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure speed, import and size, then a model over two servers."""
    ours = contestants[setup.OURS]
    everybody = {
        PORTABLE: setup.portable(),
        NATIVE: Contestant(NATIVE, ours.command, ours.env),
        AGAIN: Contestant(AGAIN, ours.command, ours.env),
    }
    with closing(everybody):
        rows = speed(everybody, plan)
    (row,) = imports({PORTABLE: everybody[PORTABLE], setup.OURS: ours}, plan)
    row.samples[NATIVE] = row.samples.pop(setup.OURS, [])
    wheels = Row("wheel", "bytes")
    for who, name in ((PORTABLE, PORTABLE), (NATIVE, setup.OURS)):
        if everybody[who].missing is None:
            wheels.samples[who] = [float(setup.wheel_of(name).stat().st_size)]
            wheels.notes[who] = chosen(name)
    show(wheels, 1e-6, "MB", NATIVE)
    return [*rows, row, wheels, *remote.run(plan)]


def chosen(name: str) -> str:
    """Return the copy of ggml's CPU code that a contestant uses."""
    code = "import pykvcache; print(pykvcache.system_info()['cpu'])"
    command = [str(setup.python_of(name)), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def rate(answer: Answer) -> float:
    """Return tokens per second of the thread's CPU time, which other programs do not affect."""
    return float(answer["tokens"]) / float(answer["thread_seconds"])


def speed(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure the 30M model with each type of weights, with one thread, in turns."""
    rows = []
    for weights in WEIGHTS:
        open_all(contestants, medium(weights), n_ctx=512, n_seq_max=1, threads=1)
        requests: list[tuple[str, dict[str, Any]]] = [
            ("decode", {"parallel": 1, "steps": STEPS}),
            ("prefill", {"parallel": 1, "tokens": PROMPT}),
        ]
        for do, request in requests:
            sides: dict[str, Any] = {
                who: partial(c.ask, do, **request) for who, c in contestants.items()
            }
            rows.append(interleave(f"{do}, 30M {weights}", "tokens/s", sides, plan, rate))
            show(rows[-1], 1, "tokens/s", NATIVE)
    return rows
