"""Threads that use, abort, close and replace the same contexts.

``python -m binding.thread_driver MODEL STEPS SEED``. Exit status 0: only documented exceptions were
seen, and a fresh context decodes as at the start.
"""

from __future__ import annotations

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


def look(shared: Shared, ctx: LlamaContext, rng: Random) -> None:
    for seq, held in ctx.sequences().items():
        assert held.pos_max >= held.pos_min >= 0, seq
    assert 0 <= ctx.n_cells_used <= ctx.n_ctx
    assert ctx.cells() is not None


def any_of(rng: Random) -> int:
    return rng.randrange(N_SEQ)


def tokens(rng: Random) -> list[int]:
    return [rng.randrange(5, 56) for _ in range(rng.randint(1, 60))]


STEPS: dict[Step, int] = {
    lambda shared, ctx, rng: ctx.decode(tokens(rng), seq_id=any_of(rng)): 8,
    lambda shared, ctx, rng: ctx.copy_kv_cache_seq(any_of(rng), any_of(rng)): 3,
    lambda shared, ctx, rng: ctx.clear_kv_cache_seq(any_of(rng), rng.choice([None, 0, 3, 10])): 3,
    lambda shared, ctx, rng: ctx.kv_cache_seq_add(any_of(rng), 0, None, rng.randint(-2, 2)): 3,
    lambda shared, ctx, rng: list(ctx.generate([7], 5, shared.sampler, seq_id=any_of(rng))): 3,
    look: 3,
    lambda shared, ctx, rng: ctx.logits(rng.randint(-2, 2)): 3,
    lambda shared, ctx, rng: shared.sampler.sample(ctx): 3,
    lambda shared, ctx, rng: ctx.kv_cache_update(): 2,
    lambda shared, ctx, rng: ctx.abort(): 3,
    lambda shared, ctx, rng: ctx.close(): 1,
    lambda shared, ctx, rng: shared.replace(): 1,
}


def main(path: str, steps: str, seed: str) -> int:
    faulthandler.enable()
    shared = Shared(Path(path), int(seed))
    threads = [
        threading.Thread(target=shared.work, args=(Random(int(seed) + k), int(steps)))
        for k in range(4)
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
    sys.exit(main(*sys.argv[1:]))
