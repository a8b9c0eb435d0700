"""Ctrl-C in the middle of anything a cache does: it goes on, and its accounts are right."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Logits, apart
from prefix.accounts import check_accounts
from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored, CacheEvent, EventLog, _size
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import MemoryStore
from support.interrupts import CtrlCAnywhere
from support.models import RIGHT

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]

#: How many of the places where an interrupt can come are tried; 0 tries them all.
PLACES = int(os.environ.get("PYKVCACHE_FUZZ_PLACES", "4"))
FILES = "/prefix/", "/sequence/"
TREE = ("/prefix/tree.py", "/prefix/runs.py")
SIZE = 8

# Python itself swallows what is raised in a finalizer, and in a callback of a weak reference.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def places(n: int, most: int = PLACES) -> list[int]:
    """Return some places of n, or all."""
    if not most:
        return list(range(1, n + 1))
    return np.random.default_rng(n).choice(np.arange(1, n + 1), min(n, most), False).tolist()


TRUNK = words(1, 60)
PROMPTS = [
    TRUNK[:44],
    TRUNK[:20] + words(2, 30),
    TRUNK[:36] + words(3, 17),
    words(4, 37),
    TRUNK[:5],
]


class Bench:
    """A cache that was used, something that is interrupted, and what must be true after it."""

    prompts, size = PROMPTS, SIZE

    def __init__(
        self, ctx: LlamaContext, name: str, fresh: Fresh, folder: Path, **options: Any
    ) -> None:
        self.ctx, self.name, self.fresh, self.folder = ctx, name, fresh, folder
        self.cache = PrefixCache(ctx, block_size=self.size, **options)
        self.heard: list[CacheEvent] = []
        self.cache.events.subscribe(self.heard.append)
        for prompt in self.prompts[:3]:
            self.use(prompt)
        self.use(self.prompts[3], "b")
        self.open = self.cache.sequence(TRUNK)
        self.open.logits()
        self.pin = self.cache.pin(self.prompts[1])
        if self.cache.has_tiers:
            assert self.cache.flush(60)

    def use(self, prompt: list[int], space: str | None = None) -> None:
        with self.cache.sequence(prompt, namespace=space) as sequence:
            self.check(sequence.logits(), prompt)

    def check(self, got: Logits, prompt: list[int]) -> None:
        assert apart(got, self.fresh(self.name, prompt)) < max(RIGHT, 1e-2)

    def go_on(self) -> None:
        """Use the cache as before, and let go of everything."""
        cache = self.cache
        assert not cache._pool.depth, "nobody is inside"
        gc.collect()
        if not cache.is_closed:
            check_accounts(cache, self.heard)
            for prompt in self.prompts:
                self.use(prompt)
            if not self.open.is_closed:
                self.check(self.open.logits(), self.open.tokens.tolist())
            self.open.close()
            for pin in list(cache._pins._pins):
                pin.release()
            self.use(self.prompts[1], "b")
            check_accounts(cache, self.heard)
            assert cache.stats().ram_bytes <= cache.stats().max_ram_bytes
            assert not any(run.held for run in cache._ram.tree.runs())
            # Nothing is forgotten by the policy: all of it can leave.
            with cache._pool.hold():
                cache._ram.tree.shrink(0)
            assert not list(cache._ram.tree.runs())
            self.use(self.prompts[0])
            cache.clear()
            check_accounts(cache, self.heard)
            assert not cache.stats().ram_blocks
            assert not cache._ram._tails
        assert not cache._pool.depth
        self.open.close()
        cache.close()
        assert not self.ctx.sequences()
        assert not self.ctx.n_cells_used


def sequence(bench: Bench) -> None:
    """A prompt that ends in the middle of a known block, and goes another way there."""
    one = bench.cache.sequence(TRUNK[:30] + words(9, 20))
    one.logits()
    one.close()


def fork(bench: Bench) -> None:
    child = bench.open.fork(33)
    child.append(words(8, 12))
    child.logits()
    child.close()


def repeat(bench: Bench) -> None:
    bench.cache.sequence(PROMPTS[0]).logits()


def pins(bench: Bench) -> None:
    bench.cache.pin(TRUNK[:30], ttl=0)
    bench.cache.pin(PROMPTS[0]).release()
    bench.pin.release()


def looks(bench: Bench) -> None:
    bench.cache.stats()
    bench.cache.tree()
    list(bench.cache.events)
    repr(bench.cache)


def batch(bench: Bench) -> None:
    generator = BatchGenerator(bench.cache)
    handles = [generator.submit(prompt, 3) for prompt in (PROMPTS[0], TRUNK[:30] + words(9, 9))]
    generator.run(progress=False)
    for handle in handles:
        handle.sequence.close()


def keep(bench: Bench) -> None:
    """A sequence goes to a file and comes back, and is parked and given."""
    bench.open.save(bench.folder / "sequence", sync=False)
    bench.open.park()
    bench.open.close()
    with CachedSequence.load(bench.ctx, bench.folder / "sequence") as again:
        again.logits()


def come(bench: Bench) -> None:
    """A prompt comes out of the tiers."""
    bench.cache._ram.clear(None)
    with bench.cache.sequence(PROMPTS[0]) as sequence:
        sequence.logits()


def fetch(bench: Bench) -> None:
    """A prompt is brought in advance."""
    bench.cache._ram.clear(None)
    bench.cache.prefetch(PROMPTS[1]).wait(60)


def write(bench: Bench) -> None:
    """Something new goes to the tiers."""
    with bench.cache.sequence(words(12, 40)) as sequence:
        sequence.logits()
    bench.cache.flush(60)


def evict(bench: Bench) -> None:
    """All leaves that may; a change, as when a budget is exceeded."""
    ram = bench.cache._ram
    had, ram.tree._max_bytes = ram.tree.max_bytes, 0
    try:
        with bench.cache._pool.hold():
            ram.fit()
    finally:
        ram.tree._max_bytes = had


def branch(bench: Bench) -> None:
    """Prompts that part in the middle of blocks, also where no other did."""
    for prompt in (TRUNK[:42] + words(9, 20), TRUNK[:56] + words(10, 3), TRUNK[:12] + words(11, 2)):
        with bench.cache.sequence(prompt) as one:
            one.logits()


class Branches(Bench):
    """As `Bench`, with prompts that share beginnings of blocks and of tails."""

    prompts, size = (
        [
            TRUNK[:40] + words(2, 30),
            TRUNK[:40] + words(3, 30),
            TRUNK[:44] + words(4, 30),
            TRUNK[:35] + words(5, 30),
            TRUNK[:35] + words(5, 3) + words(6, 5),
            TRUNK[:52] + words(7, 5),
        ],
        16,
    )

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        for prompt in self.prompts[3:]:
            self.use(prompt)
        assert self.cache._ram._pieces.saved > 0


ACTIONS: dict[str, Callable[[Bench], object]] = {
    "sequence": sequence,
    "repeat": repeat,
    "close": lambda bench: bench.open.close(),
    "fork": fork,
    "pins": pins,
    "looks": looks,
    "clear": lambda bench: bench.cache.clear(),
    "clear b": lambda bench: bench.cache.clear("b"),
    "close all": lambda bench: bench.cache.close(),
    "batch": batch,
    "keep": keep,
}
TIERS: dict[str, Callable[[Bench], object]] = {
    "come": come,
    "fetch": fetch,
    "write": write,
    "close all": lambda bench: bench.cache.close(),
}


def sweep(make: Callable[[], Bench], action: Callable[[Bench], object], most: int = PLACES) -> None:
    """Interrupt something everywhere."""

    def attempt(place: int) -> int:
        bench = make()
        interrupt = CtrlCAnywhere(place, FILES)
        interrupt.run(partial(action, bench))
        try:
            bench.go_on()
        except BaseException as error:
            raise AssertionError(f"after an interrupt at place {place}") from error
        return interrupt.seen

    for place in places(attempt(0), most):
        attempt(place)


@pytest.mark.parametrize("what", ACTIONS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_a_cache_goes_on_after_an_interrupt(
    name: str, what: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx = make_context(name, n_ctx=512, n_seq_max=3)
    ram_bytes = 24 * SIZE * max(64, ctx.native.block_bytes()) + 90_000
    options = {"ram_bytes": ram_bytes, "policy": "lru"}
    sweep(lambda: Bench(ctx, name, fresh_logits, tmp_path, **options), ACTIONS[what])


@pytest.mark.parametrize("what", ["branch", "evict", "clear", "close all"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_branches_share_is_right_after_an_interrupt(
    name: str, what: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx = make_context(name, n_ctx=512, n_seq_max=3)
    action = {"branch": branch, "evict": evict}.get(what) or ACTIONS[what]
    sweep(lambda: Branches(ctx, name, fresh_logits, tmp_path), action, 3 * PLACES)


@pytest.mark.parametrize("policy", ["adaptive", "hit-density", "s3fifo", "slru", "cost-aware"])
def test_every_policy_goes_on_after_an_interrupt(
    policy: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """In little room: somebody has to leave."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    options = {"ram_bytes": 60_000, "policy": policy}
    sweep(lambda: Bench(ctx, "llama", fresh_logits, tmp_path, **options), sequence)


@pytest.mark.parametrize("what", TIERS)
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_a_cache_with_tiers_goes_on_after_an_interrupt(
    name: str, what: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx = make_context(name, n_ctx=512, n_seq_max=3)

    def make() -> Bench:
        return Bench(ctx, name, fresh_logits, tmp_path, tiers=[MemoryStore()], tier_seconds=60)

    sweep(make, TIERS[what])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_puts_it_right_may_be_cut_short_too(
    name: str, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx = make_context(name, n_ctx=512, n_seq_max=3)

    def attempt(first: int, place: int) -> int:
        bench = Bench(ctx, name, fresh_logits, tmp_path, ram_bytes=60_000)
        CtrlCAnywhere(first, TREE).run(partial(sequence, bench))
        assert not bench.cache._pool.depth, first
        interrupt = CtrlCAnywhere(place, FILES)
        if not bench.cache._ram._is_whole:
            interrupt.run(bench.cache.stats)
        bench.go_on()
        return interrupt.seen

    bench = Bench(ctx, name, fresh_logits, tmp_path, ram_bytes=60_000)
    whole = CtrlCAnywhere(0, TREE)
    whole.run(partial(sequence, bench))
    bench.go_on()
    # Where a change is cut is another place in each version of Python.
    tried = range(1, whole.seen, max(1, whole.seen // 12))
    cut = {first: n for first in tried if (n := attempt(first, 0))}
    assert len(cut) >= 3, "nothing was cut short"
    for first in list(cut)[:: len(cut) // 3][:3]:
        for place in places(cut[first]):
            attempt(first, place)


def test_the_list_of_events_knows_its_size_after_an_interrupt() -> None:
    stored = BlockStored((bytes(32), bytes(31) + b"1"), None, (1, 2, 3), 2)

    def attempt(place: int) -> int:
        log = EventLog(5_000)
        for _ in range(3):
            log.add(stored, "a")

        def work() -> None:
            for _ in range(4):
                log.add(stored, "b")
            log.withdraw("a")
            next(iter(log))
            log.add(BlockRemoved((bytes(32),)))

        interrupt = CtrlCAnywhere(place, ("/prefix/",))
        interrupt.run(work)
        for _ in range(2):
            assert log.nbytes == sum(_size(event) for event, *_ in log._events)
            log.add(stored, "a")
            assert log.nbytes <= 5_000
        assert not log._lock.locked()
        return interrupt.seen

    for place in range(1, attempt(0) + 1):
        attempt(place)
