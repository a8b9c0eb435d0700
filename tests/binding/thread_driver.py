"""Threads that do everything to the same contexts: ``python -m binding.thread_driver MODEL``.

Contexts are used, aborted, closed and replaced under each other. Exit status 0: nobody got
anything but documented exceptions, and a fresh context decodes as at the start.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pykvcache import KvCacheError, LlamaContext, LlamaModel, Sampler
from support.models import RIGHT

N_SEQ = 4
Step = Callable[["Shared", LlamaContext, Random], object]


class Shared:
    """Shared by the threads: one model, one sampler, one context at a time."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = Random(seed)
        self.model = LlamaModel(path)
        self.sampler = Sampler(temperature=1.0, presence_penalty=1.0)
        self.expected = self.fresh()
        self.ctx = self.open()
        self.seen: Counter[str] = Counter()
        self.errors: list[BaseException] = []

    def fresh(self) -> Any:
        with LlamaContext(self.model, n_ctx=256, n_threads=1) as ctx:
            ctx.decode([5, 6, 7])
            return ctx.logits()

    def open(self) -> LlamaContext:
        return LlamaContext(
            self.model,
            n_ctx=512,
            n_seq_max=N_SEQ,
            n_threads=self.rng.choice([1, 2]),
            n_batch=self.rng.choice([16, 256]),
            kv_unified=self.rng.random() < 0.7,
            embeddings=self.rng.random() < 0.3,
        )

    def replace(self) -> None:
        self.ctx = self.open()

    def work(self, rng: Random, steps: int) -> None:
        try:
            for _ in range(steps):
                ctx = self.ctx
                if ctx.is_closed:
                    self.replace()
                try:
                    rng.choices(list(STEPS), list(STEPS.values()))[0](self, ctx, rng)
                except (KvCacheError, IndexError, ValueError) as error:
                    self.seen[type(error).__name__] += 1
        except BaseException as error:
            self.errors.append(error)


def decode(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    tokens = [rng.randrange(5, 56) for _ in range(rng.randint(1, 60))]
    ctx.decode(tokens, seq_id=rng.randrange(N_SEQ))


def copy(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    ctx.copy_kv_cache_seq(rng.randrange(N_SEQ), rng.randrange(N_SEQ))


def clear(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    ctx.clear_kv_cache_seq(rng.randrange(N_SEQ), rng.choice([None, 0, 3, 10]))


def add(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    ctx.kv_cache_seq_add(rng.randrange(N_SEQ), 0, None, rng.randint(-2, 2))


def generate(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    list(ctx.generate([7], 5, shared.sampler, seq_id=rng.randrange(N_SEQ)))


def look(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    for seq, held in ctx.sequences().items():
        assert held.pos_max >= held.pos_min >= 0, seq
    assert 0 <= ctx.n_cells_used <= ctx.n_ctx
    assert ctx.cells() is not None


STEPS: dict[Step, int] = {
    decode: 8,
    copy: 3,
    clear: 3,
    add: 3,
    generate: 3,
    look: 3,
    lambda shared, ctx, rng: ctx.logits(rng.randint(-2, 2)): 3,
    lambda shared, ctx, rng: shared.sampler.sample(ctx): 3,
    lambda shared, ctx, rng: ctx.kv_cache_update(): 2,
    lambda shared, ctx, rng: ctx.abort(): 3,
    lambda shared, ctx, rng: ctx.close(): 1,
    lambda shared, ctx, rng: shared.replace(): 1,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    shared = Shared(options.model, options.seed)
    threads = [
        threading.Thread(target=shared.work, args=(Random(options.seed + k), options.steps))
        for k in range(options.threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if shared.errors:
        raise shared.errors[0]
    off = float(np.abs(shared.fresh() - shared.expected).max())
    print(dict(shared.seen), "off by", off)
    return 0 if off < RIGHT else 3


if __name__ == "__main__":
    sys.exit(main())
