"""Memory for blocks is used again, once nothing refers to it, and never before."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory.kit import Logits, apart
from pykvcache import LlamaContext, PrefixCache
from pykvcache._native.memory_pool import SPARE_BYTES, drop_spare, spare_bytes
from pykvcache.prefix import reserve
from pykvcache.prefix.reserve import LEAST_BLOCK, Reserve

SIZE = LEAST_BLOCK
Make = Callable[..., LlamaContext]
Fresh = Callable[..., Logits]


def address(data: memoryview) -> int:
    """Where memory lies."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def test_memory_comes_back_when_nothing_refers_to_it() -> None:
    one = Reserve(SIZE, 32 * SIZE)
    data = one.take(SIZE - 100)
    assert len(data) == SIZE - 100
    at = address(data)
    inner = np.frombuffer(data[16:-16], np.uint8)[8:]
    del data
    assert one.n_bytes == 0
    assert address(one.take(SIZE)) != at  # `inner` still lies in it
    assert one.n_bytes == SIZE
    inner[:] = 7
    del inner
    assert one.n_bytes == 2 * SIZE
    kept = [one.take(SIZE), one.take(SIZE)]
    assert at in map(address, kept)
    assert one.n_bytes == 0


def test_an_eighth_of_the_budget_is_kept() -> None:
    one = Reserve(SIZE, 24 * SIZE)
    lent = [one.take(SIZE) for _ in range(8)]
    lent.clear()
    assert one.n_bytes == 3 * SIZE
    lent = [one.take(SIZE)]
    one.close()
    lent.clear()
    assert one.n_bytes == 0
    assert len(one.take(SIZE)) == SIZE


def test_a_closed_one_leaves_a_part_to_the_next() -> None:
    """New memory of a short-lived cache would cost more than all that it does with it."""
    drop_spare()
    one = Reserve(SIZE, 1 << 30)
    lent = [one.take(SIZE) for _ in range(200)]
    places = set(map(address, lent))
    lent.clear()
    assert one.n_bytes == 200 * SIZE
    one.close()
    n = SPARE_BYTES // SIZE
    assert spare_bytes() == n * SIZE
    two = Reserve(SIZE, 1 << 30)
    again = [two.take(SIZE) for _ in range(n)]
    assert len({address(data) for data in again} & places) == n
    assert not spare_bytes()
    again.clear()
    two.close()
    other = Reserve(2 * SIZE, 1 << 30)
    assert len(other.take(2 * SIZE)) == 2 * SIZE, "of another size"
    drop_spare()


def test_a_small_budget_leaves_no_more_than_it_may_keep() -> None:
    drop_spare()
    one = Reserve(SIZE, 24 * SIZE)
    lent = [one.take(SIZE) for _ in range(8)]
    lent.clear()
    one.close()
    assert spare_bytes() == 3 * SIZE
    drop_spare()
    assert not spare_bytes()


def test_a_cache_without_tiers_gets_no_memory_in_advance(make_context: Make) -> None:
    """What it keeps is what it was given: no more is counted, or taken from a decode's time."""
    cache = PrefixCache(make_context("llama"), block_size=256)
    assert cache._reserve.max_bytes
    with cache.sequence(np.arange(5, 50)) as sequence:
        sequence.evaluate()
    filler = [one for one in threading.enumerate() if one.name == "pykvcache-memory"]
    assert not filler
    assert cache._reserve.n_bytes == 0


@pytest.mark.parametrize("other", [10, SIZE // 2, SIZE + 1])
def test_other_sizes_are_new_memory(other: int) -> None:
    one = Reserve(SIZE, 24 * SIZE)
    assert len(one.take(other)) == other
    assert one.n_bytes == 0
    small = Reserve(1000, 1 << 30)
    assert len(small.take(1000)) == 1000
    assert small.n_bytes == 0


def filled(one: Reserve, n: int) -> None:
    until = time.monotonic() + 20
    while one.n_bytes < n * SIZE and time.monotonic() < until:
        time.sleep(0.005)
    assert one.n_bytes == n * SIZE


def test_a_thread_gets_memory_in_advance() -> None:
    one = Reserve(SIZE, 64 * SIZE)
    one.fill(0)
    one.fill(2 * SIZE)
    filled(one, 2)
    one.fill(100 * SIZE)
    filled(one, 4)  # half of what may be kept
    lent = [one.take(SIZE) for _ in range(3)]
    one.fill(100 * SIZE)
    filled(one, 4)
    lent.clear()
    assert one.n_bytes == 7 * SIZE


def test_threads_take_and_give_back() -> None:
    one = Reserve(SIZE, 64 * SIZE)
    wrong = []

    def work(seed: int) -> None:
        for i in range(200):
            mine = [np.frombuffer(one.take(SIZE), np.uint8) for _ in range(1 + (seed + i) % 3)]
            for k, data in enumerate(mine):
                data[:64] = (seed + k) % 251
            wrong.extend(1 for k, data in enumerate(mine) if (data[:64] != (seed + k) % 251).any())

    threads = [threading.Thread(target=work, args=(40 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < one.n_bytes <= 8 * SIZE
    assert not one._pool.n_lent


def test_a_cache_uses_the_memory_of_its_blocks_again(
    make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reserve, "LEAST_BLOCK", 1)
    monkeypatch.setattr(Reserve, "fill", lambda *_: None)
    drop_spare()
    context = make_context("llama")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(5, 56, 90).tolist() for _ in range(4)]
    with PrefixCache(context, block_size=16, tiers=[tmp_path], tier_seconds=60) as cache:
        pool = cache._reserve._pool
        for step in range(24):
            prompt = prompts[step % 4]
            with cache.sequence(prompt) as sequence:
                logits = sequence.logits()
                assert apart(logits, fresh_logits("llama", prompt)) < 1e-5
                assert (sequence.reuse.disk > 0) == (step >= 4)
            cache.flush(60)
            cache.clear()
            if step == 7:
                before = pool.kept_bytes
        came_back = (pool.kept_bytes - before) // pool.size
    assert came_back > 5 * 16 - 8


def test_memory_comes_slowly_while_tokens_are_evaluated() -> None:
    evaluated = itertools.count()
    one = Reserve(SIZE, 64 * SIZE)
    one.fill(4 * SIZE, lambda: next(evaluated))
    filled(one, 4)  # slowly, but all of it
    assert next(evaluated) >= 5  # asked at the beginning and after each
    one.close()


def test_closing_ends_the_thread_that_gets_memory() -> None:
    evaluated = itertools.count()
    one = Reserve(SIZE, 4000 * SIZE)
    one.fill(4000 * SIZE, lambda: next(evaluated))
    while not one.n_bytes:
        time.sleep(0.001)
    one.close()
    until = time.monotonic() + 20
    while one._filling.locked() and time.monotonic() < until:
        time.sleep(0.001)
    assert not one._filling.locked()
    assert one.n_bytes <= SIZE


def test_free_memory_goes_before_anything_is_evicted(make_context: Make) -> None:
    """A cache that is full holds as many blocks as one that keeps no memory free."""
    ctx = make_context("llama", n_ctx=2048)
    cell_bytes = ctx._native.block_bytes()
    size = -(-LEAST_BLOCK // cell_bytes)
    budget = 40 * size * cell_bytes
    found = []
    for limit in (0, reserve.MOST_BYTES):
        with PrefixCache(ctx, block_size=size, ram_bytes=budget) as cache:
            cache._reserve.max_bytes = min(cache._reserve.max_bytes, limit)
            for i in range(60):
                tokens = np.random.default_rng(i).integers(5, 56, size + 1)
                with cache.sequence(tokens) as sequence:
                    sequence.evaluate()
            assert cache.stats().removed > 10
            assert cache.stats().ram_bytes <= budget
            found.append(cache.stats().ram_blocks)
    assert found[0] == found[1]


def test_memory_that_comes_later_keeps_the_budget() -> None:
    """Blocks take the room while the thread still gets memory, or while some is lent."""
    one = Reserve(SIZE, 64 * SIZE)
    lent = [one.take(SIZE) for _ in range(6)]
    assert not one.release(-3 * SIZE)
    del lent[:2]
    assert one.n_bytes == 2 * SIZE
    assert one.release(SIZE)  # the budget is full
    assert one.n_bytes == SIZE
    lent.clear()
    one.fill(4 * SIZE)
    until = time.monotonic() + 20
    while one._filling.locked() and time.monotonic() < until:
        time.sleep(0.001)
    assert one.n_bytes == SIZE
    assert not one.release(-2 * SIZE)
    one.fill(4 * SIZE)
    filled(one, 3)
    assert one.release(100 * SIZE)
    assert one.n_bytes == 0
    assert not one.release(1)


def test_what_is_much_smaller_than_a_block_gets_no_memory_of_one() -> None:
    """It counts as what was asked for, and a block's was taken: the process had 9 % more."""
    one = Reserve(SIZE, 64 * SIZE)
    (small,) = one.arrays(SIZE - SIZE // 50, 1)
    (block,) = one.arrays(SIZE - 100, 1)
    assert one._pool.n_lent == 1
    assert small.base is None
    del block
    assert not one._pool.n_lent
    one.close()


def test_the_allocator_is_asked_after_what_was_evicted() -> None:
    """Each of thousands of small things that left counted as all that was still to leave."""
    asked = []
    one = Reserve(SIZE, 8 << 20, lambda: asked.append(1))
    for excess in range(20 << 20, 0, -4096):
        one.release(excess)
    one.release(-1)
    assert 3 <= len(asked) <= 5


@pytest.mark.parametrize("policy", ["adaptive", "lru", "s3fifo", "vllm"])
def test_blocks_that_leave_give_their_memory_to_those_that_come(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """It went to the allocator and the system, and each prompt wrote to new memory again."""
    monkeypatch.setattr(reserve, "LEAST_BLOCK", 1)
    monkeypatch.setattr(reserve, "TRIMMED_BYTES", 1 << 14)
    ctx = make_context("llama", n_ctx=1024)
    size = 64 * ctx._native.block_bytes()
    rng = np.random.default_rng(3)
    with PrefixCache(ctx, block_size=64, ram_bytes=20 * size, policy=policy) as cache:
        trims: list[int] = []
        monkeypatch.setattr(cache._reserve, "_trim", lambda: trims.append(1))
        pool = cache._reserve._pool
        for step in range(40):
            if step == 20:
                assert cache.stats().removed
                stored, came_back = cache.stats().stored, pool.kept_bytes
                trims.clear()
            with cache.sequence([5 + step, *rng.integers(5, 56, 192).tolist()]) as sequence:
                sequence.evaluate()
            assert cache.stats().ram_bytes <= 20 * size
            assert pool.n_lent == cache.stats().ram_blocks
            assert pool.n_bytes <= pool.most_bytes, "nothing is due between calls"
        n = cache.stats().stored - stored
        assert n > 30
        assert (pool.kept_bytes - came_back) // size >= n - 2
        assert len(trims) <= 2
