"""Cost of a call from Python into the compiled layer, in one build or two.

    python benchmarks/call_overhead.py
    python benchmarks/call_overhead.py --against OTHER_PYTHON [--rounds 9]

The second form compares two builds, for example abi3 and per-version: another interpreter with its
own pykvcache takes turns with this one, so that both have the same noise. Figures are medians over
rounds of each round's best slice, in nanoseconds per call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

HERE = Path(__file__).resolve()
# Many short slices, so that the best one was not interrupted.
REPEAT = 100


def measure(model_path: str) -> dict[str, float]:
    """Return nanoseconds per call of each operation, with this interpreter's package."""
    import numpy as np

    from pykvcache import LlamaContext, LlamaModel

    with LlamaModel(model_path) as model, LlamaContext(model, n_ctx=512, n_threads=1) as ctx:
        ctx.decode([5, 6, 7])
        native, token = ctx.native, np.array([8], np.int32)

        def decode_one() -> None:
            ctx.decode(token)
            ctx.clear_kv_cache_seq(0, 3, None)

        calls = {
            "native.is_closed": (lambda: native.is_closed, 5_000),
            "native.perf_reset()": (native.perf_reset, 5_000),
            "native.seq_pos(0, True)": (lambda: native.seq_pos(0, True), 5_000),
            "ctx.kv_cache_seq_pos_max(0)": (lambda: ctx.kv_cache_seq_pos_max(0), 5_000),
            "decode one token, remove it": (decode_one, 10),
        }
        return {
            name: min(timeit.repeat(call, number=number, repeat=REPEAT)) / number * 1e9
            for name, (call, number) in calls.items()
        }


def run_in(python: str, model_path: str) -> dict[str, float]:
    """Measure in a process of ``python``."""
    command = [python, str(HERE), "--model", model_path, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def tiny_model(folder: str) -> str:
    """Write the tests' tiny llama, whose decode is mostly overhead."""
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from support.models import make_model

    return os.fspath(make_model("llama", Path(folder)))


def compare(pythons: list[str], rounds: int, model_path: str) -> None:
    """Print a row per operation and a column per interpreter."""
    seen: list[dict[str, list[float]]] = [{} for _ in pythons]
    for _ in range(rounds):
        for python, column in zip(pythons, seen, strict=True):
            for name, value in run_in(python, model_path).items():
                column.setdefault(name, []).append(value)
    print("| ns per call, median of", rounds, "|", " | ".join(pythons), "|")
    print("|---|" + "---:|" * len(pythons))
    for name in seen[0]:
        cells = [f"{statistics.median(column[name]):,.0f}" for column in seen]
        print(f"| `{name}` |", " | ".join(cells), "|")


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", action="append", default=[], metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="a GGUF file; the tests' tiny llama by default")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_path = options.model or tiny_model(folder)
        if options.json:
            print(json.dumps(measure(model_path)))
        else:
            compare([sys.executable, *options.against], options.rounds, model_path)


if __name__ == "__main__":
    main()
