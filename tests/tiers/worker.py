"""What the processes of the tests run: ``python -m tiers.worker TASK MODEL TIERS SEED N MORE``.

TIERS are separated by commas, MORE is JSON for the cache. Each line that is printed is JSON.
"""

from __future__ import annotations

import itertools
import json
import sys

from memory.kit import words
from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import open_store
from support.models import EXACT
from tiers.kit import clear_memory


def opened(where: str) -> object:
    """Return a tier; a server may be as slow as a busy machine makes it."""
    patience = {"timeout": 30, "connect_timeout": 30} if where.startswith("redis") else {}
    return open_store(where, **patience)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def once(cache: PrefixCache, seed: int, n: int) -> None:
    """One long prompt; the cache is not closed: the end of the script has to do."""
    ctx = cache.context
    before = ctx.tokens_evaluated
    sequence = cache.sequence(words(seed, n))
    report = sequence.reuse
    row = sequence.logits()
    say(
        evaluated=ctx.tokens_evaluated - before,
        disk=report.disk,
        remote=report.remote,
        row=[float(one) for one in row[:8]],
    )


def forever(cache: PrefixCache, seed: int, n: int) -> None:
    """Prompt after prompt, of which many begin alike, until the test ends it."""
    for i in itertools.count():
        prompt = words(i % 3, n) + words(1000 * seed + i, 9)
        with cache.sequence(prompt) as sequence:
            row, disk = sequence.logits(), sequence.reuse.disk
        clear_memory(cache)
        say(seed=i % 3, disk=disk, prompt=prompt, row=[float(one) for one in row[:8]])


if __name__ == "__main__":
    task, path, tiers, seed, n, options = sys.argv[1:]
    model = LlamaModel(path)
    context = LlamaContext(model, n_ctx=2048, n_threads=1, **EXACT)
    tasks = {"once": once, "forever": forever}
    run = tasks[task]
    where = [opened(one) for one in tiers.split(",")]
    more = json.loads(options)
    run(PrefixCache(context, block_size=8, tier_seconds=20, tiers=where, **more), int(seed), int(n))
