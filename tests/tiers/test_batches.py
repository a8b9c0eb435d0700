"""Many requests over tiers: a prefix that they share is loaded or evaluated once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from memory.kit import Fresh, Make, words
from pykvcache import BatchGenerator, PrefixCache
from pykvcache.prefix.sequence import request_of
from pykvcache.prefix.stores import MemoryStore
from tiers.kit import SIZE, WAIT, write
from tiers.slow import SlowStore

SHARED = words(1, 80)


def prompts(n: int) -> list[list[int]]:
    return [SHARED + words(10 + i, 9) for i in range(n)]


class Gate(SlowStore):
    """A store that answers when the test says so, and counts what it gave."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, latency=60.0)
        self.given: list[bytes] = []

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[bytearray]) -> int:  # type: ignore[override]
        n = super().get_into(keys, buffers)
        self.given += keys[:n]
        return n


@pytest.mark.parametrize("name", ["llama", "jamba"])
@pytest.mark.parametrize("where", ["in a tier", "nowhere"])
def test_requests_that_begin_alike_load_or_evaluate_it_once(
    where: str, name: str, make_context: Make, fresh_logits: Fresh
) -> None:
    gate = Gate(MemoryStore())
    if where == "in a tier":
        write(make_context(name), gate.store, SHARED)
    ctx = make_context(name, n_ctx=1024)
    cache = PrefixCache(ctx, block_size=SIZE, tiers=[gate], **WAIT)
    generator = BatchGenerator(cache, n_chunk=32)
    handles = [generator.submit(prompt, 2) for prompt in prompts(6)]
    assert cache.stats().evaluated == 6 * 89, "no request has waited yet"
    gate.closing.set()
    generator.run()
    for prompt, handle in zip(prompts(6), handles, strict=True):
        assert handle.tokens[0] == int(fresh_logits(name, prompt).argmax())
    assert len(gate.given) == len(set(gate.given)), "a block was loaded twice"
    # Nine tokens of each, and one more per answer; without its state, up to a block before them.
    own = 6 * (9 + 1 + (0 if name == "llama" else SIZE))
    if where == "in a tier":
        assert len(gate.given) >= 80 // SIZE
        assert ctx.tokens_evaluated <= own + SIZE
    else:
        assert ctx.tokens_evaluated <= own + 80
    cache.close()


def test_a_request_that_waits_for_a_tier_stands_in_nobodys_way(make_context: Make) -> None:
    gate = Gate(MemoryStore())
    write(make_context("llama"), gate.store, SHARED)
    cache = PrefixCache(make_context("llama", n_ctx=1024), block_size=SIZE, tiers=[gate], **WAIT)
    generator = BatchGenerator(cache)
    other = generator.submit(words(5, SIZE - 1), 40)  # too short for a block: nothing to look for
    slow = generator.submit(SHARED, 3)
    for i in range(10):
        assert generator.step() != []
        assert len(other.tokens) == i + 1
    assert len(slow.tokens) == 0
    gate.closing.set()
    generator.run()
    assert len(other.tokens) > 10
    assert len(slow.tokens) == 3
    assert slow.sequence.reuse.remote == 79
    cache.close()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_when_the_first_one_leaves_the_next_one_looks(
    how: str, make_context: Make, fresh_logits: Fresh
) -> None:
    gate = Gate(MemoryStore())
    write(make_context("llama"), gate.store, SHARED)
    cache = PrefixCache(make_context("llama", n_ctx=1024), block_size=SIZE, tiers=[gate], **WAIT)
    generator = BatchGenerator(cache)
    handles = [generator.submit(one, 2) for one in prompts(4)]
    mine = handles[0].sequence
    request = request_of(mine)
    assert request is not None
    assert request.search is not None
    if how == "abort":
        handles[0].abort()
    else:
        mine.close()
    gate.closing.set()
    generator.run()
    for prompt, handle in zip(prompts(4)[1:], handles[1:], strict=True):
        assert handle.tokens[0] == int(fresh_logits("llama", prompt).argmax())
    assert handles[0].finish_reason == ("aborted" if how == "abort" else "error")
    cache.close()


def test_a_generator_is_closed_while_tiers_are_searched(make_context: Make) -> None:
    gate = Gate(MemoryStore())
    cache = PrefixCache(make_context("llama", n_ctx=1024), block_size=SIZE, tiers=[gate], **WAIT)
    generator = BatchGenerator(cache)
    generator.start()
    handles = [generator.submit(prompt, 2) for prompt in prompts(3)]
    generator.close()
    assert [handle.finish_reason for handle in handles] == ["aborted"] * 3
    gate.closing.set()
    cache.close()
    assert threading.active_count() < 100


def test_as_many_searches_as_requests_may_run(make_context: Make) -> None:
    gate = Gate(MemoryStore())
    cache = PrefixCache(make_context("llama", n_ctx=1024), block_size=SIZE, tiers=[gate], **WAIT)
    generator = BatchGenerator(cache, 2)
    handles = [generator.submit(words(20 + i, 30), 1) for i in range(12)]
    looking = sum(one.name == "pykvcache-load" for one in threading.enumerate())
    assert looking <= 2 + 1
    gate.closing.set()
    generator.run()
    assert all(len(handle.tokens) == 1 for handle in handles)
    cache.close()


def test_a_generator_learns_how_long_evaluating_takes(make_context: Make) -> None:
    with (
        PrefixCache(make_context("llama"), block_size=SIZE, tiers=[MemoryStore()]) as cache,
        BatchGenerator(cache) as generator,
    ):
        evaluation = cache._core.link.evaluation
        assert not evaluation.is_learned
        generator.submit(words(1, 8), 3).wait()
        assert not evaluation.is_learned  # few tokens tell little
        generator.submit(words(2, 60), 3).wait()
        assert evaluation.is_learned
