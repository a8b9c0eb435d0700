"""What a second context on the same model gains: ``python benchmarks/threads.py [MODEL]``.

Two contexts, one thread each, decode the same tokens first one after the other, then side by
side. The ratio of the two times is 2 on two idle cores; the median of several rounds is printed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from pykvcache import LlamaContext, LlamaModel, embedded_model_path


def work(ctx: LlamaContext, prompt: int, steps: int) -> None:
    ctx.clear_kv_cache()
    ctx.decode(np.arange(prompt) % 200 + 5)
    for token in range(steps):
        ctx.decode([5 + token % 200])


def one_after_the_other(contexts: list[LlamaContext], prompt: int, steps: int) -> float:
    start = time.perf_counter()
    for ctx in contexts:
        work(ctx, prompt, steps)
    return time.perf_counter() - start


def side_by_side(contexts: list[LlamaContext], prompt: int, steps: int) -> float:
    threads = [threading.Thread(target=work, args=(ctx, prompt, steps)) for ctx in contexts]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=embedded_model_path())
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with LlamaModel(options.model) as model:
        contexts = [LlamaContext(model, n_ctx=1024, n_threads=1, n_seq_max=1) for _ in range(2)]
        for ctx in contexts:
            work(ctx, options.prompt, options.steps)
        ratios = []
        for _ in range(options.rounds):
            alone = one_after_the_other(contexts, options.prompt, options.steps)
            together = side_by_side(contexts, options.prompt, options.steps)
            ratios.append(alone / together)
            print(f"in turn {alone:.3f} s, side by side {together:.3f} s: {ratios[-1]:.2f}")
        print(f"median ratio {statistics.median(ratios):.2f}, best {max(ratios):.2f}")


if __name__ == "__main__":
    main()
