"""The prefix cache: where chats go on, what is pinned, what is said of it, and its arguments."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart, words
from prefix.accounts import check_accounts, told
from pykvcache import PrefixCache
from pykvcache.errors import ClosedError, UnsupportedOperation
from pykvcache.prefix.events import AllBlocksCleared, BlockStored, CacheEvent
from pykvcache.prefix.memory import CacheMemory

SIZE = 8


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_a_chat_goes_on_wherever_an_answer_ends(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    """At the end of a block, too: no tail comes after it."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    with PrefixCache(ctx, block_size=SIZE, keep_logits=True) as cache:
        for n in (1, 4, 5, 6, 9):
            chat = words(n, 2 * SIZE + 3)
            with cache.sequence(chat) as sequence:
                for token in words(50 + n, n):  # one by one, as answers come
                    sequence.logits()
                    sequence.append([token])
                    chat.append(token)
                sequence.evaluate()
            chat += words(90 + n, 3)
            with cache.sequence(chat) as sequence:
                assert sequence.reuse.evaluated == 3, (n, sequence.reuse)
                assert apart(sequence.logits(), fresh_logits(case.name, chat)) < case.tolerance


def test_reuse_report_gives_the_reason(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=3)
    cache = PrefixCache(ctx, block_size=SIZE)
    tokens = words(1, 30)
    first = cache.sequence(tokens)
    assert first.reuse.first_difference is None
    assert "no cached prompt" in first.reuse.reason
    first.evaluate()
    for _ in range(2):
        other = cache.sequence([*tokens[:13], 60, *tokens[14:]])
        assert other.reuse.first_difference == 13
        assert "token 13" in other.reuse.reason
        longer = cache.sequence([*tokens, 60])
        assert longer.reuse.first_difference is None
        assert longer.reuse.reason == "the rest is new"
        again = cache.sequence(tokens)
        assert again.reuse.first_difference is None
        assert again.reuse.reason == "the whole prompt was cached"
        first.close()
        del other, longer, again


def test_events_name_each_block_with_its_tokens_and_parent(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=30 * SIZE * cell)
    heard, waiting = list[CacheEvent](), list[CacheEvent]()
    stop = cache.events.subscribe(heard.append)
    cache.events.subscribe(lambda event: 1 / 0)  # an error of the subscriber alone
    parents: dict[bytes, bytes | None] = {}
    for i in range(8):
        with cache.sequence(words(i % 3, 30) + words(i, 20)) as sequence:
            sequence.evaluate()
        waiting += cache.events
    assert waiting == heard
    for event in heard:
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            parents |= dict(pairwise([*event.block_hashes[::-1], event.parent_block_hash]))
    there = told(heard)
    assert len(there) == cache.stats().ram_blocks < cache.stats().stored
    assert {parents[name] for name in there} <= there | {None}
    stop()
    cache.clear()
    assert isinstance(list(cache.events)[-1], AllBlocksCleared)
    assert not isinstance(heard[-1], AllBlocksCleared)


def test_one_cache_per_context(make_context: Make, tmp_path: Path) -> None:
    ctx = make_context("llama")
    cache = PrefixCache(ctx)
    with pytest.raises(ValueError, match="already"):
        PrefixCache(ctx, tiers=[tmp_path / "tier"])
    assert not (tmp_path / "tier").exists()
    sequence = cache.sequence(words(1, 20))
    cache.close()
    cache.close()
    assert sequence.logits().shape
    sequence.save(tmp_path / "one.kv")
    with type(sequence).load(ctx, tmp_path / "one.kv") as again:
        assert again.tokens.tolist() == sequence.tokens.tolist()
    sequence.close()
    with pytest.raises(ClosedError):
        cache.sequence([5])
    PrefixCache(ctx).close()
    for wrong in ({"block_size": 0}, {"ram_bytes": -1}, {"policy": "best"}):
        with pytest.raises(ValueError, match=r"block_size|ram_bytes|policy"):
            PrefixCache(ctx, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        PrefixCache(ctx, namespace=5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOperation):
        PrefixCache(make_context("t5"))


def test_a_pin_protects_exactly_the_cached_prefix(make_context: Make) -> None:
    cache, prompt = PrefixCache(make_context("llama"), block_size=SIZE), words(1, 20)
    with cache.sequence(prompt) as sequence:
        sequence.evaluate()
    pins = [cache.pin(prompt[:n] + more) for n in (5, 8, 12, 20) for more in ([], [63])]
    assert [pin.n_tokens for pin in pins] == [5, 5, 8, 8, 12, 12, 20, 20]


def fail(*_: Any) -> Any:
    raise UnsupportedOperation("test", "it cannot be read")


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_unreadable_cells_are_not_stored(
    case: Case, make_context: Make, fresh_logits: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PrefixCache(make_context(case.name, **case.options), block_size=8) as cache:
        known, text = words(1, 40), [*words(1, 30), *words(2, 20)]
        cache.sequence(known).evaluate()
        with monkeypatch.context() as patch:
            patch.setattr(CacheMemory, "read", fail)
            with cache.sequence(text) as sequence:
                sequence.evaluate()
        check_accounts(cache)
        for prompt in (text, known):
            with cache.sequence([*prompt, 7]) as sequence:
                expected = fresh_logits(case.name, [*prompt, 7])
                assert apart(sequence.logits(), expected) < case.tolerance


OPTIONS: tuple[dict[str, Any], ...] = (
    {"n_ctx": 256, "n_seq_max": 1},
    {"n_ctx": 1024, "n_seq_max": 4},
    {"n_ctx": 1024, "n_seq_max": 2, "kv_unified": False},
    {"n_ctx": 512, "n_seq_max": 2, "swa_full": False},
    {"n_ctx": 1024, "n_seq_max": 4, "kv_unified": False, "swa_full": False},
)


@pytest.mark.parametrize("writer", range(len(OPTIONS)))
@pytest.mark.parametrize("name", ["gemma3", "jamba"])
def test_contexts_share_a_folder(
    name: str, writer: int, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    """Every one reads all that another one wrote: where a prompt went on, and after it."""
    text, both = words(1, 90), {"block_size": SIZE, "tiers": [tmp_path], "tier_seconds": 20}
    with PrefixCache(make_context(name, **OPTIONS[writer]), **both) as cache:
        with cache.sequence(text) as sequence:
            sequence.logits()
            answer = list(sequence.generate(3))
        assert cache.flush(30)
    for at, options in enumerate(OPTIONS):
        with PrefixCache(make_context(name, **options), **both) as cache:
            prompt = [*text, *answer[:2], *words(at, 4)]
            with cache.sequence(prompt) as sequence:
                assert sequence.reuse.evaluated == 4
                assert apart(sequence.logits(), fresh_logits(name, prompt)) < 1e-2
