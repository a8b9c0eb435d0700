"""Several processes want the same prefix: one evaluates it, and may die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from memory.kit import Logits, apart
from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.prefix.stores import FolderStore, MemoryStore
from pykvcache.prefix.tiers import leases
from pykvcache.prefix.tiers.fetch import Fetch
from stores.servers import redis_server
from support.models import make_model
from tiers.processes import evaluated_at_once, line, say, spawn
from tiers.test_damage import write
from tiers.test_tiers import SIZE, WAIT, words

Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]


@pytest.mark.parametrize("where", ["folder", "redis"])
def test_three_processes_at_once_evaluate_a_prefix_once(
    where: str, model_folder: Path, tmp_path: Path
) -> None:
    path = make_model("llama", model_folder)

    def run(tiers: str) -> None:
        evaluated = evaluated_at_once(3, "together", path, tiers, 1500)
        # Who comes last may find everything there already.
        assert sorted(evaluated) == [1, 1, 1500]

    if where == "folder":
        run(str(tmp_path / "tier"))
    else:
        with redis_server(tmp_path) as server:
            run(server.url)


def test_a_holder_that_dies_costs_a_time_out(model_folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", model_folder)
    holder = spawn("hold", path, str(tmp_path), 1, 300)
    assert line(holder)["held"] == 1
    holder.kill()
    holder.communicate()
    began = time.monotonic()
    follower = spawn("together", path, str(tmp_path), 1, 300)
    assert line(follower)["ready"]
    say(follower)
    assert line(follower)["evaluated"] == 300
    assert time.monotonic() - began < 60
    follower.communicate()


def test_what_comes_between_the_look_and_the_lease_is_loaded(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder writes and releases in between: nobody evaluates it again."""
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    written, prompt = MemoryStore(), words(1, 45)
    write(make_context("llama"), written, prompt)

    class Late(MemoryStore):
        def lease(self, key: bytes, seconds: float) -> bool:
            for entry in written.entries():
                block = bytearray(entry.size)
                assert written.get_into([entry.key], [block]) == 1
                self.put([(entry.key, block)])
            return super().lease(key, seconds)

    store = Late()
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT) as cache:
        sequence = cache.sequence(prompt)
        assert (sequence.reuse.remote, sequence.reuse.evaluated) == (44, 1)
        assert not store._leases


def test_nobody_waits_for_a_lease_of_his_own(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences of one thread begin alike, and the first one is not evaluated yet."""
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    waits: list[Any] = []
    monkeypatch.setattr(leases.Lease, "wait", lambda *given: waits.append(given))
    with PrefixCache(
        make_context("llama"), block_size=SIZE, tiers=[MemoryStore()], **WAIT
    ) as cache:
        first = cache.sequence(words(1, 45))
        assert first._search is not None
        assert first._search.done.wait(20)
        second = cache.sequence(words(1, 45) + words(2, 9))
        second.evaluate()
        first.evaluate()
        assert cache.flush(30)
    assert not waits


@pytest.mark.parametrize("kind", ["one store", "a store each"])
def test_caches_of_one_thread_do_not_wait_for_each_other(
    kind: str,
    make_context: Make,
    fresh_logits: Fresh,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each has a context of its own; whom the second would wait for is its own thread."""
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    waits: list[Any] = []
    monkeypatch.setattr(leases.Lease, "wait", lambda *given: waits.append(given))
    shared = FolderStore(tmp_path)
    caches = [
        PrefixCache(
            make_context("llama"),
            block_size=SIZE,
            tiers=[shared if kind == "one store" else FolderStore(tmp_path)],
            **WAIT,
        )
        for _ in range(2)
    ]
    prompt = words(1, 45)
    sequences = [cache.sequence(prompt) for cache in caches]
    found = [one._search for one in sequences]
    assert all(search is not None and search.lease is not None for search in found)
    assert [bool(search.lease.held) for search in found if search and search.lease] == [True, False]
    assert not waits
    for sequence in sequences:
        assert apart(sequence.logits(), fresh_logits("llama", prompt)) < 1e-3
    for cache in caches:
        assert cache.flush(30)
        cache.close()
    # Another thread of the process is waited for.
    one, other = (
        PrefixCache(make_context("llama"), block_size=SIZE, tiers=[FolderStore(tmp_path)], **WAIT)
        for _ in range(2)
    )
    prompt = words(2, 45)
    first = one.sequence(prompt)
    thread = threading.Thread(target=other.sequence, args=(prompt,))
    thread.start()
    thread.join(60)
    assert len(waits) == 1
    first.close()


def test_requests_of_one_batch_do_not_wait_for_each_others_leases(
    make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every search is over before its request is looked at: as on a busy machine."""
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(Fetch, "start", Fetch.run)
    waits: list[Any] = []
    monkeypatch.setattr(leases.Lease, "wait", lambda *given: waits.append(given))
    store, ctx = MemoryStore(), make_context("llama", n_ctx=1024)
    cache = PrefixCache(ctx, block_size=SIZE, tiers=[store], **WAIT)
    generator = BatchGenerator(cache, n_chunk=32)
    prompts = [words(1, 80) + words(10 + i, 9) for i in range(4)]
    handles = [generator.submit(prompt, 1) for prompt in prompts]
    generator.run()
    assert not waits
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.tokens[0] == int(fresh_logits("llama", prompt).argmax())
    assert ctx.tokens_evaluated <= 80 + 4 * 9
    assert cache.flush(30)
    assert not store._leases
    cache.close()


def test_a_lease_is_given_back_when_everything_is_written(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    store, prompt = FolderStore(tmp_path), words(1, 45)
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT) as cache:
        sequence = cache.sequence(prompt)
        assert sequence._search is not None
        lease = sequence._search.lease
        assert lease is not None
        assert lease.held
        other = FolderStore(tmp_path)
        key = cache._tiers.tiers[0].sealed.envelope.name(lease.key)
        assert not other.lease(key, 1.0)
        sequence.logits()  # the sequence stays open
        assert cache.flush(30)
        assert other.contains([key]) == 1
        assert other.lease(key, 1.0)
        other.release(key)
        # Nothing is evaluated: the lease goes with the sequence.
        sequence = cache.sequence(words(2, 45))
        assert sequence._search is not None
        lease = sequence._search.lease
        sequence.close()
        assert cache.flush(30)
        assert lease is not None
        assert other.lease(cache._tiers.tiers[0].sealed.envelope.name(lease.key), 1.0)


def test_a_batch_gives_its_lease_back(make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    store = MemoryStore()
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
    generator = BatchGenerator(cache)
    handle = generator.submit(words(1, 45), 3)
    generator.step()
    assert len(handle.tokens) == 1
    assert cache.flush(30)
    assert not store._leases
    assert len(list(store.entries())) >= 5
    generator.run()
    cache.close()


class Marks(MemoryStore):
    """A store of a user's own, whose leases are files: whoever releases one takes it from all."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def lease(self, key: bytes, seconds: float) -> bool:
        if (self.folder / key.hex()).exists():
            return False
        (self.folder / key.hex()).touch()
        return True

    def release(self, key: bytes) -> None:
        (self.folder / key.hex()).unlink(missing_ok=True)


ORDERS = list(permutations(["cache", "context", "sequence", "generator"]))


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_closing_gives_back_the_leases_of_what_is_open(
    order: tuple[str, ...],
    clears: bool,
    make_context: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Sequences that were not evaluated yet, and requests that wait: others need not wait."""
    monkeypatch.setattr(leases, "LEAST_SECONDS", 0.0)
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=SIZE, tier_seconds=20, tiers=[Marks(tmp_path)])
    sequence = cache.sequence(words(1, 100))
    generator = BatchGenerator(cache)
    generator.submit(words(2, 100), 2)
    search = generator._schedule.waiting[0]._sequence._search  # type: ignore[attr-defined]
    assert search.done.wait(20)
    assert len(list(tmp_path.iterdir())) == 2
    if clears:
        cache.clear()
    ends = {"cache": cache, "context": ctx, "sequence": sequence, "generator": generator}
    for name in order:
        ends[name].close()
    until = time.monotonic() + 20
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())
