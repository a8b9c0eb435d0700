"""Writing behind lets those go first who evaluate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pykvcache.prefix.tiers.writing import Chain, WriteBehind

from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix import pace
from pykvcache.prefix.stores import Envelope, MemoryStore
from pykvcache.prefix.tiers import writing
from pykvcache.prefix.tiers.tier import Tier

if TYPE_CHECKING:
    from typing_extensions import Buffer

N = 4
PAUSE = 0.2


class Working(MemoryStore):
    """A store that takes 5 ms of processor time for each `put`, and notes when."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []
        self.ended: list[float] = []

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        self.began.append(time.monotonic())
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        n = super().put(items)
        self.ended.append(time.monotonic())
        return n

    def pauses(self) -> list[float]:
        return [begin - end for begin, end in zip(self.began[1:], self.ended[:-1], strict=True)]

    def wait(self, n: int) -> None:
        until = time.monotonic() + 30
        while len(self.ended) < n:
            assert time.monotonic() < until
            time.sleep(0.001)


@contextmanager
def writer(progress: Callable[[], int], n: int = N) -> Iterator[tuple[Working, WriteBehind]]:
    """Let blocks of three quarters of a step be written, so that each goes alone."""
    store = Working()
    tier = Tier(store, Envelope(model=b"m" * 32, layout=b"l" * 32), owned=True)
    behind = WriteBehind(tier, 64 << 20, progress)
    data = np.zeros(writing._STEP_BYTES * 3 // 4, np.uint8)
    behind.offer(Chain([(bytes([i]) * 32, data) for i in range(n)]))
    yield store, behind
    behind.close(30)
    assert store.contains([tier.sealed.envelope.name(bytes([i]) * 32) for i in range(n)]) == n


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_LONGEST_PAUSE", PAUSE)


def test_writing_pauses_while_tokens_are_evaluated() -> None:
    """5 ms of work at a small part of the time: each pause is the longest one."""
    with writer(itertools.count().__next__) as (store, _):
        store.wait(N)
        assert len(store.pauses()) == N - 1
        assert min(store.pauses()) >= 0.9 * PAUSE


def test_writing_does_not_pause_where_nothing_is_evaluated() -> None:
    with writer(lambda: 7) as (store, _):
        store.wait(N)
        assert min(store.pauses()) < 0.9 * PAUSE


@pytest.mark.parametrize("why", ["flush", "lease", "full"])
def test_what_somebody_waits_for_is_written_at_once(why: str) -> None:
    with writer(itertools.count().__next__, 24) as (store, behind):
        store.wait(1)
        if why == "flush":
            assert behind.flush(30)
        elif why == "lease":
            behind.offer(Chain(leases=[bytes(32)]))
        else:
            behind.urgent_bytes = 1 << 18
            behind.offer(Chain([(b"x" * 32, np.zeros(1000, np.uint8))]))
        until = time.monotonic() + 30
        while behind.n_items:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert len(store.began) <= 5  # not in single steps any more


@pytest.mark.parametrize(
    ("ram", "urgent"), [(0, 16 << 20), (400_000, 100_000), (1 << 30, 128 << 20)]
)
def test_a_quarter_of_the_memory_at_most_waits_without_hurry(
    ram: int, urgent: int, make_context: Callable[..., LlamaContext]
) -> None:
    """What waits stays in memory: all blocks left for it, and prompts were evaluated again."""
    with PrefixCache(make_context("llama"), ram_bytes=ram, tiers=[MemoryStore()]) as cache:
        assert cache._link.tiers.writers[0].urgent_bytes == urgent


def test_a_full_disk_and_a_folder_that_is_only_read_show_in_the_figures() -> None:
    store = MemoryStore()
    tier = Tier(store, Envelope(model="m", layout="l"), owned=False)
    store.counters.add(full=2, denied=3)
    stats = tier.stats(0, 0, 0)
    assert (stats.full, stats.denied) == (2, 3)
