"""Ctrl-C in the middle of what is done with a lock held, wherever: the lock is free after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent, EventLog
from pykvcache.prefix.stores import Envelope, FolderStore, MemoryStore
from pykvcache.prefix.tiers.fetch import Fetch
from pykvcache.prefix.tiers.holders import Holders
from pykvcache.prefix.tiers.notices import Notices, Place
from pykvcache.prefix.tiers.tier import Tier
from support.interrupts import CtrlCAnywhere

Make = Callable[..., LlamaContext]

#: Python's own code that is called there.
ALSO = ("/contextlib.py",)

KEYS = [bytes([i]) * 32 for i in range(4)]
ITEMS = [(key, bytes(40)) for key in KEYS]
OTHER = bytes([9]) * 32


def tier() -> Tier:
    return Tier(MemoryStore(), Envelope(model=b"m" * 32, layout=b"l" * 32), owned=True)


def memory() -> Iterator[Any]:
    store = MemoryStore()
    store._leases = {i.to_bytes(32, "big"): 0.0 for i in range(1001)}
    yield store._lock
    store.put(ITEMS)
    store.touch([KEYS[0], OTHER])
    store.lease(KEYS[0], 1)
    store.release(KEYS[0])
    store.discard([KEYS[1], OTHER])
    list(store.entries())
    store.trim(0)


def holders() -> Iterator[Any]:
    held = Holders()
    yield held._lock
    held.note(KEYS[0], 1, 1, -1)
    held.note(KEYS[1], 1, 1, 60)
    held.note(KEYS[1], 2, 1, -1)
    held.holder(KEYS[1], 1, 1)
    held.forget(KEYS[1], 1)


def notices() -> Iterator[Any]:
    told = Notices("disk", lambda event, namespace: None)
    yield told._lock
    told.stored([Place(key, None, bytes(8)) for key in KEYS])
    told.removed([KEYS[0], OTHER])
    told.oldest()
    told.forget()


def known() -> Iterator[Any]:
    one = tier()
    yield one._lock
    one.note_known(KEYS)
    one.unknown(KEYS)
    one.put(ITEMS)
    one.put(ITEMS)


def events() -> Iterator[Any]:
    log = EventLog(5_000)
    yield log._lock
    log.add(BlockStored((KEYS[0], KEYS[1]), None, (1, 2, 3, 4), 2), "a")
    log.add(BlockStored((KEYS[2],), None, (1, 2), 2), "b")
    log.add(BlockRemoved((KEYS[0],)))
    log.add(BlockRemoved((KEYS[1], KEYS[2])))
    log.withdraw("a")
    log.withdraw(None)


def fetch() -> Iterator[Any]:
    one = tier()
    search = Fetch([one], None)  # type: ignore[arg-type]
    search.wanted = type("Wanted", (), {"block_size": 8, "block_bytes": 40})  # type: ignore[assignment]
    search.depth, search.to_load = 4, {one: 4}
    search.blocks = {2: (memoryview(b""), one), 3: (memoryview(b""), one)}
    search.looked.set()
    yield search.lock
    assert search.come() == (16, 32)
    assert search.left >= 0


WORK = {
    "memory": (memory, "/stores/memory.py"),
    "holders": (holders, "/tiers/holders.py"),
    "notices": (notices, "/tiers/notices.py"),
    "known": (known, "/tiers/tier.py"),
    "events": (events, "/prefix/events.py"),
    "fetch": (fetch, "/tiers/fetch.py"),
}


def sweep(attempt: Callable[[int], int]) -> None:
    for place in range(1, attempt(0) + 1):
        attempt(place)


@pytest.mark.parametrize("name", WORK)
def test_a_lock_is_free_after_an_interrupt(name: str) -> None:
    work, file = WORK[name]

    def attempt(place: int) -> int:
        running = work()
        lock = next(running)
        interrupt = CtrlCAnywhere(place, (file,))
        interrupt.run(lambda: next(running, None))
        assert not lock.locked(), place
        return interrupt.seen

    sweep(attempt)


def test_the_lock_of_a_context_is_free_after_an_interrupt(make_context: Make) -> None:
    """Another thread can take it: calls of the one that was interrupted would go on."""
    ctx = make_context("llama", n_ctx=256, n_seq_max=3)
    prompt = np.random.default_rng(1).integers(5, 56, 20).tolist()

    def attempt(place: int) -> int:
        cache = PrefixCache(ctx, block_size=8, tiers=[MemoryStore()])
        generator = BatchGenerator(cache)
        sequence = cache.sequence(prompt)
        sequence.evaluate()

        def work() -> None:
            generator.submit([5, 6], 0, n=2)
            generator.submit([7, 8], 2)
            generator.run(progress=False)
            cache.tree("other")
            cache.clear("other")
            cache.close()

        files = "/generate/generator.py", "/generate/driving.py", "/prefix/cache.py"
        interrupt = CtrlCAnywhere(place, (*files, "/prefix/outline.py"))
        interrupt.run(work)
        assert not cache._pool.depth, place
        taken = threading.Thread(target=lambda: len(cache.sequence([5])))
        if not cache.is_closed:
            taken.start()
            taken.join(60)
            assert not taken.is_alive(), place
        generator.close()
        sequence.close()
        cache.close()
        return interrupt.seen

    sweep(attempt)


def test_a_folder_can_be_used_after_an_interrupt(tmp_path: Path) -> None:
    """By another thread: its lock counts how often one thread has it."""

    def attempt(place: int) -> int:
        with FolderStore(tmp_path / "blocks") as store:

            def work() -> None:
                store.put(ITEMS[:2])
                store.contains(KEYS)
                store.lease(KEYS[3], 1)
                store.discard(KEYS)

            files = "/stores/folder.py", "/stores/_shared_index.py", "/stores/_index.py"
            interrupt = CtrlCAnywhere(place, (*files, "/_locks.py", "/_threads.py"), ALSO)
            interrupt.run(work)
            put = threading.Thread(target=store.put, args=(ITEMS,), daemon=True)
            put.start()
            put.join(60)
            assert not put.is_alive(), place
            assert store.contains(KEYS) == len(KEYS), place
            store.discard(KEYS)
        return interrupt.seen

    sweep(attempt)


def test_who_sends_after_an_interrupt_sends_all() -> None:
    """Whoever was interrupted as it sent is not taken for one that sends still."""

    def attempt(place: int) -> int:
        sent: list[CacheEvent] = []
        told = Notices("disk", lambda event, namespace: sent.append(event))
        interrupt = CtrlCAnywhere(place, ("/tiers/notices.py", "/_threads.py"))
        interrupt.run(lambda: told.stored([Place(KEYS[0], None, bytes(8))]))
        told.stored([Place(KEYS[1], None, bytes(8))])
        assert not told._sending.locked(), place
        assert not told._waiting, place
        assert sent, place
        return interrupt.seen

    sweep(attempt)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_cached", [False, True])
def test_other_threads_go_on_after_an_interrupt_as_a_sequence_was_dropped(
    is_cached: bool, make_context: Make
) -> None:
    ctx = make_context("llama", n_ctx=256, n_seq_max=3)

    def attempt(place: int) -> int:
        cache = PrefixCache(ctx, block_size=8)
        held = [cache.sequence([5, 6, 7]) if is_cached else LlamaSequence(ctx, [5, 6, 7])]
        held[0].evaluate()
        files = "/prefix/sequence.py", "/sequence/pool.py", "/_threads.py"
        interrupt = CtrlCAnywhere(place, files)
        interrupt.run(held.clear)
        assert not cache._pool.depth, place
        using = threading.Thread(target=lambda: LlamaSequence(ctx, [5]).close(), daemon=True)
        using.start()
        using.join(60)
        assert not using.is_alive(), place
        cache.close()
        return interrupt.seen

    sweep(attempt)
