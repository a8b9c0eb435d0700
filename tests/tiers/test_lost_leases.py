"""Leases whose sequence ends in an odd way: nobody else has to wait until they run out."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.errors import ClosedError
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved
from pykvcache.prefix.policies import Policy
from pykvcache.prefix.stores import FolderStore
from pykvcache.prefix.tiers import leases
from tiers.test_leases import Marks
from tiers.test_tiers import SIZE, words

if TYPE_CHECKING:
    from typing_extensions import Buffer

Make = Callable[..., LlamaContext]


@pytest.fixture(autouse=True)
def everything_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)


def make_cache(ctx: LlamaContext, folder: Path, **options: object) -> PrefixCache:
    return PrefixCache(ctx, block_size=SIZE, tier_seconds=20, tiers=[Marks(folder)], **options)  # type: ignore[arg-type]


def need_none(folder: Path) -> None:
    until = time.monotonic() + 20
    while list(folder.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not list(folder.iterdir())


class Busy(Marks):
    """Another process has every lease, until it is done."""

    is_done = False

    def lease(self, key: bytes, seconds: float) -> bool:
        return self.is_done and super().lease(key, seconds)


@pytest.mark.parametrize("how", ["close", "clear"])
def test_who_waits_for_another_process_takes_none_from_a_cache_that_was(
    how: str, make_context: Make, tmp_path: Path
) -> None:
    store = Busy(tmp_path)
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tier_seconds=20, tiers=[store])
    made = []
    thread = threading.Thread(target=lambda: made.append(cache.sequence(words(1, 100))))
    thread.start()
    until = time.monotonic() + 20
    while not any(one._search is not None for one in cache._open) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    began = time.monotonic()
    getattr(cache, how)()
    if how == "close":
        thread.join(10)
        assert not thread.is_alive(), "still waiting for what a closed cache cannot take"
        assert time.monotonic() - began < 5
    store.is_done = True
    thread.join(30)
    made[0].logits()
    made[0].close()
    cache.close()
    need_none(tmp_path)


class Slow(FolderStore):
    """A folder on a disk that is slow."""

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        time.sleep(0.5)
        return super().get_into(keys, buffers)


@pytest.mark.parametrize("kind", ["request", "sequence"])
def test_a_search_that_still_loads_when_its_cache_is_closed(
    kind: str, make_context: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is the cache's own, and closed with it: a lease has to be back before."""
    monkeypatch.setattr(FolderStore, "get_into", Slow.get_into)
    ctx, prompt = make_context("llama"), words(1, 8 * SIZE)
    with PrefixCache(ctx, block_size=SIZE, tier_seconds=20, tiers=[str(tmp_path)]) as cache:
        with cache.sequence(prompt) as sequence:
            sequence.evaluate()
        assert cache.flush(20)
    cache = PrefixCache(ctx, block_size=SIZE, tier_seconds=20, tiers=[str(tmp_path)])
    thread = None
    if kind == "request":
        generator = BatchGenerator(cache)
        generator.submit(prompt + words(2, 60), 2)
        search = generator._schedule.waiting[0]._sequence._search  # type: ignore[attr-defined]
    else:
        thread = threading.Thread(target=cache.sequence, args=(prompt + words(2, 60),))
        thread.start()
        until = time.monotonic() + 20
        while not (found := [one._search for one in cache._open if one._search]):
            assert time.monotonic() < until
            time.sleep(0.01)
        search = found[0]
    assert search.looked.wait(20)
    assert not search.done.is_set()
    assert search.lease.held
    name = cache._tiers.tiers[0].sealed.envelope.name(search.lease.key)
    cache.close()
    assert search.done.wait(20)
    if thread is not None:
        thread.join(20)
    with FolderStore(tmp_path) as other:
        assert other.lease(name, 0.01)


def test_a_sequence_that_is_dropped_after_its_context(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    cache = make_cache(ctx, tmp_path)
    sequence = cache.sequence(words(1, 100))
    assert list(tmp_path.iterdir())
    ctx.close()
    del sequence
    gc.collect()
    cache.close()
    need_none(tmp_path)


def test_a_sequence_that_is_closed_after_its_context(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    cache = make_cache(ctx, tmp_path)
    sequence = cache.sequence(words(1, 100))
    assert list(tmp_path.iterdir())
    ctx.close()
    sequence.close()
    need_none(tmp_path)
    cache.close()


def test_a_sequence_that_is_dropped_while_another_thread_is_busy(
    make_context: Make, tmp_path: Path
) -> None:
    cache = make_cache(make_context("llama"), tmp_path)
    sequence = cache.sequence(words(1, 100))
    assert list(tmp_path.iterdir())
    holds, ends = threading.Event(), threading.Event()

    def busy() -> None:
        with cache._pool.hold():
            holds.set()
            ends.wait(20)

    thread = threading.Thread(target=busy)
    thread.start()
    assert holds.wait(20)
    del sequence
    gc.collect()
    ends.set()
    thread.join(20)
    cache.sequence(words(2, 3)).close()
    need_none(tmp_path)  # the cache is still open
    cache.close()


def test_a_cache_that_is_dropped(make_context: Make, tmp_path: Path) -> None:
    cache = make_cache(make_context("llama"), tmp_path)
    kept = cache.sequence(words(1, 100))
    assert list(tmp_path.iterdir())
    del cache, kept
    gc.collect()
    need_none(tmp_path)


class Raises(Policy):
    """A policy of a user's own, with a bug."""

    is_broken = False

    def added(self, run: object) -> None:
        if self.is_broken:
            raise RuntimeError("a bug of the policy")

    def victim(self) -> None:
        return None


def test_a_policy_that_raises_keeps_no_lease(make_context: Make, tmp_path: Path) -> None:
    policy = Raises()
    cache = make_cache(make_context("llama", n_ctx=512), tmp_path, policy=policy)
    sequences = [cache.sequence(words(i, 100)) for i in range(3)]
    assert len(list(tmp_path.iterdir())) == 3
    policy.is_broken = True
    with pytest.raises(RuntimeError, match="a bug of the policy"):
        sequences[0].logits()
    assert cache.flush(20)
    assert len(list(tmp_path.iterdir())) == 2
    sequences[1]._cells.evaluate(want_row=True)  # beneath the cache, which learns of it at the end
    with pytest.raises(RuntimeError, match="a bug of the policy"):
        cache.close()
    assert cache.is_closed
    need_none(tmp_path)
    cache.close()


def test_a_policy_that_raises_as_all_is_dropped_keeps_nothing(make_context: Make) -> None:
    class Broken(Policy):
        def removing(self, run: object, n_blocks: int) -> None:
            raise RuntimeError("a bug of the policy")

        def victim(self) -> None:
            return None

    cache = PrefixCache(make_context("llama"), block_size=SIZE, policy=Broken())
    with cache.sequence(words(1, 100)) as sequence:
        sequence.evaluate()
    heard = list(cache.events)
    with pytest.raises(RuntimeError, match="a bug of the policy"):
        cache.close()
    assert cache.is_closed
    assert not cache._ram.tree.n_blocks
    assert heard
    assert any(isinstance(event, AllBlocksCleared | BlockRemoved) for event in cache.events)
    cache.close()


@pytest.mark.parametrize("how", ["flush", "close"])
def test_a_subscriber_in_the_thread_that_writes_does_not_wait_for_itself(
    how: str, make_context: Make, tmp_path: Path
) -> None:
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[str(tmp_path)])
    took: list[float] = []

    def callback(event: object) -> None:
        if threading.current_thread().name == "pykvcache-write-behind" and not took:
            began = time.monotonic()
            getattr(cache, how)()
            took.append(time.monotonic() - began)

    cache.events.subscribe(callback)
    until = time.monotonic() + 20
    seed = 0
    while not took and time.monotonic() < until:
        # Where this thread is in a call when the other one has written, it tells of that itself.
        seed += 1
        with contextlib.suppress(ClosedError), cache.sequence(words(seed, 100)) as sequence:
            sequence.evaluate()
        time.sleep(0.2)
    assert took
    assert took[0] < 10
    cache.flush(20) if how == "flush" else cache.close()
    cache.close()
    until = time.monotonic() + 20
    with FolderStore(tmp_path) as store:
        while len(list(store.entries())) < 100 // SIZE and time.monotonic() < until:
            time.sleep(0.01)
        assert len(list(store.entries())) >= 100 // SIZE


def test_flush_does_not_wait_for_another_threads_evaluation(
    make_context: Make, tmp_path: Path
) -> None:
    cache = make_cache(make_context("llama"), tmp_path)
    holds, ends = threading.Event(), threading.Event()

    def evaluates() -> None:
        with cache._pool.hold():
            holds.set()
            ends.wait(20)

    thread = threading.Thread(target=evaluates)
    thread.start()
    assert holds.wait(20)
    try:
        began = time.monotonic()
        assert cache.flush(0.1)
        assert time.monotonic() - began < 10
    finally:
        ends.set()
        thread.join(20)
    cache.close()
