"""Random programs over a PrefixCache on every memory; ``make fuzz`` runs many more.

Tokens evaluated against an oracle, logits against fresh runs, the budget after every step, and no
namespace that another one sees: with tiers and without, and over restarts.
"""

from __future__ import annotations

import os
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings

from memory.kit import EVERY_SERVED, Case, Make, apart, cleared_runs
from prefix.program import STEPS, run
from pykvcache import PrefixCache

SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))
IS_LONG = settings().max_examples > 100
SHORT = (
    "llama-unified",
    "gemma3-unified",
    "gemma3-unified-window",
    "jamba-unified",
    "mamba-unified",
    "minimax_m3-unified",
    "dots3note-unified-window",
    "deepseek4-streams",
    "qwen4exp-streams",
    "glm5_next-streams",
)
CHOSEN = tuple(case for case in EVERY_SERVED if IS_LONG or str(case) in SHORT)


@pytest.mark.hazard("N69", "N80", "N90", "N91", "N92")
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_random_programs(case: Case, make_context: Make) -> None:
    fresh = cleared_runs(make_context(case.name, n_seq_max=1))
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 4}))
    taken: Counter[str] = Counter()
    for i in range(25 if IS_LONG else 6):
        has_tier = i % 2 == 1 and case.has_states
        seed, n_steps = 1000 * SEED + i, 200 if IS_LONG else 25
        taken += run(case, ctx, fresh, seed, n_steps, has_tier=has_tier)
    assert taken.total() > 40
    assert not IS_LONG or set(taken) == set(STEPS)


@pytest.mark.hazard("N69")
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_threads_share_a_cache(name: str, make_context: Make) -> None:
    ctx = make_context(name, n_seq_max=4)
    fresh, lock = cleared_runs(make_context(name, n_seq_max=1)), threading.Lock()
    cell = max(64, ctx.native.block_bytes())
    failed: list[BaseException] = []
    with PrefixCache(ctx, block_size=8, ram_bytes=200 * cell) as cache:

        def work(seed: int) -> None:
            rng = np.random.default_rng([SEED, seed])
            trunk = np.random.default_rng(1).integers(5, 56, 60).tolist()
            try:
                for _ in range(300 if IS_LONG else 6):
                    prompt = trunk[: rng.integers(1, 60)] + rng.integers(5, 56, 5).tolist()
                    space = str(rng.integers(2))
                    with cache.sequence(prompt, namespace=space) as sequence:
                        logits = sequence.logits()
                    with lock:
                        assert apart(logits, fresh(prompt)) < 1e-3
                    if rng.random() < 0.1:
                        cache.clear(space)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failed, failed
        assert not any(
            one.held for node in cache._core.blocks.tree.nodes() for one in node.components()
        )
        assert cache.stats().ram_bytes <= 200 * cell
