"""Group 6: resident memory, import time, size on disk."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import setup
from benchmarks.harness import Answer, Contestant, Plan, Row, few, interleave, leave_out, show
from benchmarks.models import medium
from benchmarks.settings import open_one

TITLE = "memory, import time, size"
IMPORTS = {
    "pykvcache": "from pykvcache import LlamaContext",
    "portable": "from pykvcache import LlamaContext",
    "llama-cpp-python": "import llama_cpp",
    "cyllama": "from cyllama.llama import llama_cpp",
    "xllamacpp": "import xllamacpp",
}
CELLS = 4096
FILL = 128


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure each figure in new processes."""
    rows = resident(contestants, plan) + imports(contestants, plan)
    rows.append(sizes(contestants))
    return rows


def resident(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure the memory of a context and of a cached token."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}

    def look(name: str) -> Answer:
        found = one_look(name, contestants[name])
        if "error" not in found:
            seen[name].append(found)
        return found

    sides: dict[str, Any] = {name: partial(look, name) for name in contestants}
    first = interleave(
        "process before a model", "bytes", sides, few(plan), lambda a: float(a["process"])
    )
    rows = [first]
    labels = {
        "context": f"context of {CELLS} cells",
        "cell": "one more cell",
        "token": "one cached token, in addition to its cell",
    }
    for key, label in labels.items():
        row = Row(label, "bytes", errors=dict(first.errors))
        row.samples = {
            who: [found[key] for found in s[1:] if key in found]
            for who, s in seen.items()
            if who in first.samples and s and key in s[0]
        }
        rows.append(row)
    leave_out(rows, "xllamacpp", "a server cannot be recreated without its model")
    for row in rows:
        show(row, 2**-10, "KiB")
    return rows


def one_look(name: str, contestant: Contestant) -> Answer:
    """Measure the resident size once while a context is created and filled."""
    contestant.close()
    shape: dict[str, Any] = {"n_seq_max": 1, "threads": 1}

    def size() -> float:
        return float(contestant.ask("rss").get("bytes", 0))

    process = size()
    contestant.ask("facts")
    opened = open_one(contestant, medium(), n_ctx=512, **shape)
    if "error" in opened:
        return opened
    if name == "xllamacpp":
        # A server cannot be recreated in its process without loading the model again.
        return {"process": process}
    small = size()
    open_one(contestant, n_ctx=CELLS, **shape)
    middle = size()
    open_one(contestant, n_ctx=2 * CELLS, **shape)
    large = size()
    contestant.ask("fill", n=FILL)
    # The second fill reuses the first one's compute buffers and batches.
    contestant.ask("fill", n=1)
    one = size()
    contestant.ask("fill", n=FILL)
    filled = size()
    contestant.close()
    cell = (large - middle) / CELLS
    return {
        "process": process,
        "context": middle - small + 512 * cell,
        "cell": cell,
        "token": (filled - one) / FILL,
    }


def imports(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure imports in fresh interpreters, and NumPy's in ours."""

    def seconds(python: str, statement: str) -> Answer:
        code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {"error": done.stderr.strip().splitlines()[-1]}
        return {"seconds": float(done.stdout.split()[-1])}

    sides: dict[str, Any] = {
        name: partial(seconds, str(setup.python_of(name)), code)
        for name, code in IMPORTS.items()
        if name in contestants and contestants[name].missing is None
    }
    ours = str(setup.python_of("pykvcache"))
    sides["numpy"] = lambda: seconds(ours, "import numpy")
    sides["array caches alone"] = lambda: seconds(ours, "import pykvcache.arrays")
    row = interleave("import", "s", sides, plan)
    leave_out([row], "C", "a program: nothing to import")
    row.errors |= {n: c.missing for n, c in contestants.items() if c.missing is not None}
    show(row, 1e3, "ms", "numpy")
    return [row]


def sizes(contestants: Mapping[str, Contestant]) -> Row:
    """Return the sizes of the packed wheels."""
    row = Row("wheel", "bytes")
    for name, contestant in contestants.items():
        if name == "C":
            row.errors[name] = "no wheel"
            continue
        if contestant.missing is not None:
            row.errors[name] = contestant.missing
            continue
        wheel = setup.wheel_of(name)
        row.samples[name] = [float(wheel.stat().st_size)]
        row.notes[name] = wheel.name
    show(row, 1e-6, "MB")
    return row
