"""Tiers of a prefix cache: what one context evaluated, another one takes from a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Case, Fresh, Make, apart, words
from pykvcache import PrefixCache
from pykvcache.errors import ClosedError, StoreError
from pykvcache.prefix.block_hash import window_key
from pykvcache.prefix.report import ReuseReport
from pykvcache.prefix.stores import FolderStore, MemoryStore
from pykvcache.prefix.tier_link import TierLink
from pykvcache.prefix.tiers.cost_model import EvaluationTime
from tiers.slow import SlowStore

SERVED = tuple(case for case in CASES if case.has_states and case.name != "t5")
SIZE = 8
#: Tiny models evaluate faster than any store answers.
WAIT: dict[str, Any] = {"tier_seconds": 20}


def total(report: ReuseReport) -> int:
    return report.live + report.ram + report.disk + report.remote + report.evaluated


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


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_without_memory_everything_goes_through_the_tier(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    """Random prompts that share beginnings; no block stays in memory."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    cache = PrefixCache(ctx, block_size=SIZE, **WAIT, ram_bytes=0, tiers=[MemoryStore()])
    rng = np.random.default_rng(5)
    known: list[list[int]] = []
    for step in range(12):
        begin = known[int(rng.integers(len(known)))] if known and rng.random() < 0.8 else []
        prompt = begin[: int(rng.integers(len(begin) + 1))]
        prompt = (prompt + words(step, int(rng.integers(1, 25))))[:90]
        with cache.sequence(prompt) as sequence:
            report = sequence.reuse
            assert total(report) == len(prompt)
            assert apart(sequence.logits(), fresh_logits(case.name, prompt)) < case.tolerance
        assert cache.flush(30)
        known.append(prompt)
    stats = cache.stats()
    assert stats.ram_bytes == stats.ram == 0
    assert stats.remote > stats.evaluated / 4
    cache.close()


def test_the_nearest_tier_is_asked_first_and_gets_what_another_has(make_context: Make) -> None:
    near, far = MemoryStore(), MemoryStore()
    prompt = words(1, 40)
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[far]) as cache:
        cache.sequence(prompt).evaluate()
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[near, far]) as cache:
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.remote == 39
        assert cache.flush(30)
        assert [tier.read for tier in cache.stats().tiers] == [0, 5]
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[near]) as cache:
        assert cache.sequence(prompt).reuse.remote == 39


def test_windows_that_several_nodes_hold_are_not_loaded_again(
    make_context: Make, fresh_logits: Fresh
) -> None:
    """The window of a long prompt begins in nodes where shorter ones parted from it."""
    store, prompt = MemoryStore(), words(1, 60)
    with PrefixCache(make_context("gemma3"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        for n in (24, 32, 40):
            with cache.sequence(prompt[:n] + words(n, 3)) as sequence:
                sequence.evaluate()
        assert cache.flush(30)
        tokens = np.asarray(prompt, np.int32).tobytes()
        assert len(cache._core.blocks.tree.match(tokens).windows()) > 1
        with (
            PrefixCache(make_context("gemma3"), block_size=SIZE, tiers=[store]) as other,
            other.sequence(prompt) as sequence,
        ):
            sequence.evaluate()
        names = cache._core.link._named(tokens, "").names
        assert store.discard([window_key(name) for name in names[:5]]) > 0
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.evaluated == 1
            assert apart(sequence.logits(), fresh_logits("gemma3", prompt)) < 1e-2
        # Two blocks of each part, and the end.
        assert cache.stats().tiers[0].read == 5


@pytest.mark.parametrize("swa_full", [True, False], ids=["full", "window"])
def test_after_a_restart_another_long_question_reuses_the_document(
    swa_full: bool, make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts never parted before the first question, which is longer than the windows' slack."""
    document, written = words(1, 200), list[int]()
    options = Case("gemma3", swa_full=swa_full).options
    for more in (False, True):
        store = MemoryStore()
        with monkeypatch.context() as patch:
            if not more:
                patch.setattr(TierLink, "_n_more", lambda link, report: 0)
            ctx = make_context("gemma3", **options)
            with PrefixCache(ctx, block_size=SIZE, tiers=[store], **WAIT) as cache:
                with cache.sequence([*document, *words(2, 40)]) as sequence:
                    sequence.evaluate()
                assert cache.flush(30)
                written.append(cache.stats().tiers[0].written_bytes)
        prompt = [*document, *words(3, 20)]
        ctx = make_context("gemma3", **options)
        with (
            PrefixCache(ctx, block_size=SIZE, tiers=[store], **WAIT) as cache,
            cache.sequence(prompt) as sequence,
        ):
            assert sequence.reuse.evaluated == (20 if more else 220)
            assert apart(sequence.logits(), fresh_logits("gemma3", prompt)) < 1e-2
    assert written[1] <= 1.25 * written[0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba", "lfm2_swa"])
def test_windows_and_states_count_in_how_long_loading_takes(
    name: str, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba has nothing else: each load was thought to take no longer than an empty request."""
    prompt, store, thought = words(1, 61), MemoryStore(), list[int]()
    with PrefixCache(make_context(name), block_size=SIZE, tiers=[store]) as cache:
        cache.sequence(prompt).evaluate()
    with PrefixCache(make_context(name), block_size=SIZE, tiers=[store], **WAIT) as cache:
        tier = cache._core.link.tiers.tiers[0]

        def estimate(n_bytes: int) -> float:
            thought.append(n_bytes)
            return 0.0

        monkeypatch.setattr(tier.speed, "seconds", estimate)
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.evaluated <= SIZE
        assert 0.8 < thought[0] / tier.read_bytes < 1.4


def test_a_full_queue_drops_the_ends_of_chains(make_context: Make) -> None:
    store, ctx = MemoryStore(), make_context("llama")
    block = ctx.native.block_bytes() * SIZE
    cache = PrefixCache(ctx, block_size=SIZE, **WAIT, tiers=[store], queue_bytes=3 * block)
    writer = cache._core.link.tiers.writers[0]
    with writer._changed:  # nothing is written here
        cache.sequence(words(1, 80)).close()
        with cache.sequence(words(1, 80)) as sequence:
            sequence.evaluate()
        assert writer.n_items == 3
        assert writer.dropped == 7
    cache.close()
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        assert cache.sequence(words(1, 80)).reuse.remote == 24


def test_namespaces_secrets_and_models_share_nothing(make_context: Make) -> None:
    pytest.importorskip("cryptography")
    store, prompt = MemoryStore(), words(1, 40)
    secret = b"0123456789abcdef"

    def reuse(model: str = "llama", namespace: str = "", **options: object) -> int:
        with (
            PrefixCache(
                make_context(model),
                block_size=SIZE,
                tier_seconds=20,
                tiers=[store],
                namespace=namespace,
                **options,
            ) as cache,
            cache.sequence(prompt) as sequence,
        ):
            sequence.evaluate()
            return sequence.reuse.remote

    ways: list[dict[str, object]] = [
        {},
        {"namespace": "a"},
        {"secret": secret},
        {"secret": secret[::-1]},
        {"model": "gemma3"},
    ]
    assert [reuse(**way) for way in ways] == [0] * 5  # type: ignore[arg-type]
    assert [reuse(**way) for way in ways[:4]] == [39] * 4  # type: ignore[arg-type]


def test_a_clear_forgets_what_waits(make_context: Make) -> None:
    store = MemoryStore()
    with PrefixCache(make_context("llama"), block_size=SIZE, **WAIT, tiers=[store]) as cache:
        with cache._core.link.tiers.writers[0]._changed:
            with cache.sequence(words(1, 40)) as sequence:
                sequence.evaluate()
            cache.clear()
        cache.flush(30)
        assert not list(store.entries())


def test_arguments_are_checked(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    with pytest.raises(TypeError, match="tiers is a list"):
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
    with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[store]) as cache:
        cache.sequence(prompt).evaluate()
    found = 0
    for _ in range(5):  # a busy machine may take longer than the wait
        slow = SlowStore(store, latency=0.003)
        with PrefixCache(make_context("llama"), block_size=SIZE, tiers=[slow]) as cache:
            sequence = cache.sequence(prompt)
            sequence.evaluate()
            found = found or sequence.reuse.remote
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
