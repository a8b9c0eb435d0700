"""Lookups of a cache, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pykvcache import BatchGenerator, LlamaContext, PrefixCache
from pykvcache.prefix.events import EventLog, Lookup
from pykvcache.simulate import read_trace, record, replay

Make = Callable[..., LlamaContext]
SIZE = 8


@pytest.mark.parametrize("name", ["lookups.jsonl", "lookups.jsonl.gz"])
def test_what_a_cache_was_asked_for_is_replayed(
    name: str, tmp_path: Path, make_context: Make
) -> None:
    """The simulator finds, over the same policy and without a limit, what the cache found."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    rng = np.random.default_rng(1)
    trunk = rng.integers(5, 56, 70)
    found = 0
    with PrefixCache(ctx, block_size=SIZE, policy="lru") as cache:
        waiting: list[Lookup] = []
        with record(cache.events, tmp_path / name):
            cache.events.subscribe_lookups(waiting.append)
            for _ in range(30):
                begin = trunk[: rng.integers(1, 70)]
                prompt = np.concatenate([begin, rng.integers(5, 56, rng.integers(1, 9))])
                with cache.sequence(prompt, namespace=str(rng.integers(2))) as sequence:
                    sequence.evaluate()
                # To whole blocks: the simulator knows no others.
                reuse = sequence.reuse
                known = len(prompt) if "all of it" in reuse.reason else reuse.ram
                found += known // SIZE * SIZE
        cache.sequence(trunk).close()  # is not recorded any more
        assert not any(isinstance(event, Lookup) for event in cache.events)
    trace = read_trace(tmp_path / name)
    assert (len(trace.prompts), trace.block_size) == (30, SIZE)
    assert trace.lengths == [lookup.n_tokens for lookup in waiting[:30]]
    assert len(waiting) == 31
    assert trace.n_blocks == sum(n // SIZE for n in trace.lengths)
    assert replay(trace, "lru", 10**6).hit_tokens == found > 0


def test_requests_of_a_batch_are_looked_up_once(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    heard: list[Lookup] = []
    with PrefixCache(ctx, block_size=SIZE) as cache:
        stop = cache.events.subscribe_lookups(heard.append)
        generator = BatchGenerator(cache)
        prompts = [[5 + i, *range(10, 40)] for i in (1, 1, 2)]  # the second waits for the first
        handles = [generator.submit(prompt, 2) for prompt in prompts]
        generator.run()
        del handles
        stop()
        cache.sequence([7, 8])
    assert [lookup.n_tokens for lookup in heard] == [31, 31, 31]
    assert heard[0].block_hashes == heard[1].block_hashes != heard[2].block_hashes


def test_a_file_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"), record(EventLog(), tmp_path / "absent" / "x"):
        pass
    with pytest.raises(TypeError, match="callable"):
        EventLog().subscribe_lookups(5)  # type: ignore[arg-type]


def test_a_file_that_could_not_be_written_for_a_while_is_said_at_the_end(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="no limits of files")
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    events, rng = EventLog(), np.random.default_rng(1)

    def work() -> None:
        with record(events, tmp_path / "lookups.jsonl"):
            for limit in (most, 20_000, most):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
                for _ in range(100):
                    events.looked_up(Lookup((rng.bytes(600),), 16, 16))

    try:
        with pytest.raises(OSError, match="File too large"):
            work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
