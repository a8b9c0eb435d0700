"""Cost of waiting threads: one token and a prompt, by threads and wait policy, idle and loaded.

    python -m benchmarks.waiting [--model FILE] [--rounds 5] [--load 2]

Figures are medians of rounds in processes that take turns. Loaded means that `--load` other
processes compute all the time. The policies are those of ``OMP_WAIT_POLICY``: unset spins for at
most 20 us (1 ms between two decodes), "passive" sleeps at once, "active" spins for 2 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.models import STORIES, medium

WORK = """
import sys, time
import numpy as np
from pykvcache import LlamaContext, LlamaModel
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, n_ctx=512, n_threads=int(sys.argv[2]))
prompt = np.arange(5, 261)
ctx.decode(prompt)
ctx.clear_kv_cache()
begin = time.perf_counter()
ctx.decode(prompt)
middle = time.perf_counter()
for i in range(60):
    ctx.decode([7 + i])
print((time.perf_counter() - middle) / 60 * 1e6, (middle - begin) * 1e3)
"""


def once(model: Path, threads: int, policy: str | None) -> tuple[float, float]:
    """Return microseconds of a token and milliseconds of a prompt of 256."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if policy:
        env["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-c", WORK, os.fspath(model), str(threads)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    token, prompt = map(float, done.stdout.split())
    return token, prompt


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=int, default=os.cpu_count() or 2)
    options = parser.parse_args()
    cases = [(1, None), *((n, p) for n in (2, 4) for p in (None, "passive", "active"))]
    for model in options.model or [STORIES, medium()]:
        for load in (0, options.load):
            busy = [subprocess.Popen([sys.executable, "-c", "while 1: 0"]) for _ in range(load)]
            try:
                rounds = [[once(model, *case) for case in cases] for _ in range(options.rounds)]
            finally:
                for process in busy:
                    process.kill()
            for i, (threads, policy) in enumerate(cases):
                token, prompt = (statistics.median(r[i][k] for r in rounds) for k in (0, 1))
                print(
                    f"{model.name}, load {load}, {threads} threads, {policy or 'unset'}: "
                    f"{token:,.0f} us a token, {prompt:,.1f} ms a prompt",
                    flush=True,
                )


if __name__ == "__main__":
    main()
