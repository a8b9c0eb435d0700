"""Ctrl-C in the middle of a step over a `PrefixCache`: nothing is lost, and the cache goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from prefix.accounts import check_accounts
from pykvcache import BatchGenerator, LlamaContext, PrefixCache, Sampler
from pykvcache.prefix.events import CacheEvent
from support.interrupts import CtrlCAnywhere

Make = Callable[..., LlamaContext]
Found = list[tuple[list[int], str | None]]

#: How many of the places where an interrupt can come are tried; 0 tries them all.
PLACES = int(os.environ.get("PYKVCACHE_FUZZ_PLACES", "12"))
FILES = "/generate/", "/sequence/", "/prefix/"


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def program(ctx: LlamaContext, interrupt: CtrlCAnywhere | None) -> Found:
    """Requests that begin alike, samples of one, and one in another place in the queue."""
    cache = PrefixCache(ctx, block_size=8, ram_bytes=1 << 20)
    heard: list[CacheEvent] = []
    cache.events.subscribe(heard.append)
    trunk = words(1, 44)
    with cache.sequence(trunk[:30]) as known:
        known.evaluate()
    generator = BatchGenerator(cache, n_chunk=16)
    hot = Sampler(temperature=1, top_k=20, repeat_penalty=1.2, seed=3)
    handles = [*generator.submit(trunk, 8, hot, n=2)]
    handles.append(generator.submit(trunk[:20] + words(2, 30), 9, hot))
    handles.append(generator.submit(trunk + words(3, 9), 6, hot, priority=1))
    handles.append(generator.submit(cache.sequence(words(4, 50)), 7))
    run: Any = partial(generator.run, progress=False)
    if interrupt is not None:
        interrupt.run(run)
        assert not cache._pool.depth, "nobody is inside"
    run()
    found = [(handle.tokens.tolist(), handle.finish_reason) for handle in handles]
    for handle in handles:
        handle.sequence.close()
    cache.sequence([5]).close()  # what was interrupted is put right by the next call
    check_accounts(cache, heard)
    assert not any(one.held for one in cache._ram.tree.runs())
    generator.close()
    cache.close()
    assert not ctx.n_cells_used
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_an_interrupt_over_a_cache_loses_nothing(name: str, make_context: Make) -> None:
    ctx = make_context(name, n_ctx=256, n_seq_max=3)
    wanted = program(ctx, None)
    counting = CtrlCAnywhere(0, FILES)
    assert program(ctx, counting) == wanted
    assert counting.seen > 500
    places = range(1, counting.seen + 1)
    chosen = np.random.default_rng(1).choice(places, PLACES, replace=False) if PLACES else places
    for place in chosen:
        assert program(ctx, CtrlCAnywhere(int(place), FILES)) == wanted, place
