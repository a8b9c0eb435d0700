"""Ctrl-C while something is handed to the threads below a cache: they go on with what they have."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np

from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.stores import Envelope, MemoryStore
from pykvcache.prefix.tiers.tier import Tier
from pykvcache.prefix.tiers.writing import Chain, WriteBehind
from support.interrupts import CtrlCAnywhere

Make = Callable[..., LlamaContext]


def keys(letter: str, n: int) -> list[tuple[bytes, bytes]]:
    return [(letter.encode() * 31 + bytes([i]), bytes([i]) * 40) for i in range(n)]


def test_a_queue_is_written_after_an_interrupt() -> None:
    """Its thread begins with the next offer, and no byte of its room is lost."""

    def attempt(place: int) -> int:
        store = MemoryStore()
        tier = Tier(store, Envelope(model=b"m" * 32, layout=b"l" * 32), owned=True)
        behind = WriteBehind(tier, 1_000)

        def work() -> None:
            behind.offer(Chain(keys("a", 5), "a"))
            behind.offer(Chain(keys("b", 5), "b", leases=[b"l" * 32]))
            behind.cancel("b")
            behind.offer(Chain(keys("c", 2), "c", removes=[b"a" * 31 + bytes([1])]))

        interrupt = CtrlCAnywhere(place, ("/tiers/writing.py", "/_threads.py"))
        interrupt.run(work)
        behind.offer(Chain(keys("d", 5), "d"))
        assert behind.flush(60), place
        assert (behind.n_bytes, behind.n_items) == (0, 0), place
        assert all(tier.present([key for key, _ in keys("d", 5)])), place
        assert behind.offer(Chain(keys("e", 25), "e")) == 25, place
        assert behind.close(60)
        assert behind._lock.acquire(blocking=False)
        behind._lock.release()
        return interrupt.seen

    for place in range(1, attempt(0) + 1):
        attempt(place)


def test_a_prompt_is_brought_after_an_interrupt(make_context: Make) -> None:
    """What was handed over just before it is brought, too, with the next one."""
    ctx = make_context("llama", n_seq_max=2)
    first, second = (np.random.default_rng(i).integers(5, 56, 40).tolist() for i in (1, 2))
    with PrefixCache(ctx, block_size=8, tiers=[MemoryStore()]) as cache:
        for prompt in (first, second):
            with cache.sequence(prompt) as sequence:
                sequence.evaluate()
        assert cache.flush(60)

        def attempt(place: int) -> int:
            cache._ram.clear(None)
            interrupt = CtrlCAnywhere(place, ("/prefix/prefetch.py", "/_threads.py"))
            interrupt.run(lambda: cache.prefetch(first).wait(60))
            one = cache.prefetch(second)
            assert one.wait(60), place
            assert one.n_tokens >= 40, place
            del one
            gc.collect()
            return interrupt.seen

        for place in range(1, attempt(0) + 1):
            attempt(place)
