"""What is said of tiers: which blocks came to a folder or a server, and which have gone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest

from memory.kit import Make, words
from pykvcache import PrefixCache
from pykvcache.prefix.block_hash import NamedPrompt
from pykvcache.prefix.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheEvent,
    EventLog,
)
from pykvcache.prefix.stores import FolderStore, MemoryStore
from pykvcache.prefix.tiers import tier as tiers_module
from pykvcache.prefix.tiers.tier import Notices
from pykvcache.prefix.zmq_events import as_map
from tiers.kit import SIZE, WAIT, clear_memory, evaluate, write


def below(events: Sequence[CacheEvent]) -> list[CacheEvent]:
    return [event for event in events if getattr(event, "medium", "CPU") != "CPU"]


def names(events: Sequence[CacheEvent], medium: str) -> set[bytes]:
    there: set[bytes] = set()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            there.clear()
        elif event.medium == medium:
            (there.update if isinstance(event, BlockStored) else there.difference_update)(
                event.block_hashes
            )
    return there


@pytest.mark.parametrize(("where", "medium"), [("folder", "DISK"), ("memory", "EXTERNAL")])
def test_a_tier_says_what_came_once_and_with_its_tokens(
    where: str, medium: str, make_context: Make, tmp_path: Path
) -> None:
    tier = FolderStore(tmp_path) if where == "folder" else MemoryStore()
    prompt = words(1, 45)
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[tier], **WAIT)
    for _ in range(2):
        evaluate(cache, prompt)
    events = list(cache.events)
    (stored,) = below(events)
    in_memory = next(event for event in events if isinstance(event, BlockStored))
    assert isinstance(stored, BlockStored)
    assert stored.medium == medium
    assert stored.block_hashes == in_memory.block_hashes
    assert stored.token_ids == tuple(prompt[:40])
    assert stored.parent_block_hash is None
    assert stored.block_size == SIZE
    assert as_map(stored)["medium"] == medium
    # A longer prompt: what is new, after the block that is known.
    evaluate(cache, prompt + words(2, 20))
    (more,) = below(list(cache.events))
    assert isinstance(more, BlockStored)
    assert more.parent_block_hash == stored.block_hashes[-1]
    assert more.token_ids == tuple((prompt + words(2, 20))[40:64])
    cache.close()


def test_what_another_process_left_is_said_when_it_is_taken(make_context: Make) -> None:
    store, prompt = MemoryStore(), words(1, 45)
    write(make_context("llama"), store, prompt)
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT) as cache:
        assert cache.sequence(prompt).reuse.remote == 44
        said = below(list(cache.events))
        assert len(names(said, "EXTERNAL")) == 5
        tokens = [token for event in said for token in event.token_ids]  # type: ignore[union-attr]
        assert sorted(tokens) == sorted(prompt[:40])


def test_what_goes_is_said_whoever_removed_it(make_context: Make, tmp_path: Path) -> None:
    """Damaged here; removed by another process; evicted to make room."""
    prompt = words(1, 45)
    store = FolderStore(tmp_path)
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
    heard: list[CacheEvent] = []
    cache.events.subscribe(heard.append)
    evaluate(cache, prompt)
    stored = next(event for event in below(heard) if isinstance(event, BlockStored))
    clear_memory(cache)
    damaged, gone = stored.block_hashes[3], stored.block_hashes[1]
    path = next(tmp_path.glob(f"blocks/*/{damaged.hex()}*"))
    path.write_bytes(path.read_bytes()[:-1])
    cache.sequence(prompt).close()
    assert names(heard, "DISK") == {*stored.block_hashes} - {damaged}
    assert cache.flush(30)  # what is left is offered again: looking at it must not fall in between
    with FolderStore(tmp_path) as other:
        assert other.discard([gone]) == 1
    clear_memory(cache)
    cache.sequence(prompt).close()
    assert gone not in names(heard, "DISK")
    # Removed elsewhere, and no request looks for it: noticed with the next write.
    with FolderStore(tmp_path) as other:
        assert other.discard([stored.block_hashes[0]]) == 1
    evaluate(cache, words(2, 20))
    assert len(names(heard, "DISK")) == 4
    assert stored.block_hashes[0] not in names(heard, "DISK")
    cache.close()


def test_a_store_that_gives_no_answer_has_lost_nothing(make_context: Make) -> None:
    class Failing(MemoryStore):
        is_out = False

        def contains(self, keys: Sequence[bytes]) -> int:
            if self.is_out:
                self.counters.add(timed_out=1)
                return 0
            return super().contains(keys)

    store = Failing()
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
    evaluate(cache, words(1, 45))
    clear_memory(cache)
    store.is_out = True
    cache.sequence(words(1, 45)).close()
    assert len(names(list(cache.events), "EXTERNAL")) == 5
    cache.close()


def test_the_list_of_what_was_said_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "MAX_BLOCKS", 4)
    log, heard = EventLog(), list[CacheEvent]()
    log.subscribe(heard.append)
    said, prompt = Notices("disk", log.add), NamedPrompt(bytes(32), bytes(9 * 8), 2)
    keys = prompt.names
    said.stored(prompt, range(9))
    assert names(heard, "DISK") == {*keys[5:]}
    said.stored(prompt, [5])
    assert len(heard) == 2, "what was said is not said again"
    said.stored(prompt, [0])
    assert names(heard, "DISK") == {keys[7], keys[8], keys[5], keys[0]}
    assert isinstance(heard[-1], BlockRemoved)


@pytest.mark.parametrize("where", ["folder", "memory"])
@pytest.mark.parametrize("cleared", ["tenant", None])
def test_clear_leaves_no_tokens_of_a_tenant_in_what_waits(
    where: str, cleared: str | None, make_context: Make, tmp_path: Path
) -> None:
    tier = FolderStore(tmp_path) if where == "folder" else MemoryStore()
    medium = "DISK" if where == "folder" else "EXTERNAL"
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[tier], **WAIT)

    def work(seed: int, namespace: str) -> list[int]:
        prompt = words(seed, 45)
        evaluate(cache, prompt, namespace=namespace)
        return prompt

    work(1, "tenant")
    known = list(cache.events)
    work(2, "tenant")
    other = work(3, "other")
    cache.clear(cleared)
    events = list(cache.events)
    left = [token for event in events for token in getattr(event, "token_ids", ())]
    assert left == ([] if cleared is None else [*other[:40], *other[:40]])
    if cleared is not None:
        # What was read about before is still there; what was not, is said when it is used again.
        assert len(names([*known, *events], medium)) == 10
        assert not names([*known, *events], "CPU") - names(events, "CPU")
    prompt = work(2, "tenant")
    again = [event for event in cache.events if getattr(event, "medium", "") == medium]
    assert [list(event.token_ids) for event in again if isinstance(event, BlockStored)] == [
        prompt[:40]
    ]
    cache.close()


def test_clear_drops_the_queue_before_the_events(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that are written in between would leave their tokens in unread events."""
    withdraw, store = EventLog.withdraw, MemoryStore()

    def written_first(log: EventLog, space: str | None) -> set[tuple[str, bytes]]:
        found = withdraw(log, space)
        may_write.set()
        assert cache.flush(30)
        return found

    may_write = threading.Event()
    monkeypatch.setattr(EventLog, "withdraw", written_first)
    monkeypatch.setattr(store, "touch", lambda keys: may_write.wait(30))  # comes before a write
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT) as cache:
        for seed in (1, 2):
            with cache.sequence(words(seed, 45)) as sequence:
                sequence.logits()
        cache.clear("")
        tokens = [event.token_ids for event in cache.events if isinstance(event, BlockStored)]
    assert tuple(words(2, 45)[:40]) not in tokens


@pytest.mark.parametrize("media", [["disk"], ["disk", "remote"], ["remote", "remote"]], ids=str)
def test_nobody_believes_in_what_has_gone(media: list[str]) -> None:
    """A subscriber, and a reader now and then, whatever is withdrawn in between."""
    for seed in range(200):
        rng = random.Random(seed)
        log, heard, read = EventLog(), list[CacheEvent](), list[CacheEvent]()
        log.subscribe(heard.append)
        tiers = [Notices(medium, log.add) for medium in media]
        there: list[set[bytes]] = [set() for _ in media]
        prompts = {one: NamedPrompt(one.encode() * 32, bytes(64), 2, one) for one in "ab"}
        for _ in range(100):
            i, what = rng.randrange(len(media)), rng.random()
            if what < 0.4:
                prompt, first = prompts[rng.choice("ab")], rng.randrange(5)
                blocks = range(first, first + rng.randint(1, 3))
                there[i].update(prompt.names[at] for at in blocks)
                tiers[i].stored(prompt, blocks)
            elif what < 0.6 and there[i]:
                gone = rng.choice(sorted(there[i]))
                there[i].remove(gone)
                tiers[i].removed([gone])
            elif what < 0.85:
                read += islice(log, rng.randint(0, 3))
            else:
                withdrawn = log.withdraw(rng.choice(["a", "b"]))
                for tier in tiers:
                    tier.announce_again(key for medium, key in withdrawn if medium == tier.medium)
        read += log
        for medium in {tier.medium for tier in tiers}:
            stored = [
                keys for tier, keys in zip(tiers, there, strict=True) if tier.medium == medium
            ]
            known = set[bytes]().union(*stored)
            assert names(heard, medium) <= known, seed
            assert names(read, medium) <= known, seed


class Gate:
    """A lock that calls something before it is taken for the first time after a gap was noted."""

    def __init__(self, log: EventLog, call: Callable[[], object]) -> None:
        self._log, self._call = log, call
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if self._log._has_gap and not self._lock.locked():
            call, self._call = self._call, lambda: None
            call()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_who_reads_while_the_oldest_is_forgotten_misses_no_removal() -> None:
    """The reader would take the gap, then what came before the event that is about to go."""
    a, b = b"a" * 32, b"b" * 32
    log, heard = EventLog(2000), list[CacheEvent]()
    log._lock = Gate(log, lambda: heard.extend(islice(log, 2)))  # type: ignore[assignment]
    log.add(BlockStored((a,), None, (1,), 1))
    log.add(BlockRemoved((a,)))
    log.add(BlockStored((b,), None, (2,), 1))  # there is room for two
    heard += log
    assert names(heard, "CPU") <= {b}
