"""Reading ahead: what a tier has of a prompt comes to memory, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from memory.kit import Case, Fresh, Make, apart, words
from pykvcache import PrefixCache
from pykvcache.errors import ClosedError
from pykvcache.prefix import prefetch
from pykvcache.prefix.stores import MemoryStore
from tiers.kit import SERVED, SIZE, WAIT, write
from tiers.slow import SlowStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


@pytest.mark.parametrize("case", SERVED[::2], ids=str)
def test_a_prompt_is_in_memory_before_it_is_asked_for(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    prompt, store = words(1, 45), MemoryStore()
    write(make_context(case.name, **case.options), store, prompt)
    ctx = make_context(case.name, **case.options)
    cache = PrefixCache(ctx, block_size=SIZE, tiers=[store], tier_seconds=0)
    one = cache.prefetch(prompt)
    assert one.wait(30)
    assert one.is_done
    read = cache.stats().tiers[0].read
    sequence = cache.sequence(prompt)
    report = sequence.reuse
    assert report.remote == 0
    assert report.ram >= (40 if ctx.native.has_rest else 44)
    assert one.n_tokens >= report.ram
    assert apart(sequence.logits(), fresh_logits(case.name, prompt)) < case.tolerance
    again = cache.prefetch(prompt)
    assert again.wait(30)
    assert again.n_tokens <= 45 % SIZE
    assert cache.stats().tiers[0].read <= read + 1, "blocks in memory are not read again"
    cache.close()


def test_no_more_is_read_than_memory_has_room_for(make_context: Make) -> None:
    prompt, store, ctx = words(1, 160), MemoryStore(), make_context("llama")
    write(ctx, store, prompt)
    block = ctx.native.block_bytes() * SIZE
    cache = PrefixCache(
        make_context("llama"), block_size=SIZE, ram_bytes=8 * block, tiers=[store], **WAIT
    )
    one = cache.prefetch(prompt)
    assert one.wait(30)
    stats = cache.stats()
    assert stats.ram_bytes <= 8 * block
    assert 0 < one.n_tokens <= 8 * SIZE
    assert stats.tiers[0].read_bytes <= 9 * block
    assert cache.sequence(prompt).reuse.evaluated == 1
    cache.close()
    # Without memory there is nothing to bring it to.
    cache = PrefixCache(make_context("llama"), block_size=SIZE, ram_bytes=0, tiers=[store], **WAIT)
    assert cache.prefetch(prompt).is_done
    cache.close()


def test_it_can_be_cancelled_and_the_cache_be_closed_and_dropped(make_context: Make) -> None:
    slow = SlowStore(MemoryStore(), latency=20.0)
    write(make_context("llama"), slow.store, words(1, 45))
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow], **WAIT)
    several = [cache.prefetch(words(1, 45 - i)) for i in range(3)]
    assert not several[0].wait(0)
    several[0].cancel()
    cache.close()
    slow.closing.set()
    assert all(one.wait(30) for one in several)
    assert [one.n_tokens for one in several] == [0, 0, 0]
    with pytest.raises(ClosedError):
        cache.prefetch([5, 6])
    slow = SlowStore(slow.store, latency=20.0)
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow], **WAIT)
    one, last = (cache.prefetch(words(1, 45)) for _ in range(2))
    del cache
    slow.closing.set()
    assert one.wait(30)
    assert last.wait(30)


def test_many_are_given_up_and_wrong_arguments_raise(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MAX_WAITING", 2)
    slow = SlowStore(MemoryStore(), latency=20.0)
    cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow], **WAIT)
    several = [cache.prefetch(words(1, 45)) for _ in range(4)]
    assert [one.is_done for one in several] == [False, False, True, True]
    with pytest.raises(TypeError):
        cache.prefetch(words(1, 45), namespace=3)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        cache.prefetch([10**9])
    with pytest.raises(ValueError, match="seconds"):
        several[0].wait(-1)
    slow.closing.set()
    assert all(one.wait(30) for one in several)
    assert "done" in repr(several[0])
    cache.close()


class GatedStore(MemoryStore):
    """Answers reads once its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read, self.gate = threading.Event(), threading.Event()

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        n = super().get_into(keys, buffers)
        self.is_read.set()
        assert self.gate.wait(30)
        return n


PROMPT = words(1, 45)


@pytest.mark.parametrize(
    "path", [PROMPT, PROMPT[:20], [*PROMPT, 6, 7], None], ids=["whole", "begin", "answer", "all"]
)
@pytest.mark.parametrize("way", ["late", "awaited", "prefetched"])
def test_what_is_forgotten_does_not_come_back_from_tiers(
    way: str, path: list[int] | None, make_context: Make
) -> None:
    """It was on its way up when it was forgotten; other prompts still come."""
    store, other = GatedStore(), words(3, 45)
    store.gate.set()
    for prompt in (PROMPT, other):
        write(make_context("llama"), store, prompt)
    store.gate.clear()
    store.is_read.clear()
    seconds = 30 if way == "awaited" else 0
    with PrefixCache(
        make_context("llama"), block_size=SIZE, tiers=[store], tier_seconds=seconds
    ) as cache:
        threads = list[threading.Thread]()
        for prompt in (PROMPT, other):
            if way == "prefetched":
                cache.prefetch(prompt)
            else:
                run = threading.Thread(target=lambda p=prompt: cache.sequence(p).close())
                run.start()
                threads.append(run)
        assert store.is_read.wait(30)
        loading, until = list[threading.Thread](), time.monotonic() + 30
        while len(loading) < 1 + (way != "prefetched"):
            assert time.monotonic() < until
            time.sleep(0.01)
            names = ("pykvcache-load", "pykvcache-prefetch")
            loading = [one for one in threading.enumerate() if one.name in names]
        for thread in threads if way == "late" else ():
            thread.join(30)
        if path is None:
            cache.clear()
        else:
            cache.forget(path)
        store.gate.set()
        for thread in [*loading, *threads]:
            thread.join(30)
        assert cache.pin(PROMPT).n_tokens == 0
        assert cache.pin(other).n_tokens >= 40 * (path is not None)
