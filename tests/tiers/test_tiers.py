"""Tiers of a prefix cache: what one context evaluated, another one takes from a store."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest

from memory.kit import Case, Fresh, Make, apart, words
from pykvcache import PrefixCache
from pykvcache.errors import ClosedError, StoreError
from pykvcache.prefix import core
from pykvcache.prefix.stores import FolderStore, MemoryStore
from pykvcache.prefix.tier_link import TierLink
from pykvcache.prefix.tiers.tier import EvaluationTime
from stores.servers import freeze, redis_server
from tiers.kit import SERVED, SIZE, WAIT, evaluate, total, write
from tiers.slow import SlowStore


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_another_context_begins_where_the_first_one_stopped(
    case: Case, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    prompt = words(1, 45)
    with (
        PrefixCache(
            make_context(case.name, **case.options),
            block_size=SIZE,
            tier_seconds=20,
            tiers=[tmp_path],
        ) as cache,
        cache.sequence(prompt) as sequence,
    ):
        sequence.evaluate()
        chat = [*prompt, *sequence.generate(7), *words(2, 9)]
    ctx = make_context(case.name, **case.options)
    cache = PrefixCache(ctx, block_size=SIZE, **WAIT, tiers=[tmp_path])
    for again, most in ((prompt, 1), (chat, 11), (prompt[:20] + words(3, 9), 29)):
        if ctx.native.has_rest and again is prompt:
            most = 5  # from the checkpoint after the last full block
        before = ctx.tokens_evaluated
        with cache.sequence(again) as sequence:
            report = sequence.reuse
            assert total(report) == len(again)
            assert report.evaluated <= most
            assert apart(sequence.logits(), fresh_logits(case.name, again)) < case.tolerance
        assert ctx.tokens_evaluated - before == report.evaluated
    assert cache.stats().disk > 40
    cache.close()


def test_the_nearest_tier_is_asked_first_and_gets_what_another_has(make_context: Make) -> None:
    near, far = MemoryStore(), MemoryStore()
    prompt = words(1, 40)
    write(make_context("llama"), far, prompt)
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[near, far]) as cache:
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.remote == 39
        assert cache.flush(30)
        assert [tier.read for tier in cache.stats().tiers] == [0, 5]
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[near]) as cache:
        assert cache.sequence(prompt).reuse.remote == 39


@pytest.mark.parametrize("swa_full", [True, False], ids=["full", "window"])
def test_after_a_restart_another_long_question_reuses_the_document(
    swa_full: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    """Prompts never parted before the first question, which is longer than the windows' slack."""
    document, store = words(1, 200), MemoryStore()
    options = Case("gemma3", swa_full=swa_full).options
    for question, n_new in ((words(2, 40), 240), (words(3, 20), 20)):
        prompt, ctx = [*document, *question], make_context("gemma3", **options)
        with (
            PrefixCache(ctx, block_size=SIZE, tiers=[store], **WAIT) as cache,
            cache.sequence(prompt) as sequence,
        ):
            assert sequence.reuse.evaluated == n_new
            assert apart(sequence.logits(), fresh_logits("gemma3", prompt)) < 1e-2


@pytest.mark.parametrize("name", ["gemma3", "mamba", "jamba"])
def test_windows_and_states_count_in_how_long_loading_takes(
    name: str, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba has nothing else: each load was thought to take no longer than an empty request."""
    prompt, store, thought = words(1, 61), MemoryStore(), list[int]()
    write(make_context(name), store, prompt)
    with PrefixCache(make_context(name), block_size=SIZE, tiers=[store], **WAIT) as cache:
        tier = cache._core.link.tiers[0]

        def estimate(n_bytes: int) -> float:
            thought.append(n_bytes)
            return 0.0

        monkeypatch.setattr(tier.speed, "seconds", estimate)
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.evaluated <= SIZE
        assert 0.8 < thought[0] / tier.read_bytes < 1.4


def test_a_clear_forgets_what_waits(make_context: Make) -> None:
    store = MemoryStore()
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        with cache._core.link.writers[0]._changed:
            with cache.sequence(words(1, 40)) as sequence:
                sequence.evaluate()
            cache.clear()
        cache.flush(30)
        assert not list(store.entries())


def test_all_caches_share_the_time_to_write_at_exit(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def close(link: TierLink, seconds: float) -> None:
        assert all(cache._core.is_closed for cache in caches), "all are queued before any waits"
        given.append(seconds)
        time.sleep(0.1)

    caches = [PrefixCache(make_context("llama"), tiers=[MemoryStore()]) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(TierLink, "close", close)
        own = {cache._core.context: weakref.ref(cache._core) for cache in caches}
        patched.setattr(core, "_cores", own)  # those of other tests stay open
        patched.setattr(core, "_writers", set())
        core._write_all()
    first, second = given
    assert 0 <= second <= first - 0.1
    for cache in caches:
        cache._core.link.close(10)


def test_arguments_are_checked(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    with pytest.raises(TypeError, match="tiers must be a list"):
        PrefixCache(ctx, tiers=str(tmp_path))
    with pytest.raises(StoreError):
        PrefixCache(ctx, tiers=["nothing://of/the/kind"])
    with pytest.raises(StoreError, match="16 bytes"):
        PrefixCache(ctx, tiers=[tmp_path], secret=b"short")
    with pytest.raises(ValueError, match="queue_bytes"):
        PrefixCache(ctx, tiers=[tmp_path], queue_bytes=-1)
    store = FolderStore(tmp_path)
    cache = PrefixCache(ctx, tiers=[store])
    cache.close()
    with pytest.raises(ClosedError):
        cache.flush()
    assert store.put([(bytes(32), b"x")]) == 1, "a store that was given is not closed"


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
def test_what_somebody_removed_is_written_again_at_once(name: str, make_context: Make) -> None:
    """A store that is cleared while a cache runs: its blocks were known for another minute."""
    store, prompt = MemoryStore(), words(1, 61)
    with PrefixCache(
        make_context(name), block_size=SIZE, **WAIT, ram_bytes=0, tiers=[store]
    ) as cache:
        for _ in range(2):
            with cache.sequence(prompt) as sequence:
                sequence.logits()
                assert sequence.reuse.evaluated == 61
            assert cache.flush(60)
            with cache.sequence(prompt) as sequence:
                assert sequence.reuse.evaluated <= SIZE
                sequence.logits()
            assert cache.flush(60)
            assert store.trim(0)


def test_the_first_request_waits_for_its_tiers_although_evaluation_was_not_timed(
    make_context: Make,
) -> None:
    prompt, store = words(1, 45), MemoryStore()
    write(make_context("llama"), store, prompt)
    for _ in range(50):  # a busy machine may take longer than the wait
        slow = SlowStore(store, latency=0.003)
        with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow]) as cache:
            sequence = cache.sequence(prompt)
            sequence.evaluate()
            found = sequence.reuse.remote
        if found:
            break
    assert found == len(prompt) - 1


def test_short_prompts_are_not_expected_to_take_the_time_per_token_of_long_ones() -> None:
    one = EvaluationTime(1e-6)
    assert one.seconds(0, 1000) == pytest.approx(1e-3)
    for _ in range(9):
        one.note(0, 4000, 4.0)
        one.note(0, 1000, 0.5)
    assert one.seconds(0, 1000) == pytest.approx(0.5)
    assert one.seconds(0, 4000) == pytest.approx(4.0)
    assert one.seconds(3900, 4000) == pytest.approx(0.1)
    assert one.seconds(0, 10) == pytest.approx(0.005)


@pytest.mark.hazard("N79")
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_server_that_freezes_is_a_miss_and_soon_left_alone(
    make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    prompt = words(1, 45)
    with redis_server(tmp_path) as server:
        ctx = make_context("llama")
        cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=0, tiers=[server.url])
        evaluate(cache, prompt)
        freeze(server.process)
        try:
            for i in range(4):
                with cache.sequence(prompt if i % 2 else words(i, 45)) as sequence:
                    wanted = sequence.tokens
                    assert apart(sequence.logits(), fresh_logits("llama", wanted)) < 1e-3
                    assert sequence.reuse.remote == 0
            assert cache.flush(30)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        stats = cache.stats().tiers[0]
        assert stats.timed_out + stats.skipped > 0
        cache.close()


def test_caches_that_nobody_closes_leave_no_thread(make_context: Make) -> None:
    def threads() -> int:
        return sum(one.name.startswith("pykvcache-write") for one in threading.enumerate())

    before = threads()
    for i in range(3):
        store = MemoryStore()
        cache = PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store], **WAIT)
        with cache.sequence(words(i, 40)) as sequence:
            sequence.evaluate()
        del cache, sequence
    gc.collect()
    until = time.monotonic() + 20
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() <= before
