"""Cost of values left in x87 registers for a decode: the reason for `rest_x87` in `guard/system.h`.

    python -m benchmarks.x87 [--rounds 60]

One process, one thread, the 30M model, sixteen sequences: decodes with a reset and a used unit take
turns, measured in the thread's CPU time, which other programs do not affect. A special control word
keeps the binding from resetting the unit. Needs an x86-64 processor and a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.models import medium
from pykvcache import LlamaBatch, LlamaContext, LlamaModel

SOURCE = """
unsigned in_use(void) {
    unsigned a, d;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(1));
    return a & 1;
}
void use(void) {
    for (int i = 0; i < 8; ++i) __asm__ volatile("fldpi");
    for (int i = 0; i < 8; ++i) __asm__ volatile("fstp %st(0)");
}
void set_control(unsigned w) {
    unsigned short v = w;
    __asm__ volatile("fldcw %0" : : "m"(v));
}
"""
PARALLEL, STEPS = 16, 8


def unit() -> ctypes.CDLL:
    """Compile functions that read and set the unit's state."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "unit.c", Path(folder) / "unit.so"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


def fastest(ctx: LlamaContext) -> float:
    """Return the CPU time of the fastest step of one token per sequence."""
    ctx.clear_kv_cache()
    best = float("inf")
    sequences, logits = np.arange(PARALLEL), np.ones(PARALLEL, bool)
    tokens = sequences + 5
    for at in range(STEPS):
        batch = LlamaBatch.from_arrays(tokens, np.full(PARALLEL, at), sequences, logits)
        start = time.thread_time()
        ctx.decode(batch)
        best = min(best, time.thread_time() - start)
    return best


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    x87 = unit()
    ctx = LlamaContext(
        LlamaModel(medium()), n_ctx=1024, n_seq_max=PARALLEL, n_threads=1, flash_attn="enabled"
    )
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(options.rounds + 1):
        for busy in (True, False) if turn % 2 else (False, True):
            x87.set_control(0x27F if busy else 0x37F)
            x87.use()
            took = fastest(ctx)
            assert bool(x87.in_use()) == busy
            if turn:
                times[busy].append(took)
    ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"in use {statistics.median(times[True]) * 1e3:.2f} ms, at rest "
        f"{statistics.median(times[False]) * 1e3:.2f} ms: {statistics.median(ratios):.3f} times "
        f"as long (quartiles {low:.3f} to {high:.3f}, {options.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
