"""The second process of the demo: reads its task from stdin, writes figures to stdout."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from pykvcache.demo.measure import Fresh
from pykvcache.model import LlamaModel
from pykvcache.prefix.cache import PrefixCache

__all__: list[str] = []


def _main() -> None:
    task = json.load(sys.stdin)
    with (
        LlamaModel(task["model"]) as model,
        Fresh(model, task["n_threads"]).context(task["n_ctx"], n_seq_max=4) as ctx,
        PrefixCache(
            ctx, block_size=task["block_size"], tiers=[task["folder"]], tier_seconds=10
        ) as cache,
    ):
        start = time.perf_counter()
        sequence = cache.sequence(task["tokens"])
        logits = sequence.logits()
        seconds = time.perf_counter() - start
        np.save(Path(task["folder"]) / "logits.npy", logits)
        found = {
            "evaluated": ctx.tokens_evaluated,
            "disk": sequence.reuse.disk,
            "seconds": seconds,
            "answer": list(sequence.generate(12)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
