"""Gain of a second context on the same model: ``python benchmarks/threads.py [MODEL]``.

Two contexts, one thread each, decode the same tokens one after the other, then in parallel in two
threads of this process. The ratio of the times is 2 on two idle cores that share nothing. For
comparison, two processes do the same without sharing an interpreter, lock or model. Prints medians
of several rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from pykvcache import LlamaContext, LlamaModel, embedded_model_path


def work(ctx: LlamaContext, prompt: int, steps: int) -> None:
    """Decode a prompt, then token by token."""
    ctx.clear_kv_cache()
    ctx.decode(np.arange(prompt) % 200 + 5)
    for token in range(steps):
        ctx.decode([5 + token % 200])


def open_context(model: LlamaModel) -> LlamaContext:
    """Open a context for one thread."""
    return LlamaContext(model, n_ctx=1024, n_threads=1, n_seq_max=1)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(contexts: list[LlamaContext], prompt: int, steps: int) -> None:
    """Run the contexts one after the other."""
    for ctx in contexts:
        work(ctx, prompt, steps)


def in_threads(contexts: list[LlamaContext], prompt: int, steps: int) -> None:
    """Run all contexts in parallel."""
    threads = [threading.Thread(target=work, args=(ctx, prompt, steps)) for ctx in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def worker(path: Path, prompt: int, steps: int, rounds: int, gate: Barrier) -> None:
    """Work once per round, between two barriers."""
    with LlamaModel(path) as model, open_context(model) as ctx:
        work(ctx, prompt, steps)
        for _ in range(rounds):
            gate.wait()
            work(ctx, prompt, steps)
            gate.wait()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=embedded_model_path())
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    size = options.prompt, options.steps
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(3)
    workers = [
        spawn.Process(target=worker, args=(options.model, *size, options.rounds, gate), daemon=True)
        for _ in range(2)
    ]
    for process in workers:
        process.start()
    with LlamaModel(options.model) as model:
        contexts = [open_context(model) for _ in range(2)]
        for ctx in contexts:
            work(ctx, *size)
        threads, processes = [], []
        for _ in range(options.rounds):
            gate.wait()  # both have loaded
            apart = timed(gate.wait)
            alone = timed(lambda: in_turn(contexts, *size))
            together = timed(lambda: in_threads(contexts, *size))
            threads.append(alone / together)
            processes.append(alone / apart)
            print(
                f"in turn {alone:.3f} s, two threads {together:.3f} s: {threads[-1]:.2f}, "
                f"two processes {apart:.3f} s: {processes[-1]:.2f}"
            )
        middle = statistics.median(threads), statistics.median(processes)
        print(
            f"medians: threads {middle[0]:.2f}, processes {middle[1]:.2f} times as fast as in turn"
        )
    for process in workers:
        process.join()


if __name__ == "__main__":
    main()
