"""Writing behind: its order, what is dropped, and who goes first."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pykvcache.prefix.stores import Envelope, MemoryStore
from pykvcache.prefix.tiers import writer as writing
from pykvcache.prefix.tiers.tier import Tier
from pykvcache.prefix.tiers.writer import Chain, Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer

SEAL = Envelope.overhead


def key(name: object) -> bytes:
    return str(name).encode().ljust(32, b".")


def chain(*names: object, size: int = 100, namespace: str = "") -> Chain:
    keys = [key(name) for name in names]
    return Chain([(one, bytes(size)) for one in keys], namespace, uses=keys)


class Recorder(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[str]]] = []
        self.times: list[tuple[float, float]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = 0.0

    def note(self, call: str, keys: Iterable[bytes]) -> None:
        self.calls.append((call, [one.decode().rstrip(".") for one in keys]))

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        found, began = list(items), time.monotonic()
        self.note("put", (one for one, _ in found))
        assert self.gate.wait(60)
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        n = super().put(found)
        self.times.append((began, time.monotonic()))
        return n

    def touch(self, keys: Sequence[bytes]) -> None:
        self.note("touch", keys)
        super().touch(keys)

    def discard(self, keys: Sequence[bytes]) -> int:
        self.note("discard", keys)
        return super().discard(keys)

    def names(self) -> list[str]:
        return sorted(entry.key.decode().rstrip(".") for entry in self.entries())


@contextmanager
def opened(
    max_bytes: int = 64 << 20, progress: Callable[[], int] = lambda: 0, **options: int
) -> Iterator[tuple[Recorder, Writer]]:
    store = Recorder()
    tier = Tier(store, Envelope(model="m", layout="l"), owned=True)
    writer = Writer(tier, max_bytes, progress, **options)
    yield store, writer
    store.gate.set()
    writer.close(30)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_path_is_touched_before_and_after_its_end_is_written() -> None:
    """Before, so that room for its end is not made by evicting its beginning."""
    with opened() as (store, writer):
        writer.offer(chain("a", "b", "c"))
        assert writer.flush(30)
        path = ["a", "b", "c"]
        assert store.calls == [("touch", path), ("put", path), ("touch", path)]


def test_paths_that_end_with_the_same_record_are_both_used() -> None:
    """As the windows of two prompts that share their first block: the window's key comes last."""
    with opened() as (store, writer):
        for path in ("abz", "acz", "acz"):
            writer.offer(Chain(uses=[key(name) for name in path]))
        writer.offer(chain("x"))
        wait_until(lambda: bool(store.calls))
        assert store.calls[0] == ("touch", ["x", "a", "c", "z", "b"])


def test_uses_are_passed_on_after_a_while_and_when_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "_TOUCH_KEYS", 3)
    with opened() as (store, writer):
        for path in ("ab", "cd"):
            writer.offer(Chain(uses=[key(name) for name in path]))
        wait_until(lambda: store.calls == [("touch", ["c", "d", "a", "b"])])
        monkeypatch.setattr(writing, "_TOUCH_SECONDS", 0.1)
        writer.offer(Chain(uses=[key("e")]))
        assert len(store.calls) == 1
        wait_until(lambda: store.calls[1:] == [("touch", ["e"])])


def test_random_calls_are_written_in_their_order_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends of chains are dropped, removals wait for their turn, a namespace is taken back."""
    for seed in range(20):
        rng = random.Random(seed)
        room = rng.randrange(1, 9)
        monkeypatch.setattr(writing, "_STEP_BYTES", rng.choice([150, 250, 1 << 20]))
        with opened(max_bytes=100 * room + 50) as (store, writer):
            store.gate.clear()
            writer.offer(chain("first"))
            wait_until(lambda: store.calls[-1:] == [("put", ["first"])])
            assert not writer.flush(0)
            waiting: list[tuple[str, str]] = []  # names and namespaces; a removal has none
            n_dropped = 0
            for at in range(12):
                what = rng.random()
                n_free = room - sum(bool(space) for _, space in waiting)
                if what < 0.7:
                    names, space = [f"{at}.{i}" for i in range(rng.randrange(1, 5))], "ab"[at % 2]
                    writer.offer(chain(*names, namespace=space))
                    waiting += [(name, space) for name in names[:n_free]]
                    n_dropped += max(0, len(names) - n_free)
                elif what < 0.9:
                    gone = rng.choice([name for name, _ in waiting] or ["first"])
                    writer.offer(Chain(removes=[key(gone)]))
                    waiting.append((gone, ""))
                else:
                    writer.cancel("a")
                    waiting = [one for one in waiting if one[1] != "a"]
            written = [name for name, space in waiting if space]
            facts = (writer.n_items, writer.n_bytes, writer.dropped)
            assert facts == (len(written), 100 * len(written), n_dropped)
            store.gate.set()
            assert writer.flush(30)
            assert (writer.n_items, writer.n_bytes) == (0, 0)
            puts = [name for call, names in store.calls if call == "put" for name in names]
            assert puts == ["first", *written]
            kept = {"first"}
            for name, space in waiting:
                (kept.add if space else kept.discard)(name)
            assert store.names() == sorted(kept)


def test_close_gives_up_after_its_time_and_drops_the_rest() -> None:
    with opened() as (store, writer):
        store.gate.clear()
        writer.offer(chain("a"))
        wait_until(lambda: bool(store.calls))
        writer.offer(chain("b", "c"))
        began = time.monotonic()
        assert not writer.close(0.1)
        assert time.monotonic() - began < 30
        assert (writer.dropped, writer.n_bytes) == (2, 0)


def test_a_store_that_raises_ends_no_thread() -> None:
    class Raising(Recorder):
        def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
            if not self.calls[1:]:
                self.note("put", ())
                raise OSError("no")
            return super().put(items)

    store = Raising()
    tier = Tier(store, Envelope(model="m", layout="l"), owned=False)
    writer = Writer(tier, 1 << 20)
    for name in "abc":
        writer.offer(chain(name))
    assert writer.close(30)
    assert store.names() == ["b", "c"]
    assert tier.stats(0, 0, 0).failed == 1


PAUSE = 0.2
N = 4


@contextmanager
def working(progress: Callable[[], int], n: int = N) -> Iterator[tuple[Recorder, Writer]]:
    """Let blocks of three quarters of a step be written, each in 5 ms, so that each goes alone."""
    with opened(progress=progress) as (store, writer):
        store.seconds = 0.005
        writer.offer(chain(*range(n), size=writing._STEP_BYTES * 3 // 4))
        yield store, writer


def pauses(store: Recorder) -> list[float]:
    return [after[0] - before[1] for before, after in itertools.pairwise(store.times)]


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_LONGEST_PAUSE", PAUSE)


@pytest.mark.usefixtures("_short_pauses")
def test_writing_pauses_while_tokens_are_evaluated() -> None:
    with working(itertools.count().__next__) as (store, _):
        wait_until(lambda: len(store.times) == N)
        assert min(pauses(store)) >= 0.9 * PAUSE


@pytest.mark.usefixtures("_short_pauses")
def test_writing_does_not_pause_where_nothing_is_evaluated() -> None:
    with working(lambda: 7) as (store, _):
        wait_until(lambda: len(store.times) == N)
        assert min(pauses(store)) < 0.9 * PAUSE


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize("why", ["flush", "full", "close"])
def test_a_flush_or_a_full_queue_ends_the_pauses(why: str) -> None:
    with working(itertools.count().__next__, 24) as (store, writer):
        wait_until(lambda: bool(store.times))
        if why == "flush":
            assert writer.flush(30)
        elif why == "close":
            assert writer.close(30)
        else:
            writer.urgent_bytes = 1 << 18
            writer.offer(chain("x", size=1000))
        wait_until(lambda: not writer.n_items)
        assert len(store.times) <= 6, "still in single steps"
