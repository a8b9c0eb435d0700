"""What a cache keeps and counts: dropped sequences, tenants that go, tails that stay."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from pykvcache import LlamaContext, PrefixCache
from pykvcache.prefix.events import BlockRemoved, BlockStored
from pykvcache.prefix.pieces import taken

Make = Callable[..., LlamaContext]


def words(seed: int, n: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def test_a_sequence_dropped_while_another_thread_works_holds_nothing(make_context: Make) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=8)
    with cache.sequence(words(1, 40)) as first:
        first.evaluate()
    second = cache.sequence(words(1, 40))
    assert second.reuse.ram
    busy, done = threading.Event(), threading.Event()

    def work() -> None:
        with cache._pool.hold():
            busy.set()
            done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    busy.wait(10)
    del second
    done.set()
    thread.join()
    cache.sequence(words(2, 9)).close()
    assert not any(run.held for run in cache._ram.tree.runs())


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo", "hit-density"])
@pytest.mark.parametrize("name", ["jamba", "mamba", "llama"])
def test_counts_are_those_of_what_is_kept(name: str, policy: str, make_context: Make) -> None:
    ctx = make_context(name, n_seq_max=2)
    rng = np.random.default_rng(1)
    trunk = words(1, 100)
    for ram_bytes in (3_000, 40_000, 200_000):
        with PrefixCache(ctx, block_size=8, ram_bytes=ram_bytes, policy=policy) as cache:
            for step in range(25):
                n = int(rng.integers(0, 80))
                space = str(rng.integers(2))
                with cache.sequence(trunk[:n] + words(step, 10), namespace=space) as sequence:
                    sequence.evaluate()
                if step % 10 == 9:
                    cache.clear("0")
                runs = list(cache._ram.tree.runs())
                stats = cache.stats()
                assert stats.ram_checkpoints == sum(run.is_checkpoint for run in runs)
                assert stats.ram_blocks == sum(
                    run.n_blocks for run in runs if not run.is_checkpoint
                )
                kept = sum(taken(p) for run in runs for p in run.payloads)
                for tail in cache._ram._tails.values():
                    kept += tail.nbytes - tail.buffer.nbytes + taken(tail.buffer)
                assert kept <= stats.ram_bytes <= ram_bytes


def test_clearing_a_tenant_leaves_short_prompts_of_others(make_context: Make) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=64)
    for space in ("a", "b"):
        with cache.sequence(words(1, 40), namespace=space) as sequence:
            sequence.evaluate()
    cache.clear("a")
    assert cache.sequence(words(1, 40), namespace="a").reuse.evaluated == 40
    assert cache.sequence(words(1, 40), namespace="b").reuse.evaluated == 1


def test_namespaces_that_hold_nothing_cost_nothing(make_context: Make) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx, block_size=8)
    for i in range(50):
        cache.sequence(words(1, 20), namespace=f"tenant {i}").close()
    assert len(cache._ram.tree._roots) <= 1


def test_tokens_that_a_block_holds_are_not_kept_twice(make_context: Make) -> None:
    """A chat that goes on: what came after its last full block is in the next block then."""
    ctx = make_context("llama", n_seq_max=2)
    cache = PrefixCache(ctx, block_size=8, policy="lru")
    chat = words(1, 100)
    for n in range(5, 100, 11):
        with cache.sequence(chat[:n]) as sequence:
            assert sequence.reuse.evaluated == (11 if n > 5 else 5)
            sequence.evaluate()
    tree = cache.tree()
    assert sum(node.n_tokens for node in tree) == 93
    with cache.sequence([*chat[:40], 5]) as sequence:
        assert sequence.reuse.evaluated == 1


def test_a_fork_of_what_was_cleared_is_shared_with_nobody(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=4)
    cache = PrefixCache(ctx, block_size=8)
    tokens = words(1, 40)
    before = cache.sequence(tokens)
    before.evaluate()
    cache.clear()
    fork = before.fork()
    assert cache.sequence(tokens).reuse.evaluated == 40
    fork.close()
    before.close()
    assert cache.sequence(tokens).reuse.evaluated == 40


@pytest.mark.parametrize("name", ["llama", "mamba", "jamba", "gemma3"])
def test_a_pin_keeps_what_makes_its_blocks_usable(name: str, make_context: Make) -> None:
    """Blocks without the state beside them are of no use where a memory has other parts."""
    ctx = make_context(name, n_ctx=512, n_seq_max=2, swa_full=False)
    cache = PrefixCache(ctx, block_size=8, ram_bytes=300_000, policy="fifo")
    kept = words(1, 40)
    with cache.sequence(kept) as sequence:
        sequence.evaluate()
    pin = cache.pin([*kept, 9])
    assert pin.n_tokens == 40
    for i in range(40):
        with cache.sequence(words(200 + i, 60)) as sequence:
            sequence.evaluate()
    assert cache.stats().removed
    assert pin.n_tokens == 40
    assert cache.sequence([*kept, 9]).reuse.ram == 40
    pin.release()
    assert pin.n_tokens == 0


def test_waiting_events_forget_the_tokens_of_a_tenant_that_is_cleared(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=2)
    cache = PrefixCache(ctx, block_size=8)

    def store(seed: int, space: str) -> None:
        with cache.sequence(words(seed, 40), namespace=space) as sequence:
            sequence.evaluate()

    store(1, "a")
    assert isinstance(next(iter(cache.events)), BlockStored)  # is read
    store(2, "a")
    store(3, "b")
    cache.clear("a")
    stored, removed = list(cache.events)
    assert isinstance(stored, BlockStored)
    assert list(stored.token_ids) == words(3, 40)
    assert isinstance(removed, BlockRemoved)
    assert len(removed.block_hashes) == 5  # of what was read about
    store(4, "b")
    assert cache.events.nbytes > 0
    cache.clear()
    assert [type(event).__name__ for event in cache.events] == ["BlockRemoved", "AllBlocksCleared"]
    assert cache.events.nbytes == 0
