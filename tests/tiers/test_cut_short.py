"""Ctrl-C while something is handed to the threads below a cache: they go on with what they have."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pykvcache import LlamaContext, PrefixCache
from pykvcache._threads import Flag
from pykvcache.prefix.stores import Envelope, MemoryStore
from pykvcache.prefix.tiers.tier import Tier
from pykvcache.prefix.tiers.writing import Chain, WriteBehind
from support.interrupts import CtrlCAnywhere

Make = Callable[..., LlamaContext]

#: Python's own code that is called there: locks, and what waits for threads.
ALSO = "/threading.py", "/contextlib.py"

# A thread whose `start` was interrupted in Python's own code ends with a KeyError of that code.
NOISE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def keys(letter: str, n: int) -> list[tuple[bytes, bytes]]:
    return [(letter.encode() * 31 + bytes([i]), bytes([i]) * 40) for i in range(n)]


@NOISE
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

        interrupt = CtrlCAnywhere(place, ("/tiers/writing.py", "/_threads.py"), ALSO)
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


@NOISE
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
            interrupt = CtrlCAnywhere(place, ("/prefix/prefetch.py", "/_threads.py"), ALSO)
            interrupt.run(lambda: cache.prefetch(first).wait(60))
            assert not cache._pool.depth, place
            one = cache.prefetch(second)
            assert one.wait(60), place
            assert one.n_tokens >= 40, place
            del one
            gc.collect()
            return interrupt.seen

        for place in range(1, attempt(0) + 1):
            attempt(place)


def test_a_flag_that_was_waited_for_can_be_set_after_an_interrupt() -> None:
    def attempt(place: int) -> int:
        flag = Flag()

        def work() -> None:
            assert not flag.wait(0.01)
            flag.set()
            assert flag.wait()

        interrupt = CtrlCAnywhere(place, ("/_threads.py",), ALSO)
        interrupt.run(work)
        flag.clear()
        waiting = threading.Thread(target=flag.wait, daemon=True)
        waiting.start()
        assert not flag.wait(0)
        setting = threading.Thread(target=flag.set, daemon=True)
        setting.start()
        waiting.join(60)
        setting.join(60)
        assert not waiting.is_alive(), place
        assert not setting.is_alive(), place
        return interrupt.seen

    for place in range(1, attempt(0) + 1):
        attempt(place)
