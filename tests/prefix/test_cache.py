"""The prefix cache: what is evaluated, what comes out, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memory.kit import SERVED, Case, Fresh, Make, apart
from pykvcache import LlamaSequence, PrefixCache
from pykvcache.errors import ClosedError, UnsupportedOperation
from pykvcache.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored
from pykvcache.prefix.report import ReuseReport

ATTENTION = tuple(case for case in SERVED if not case.info.has_rest)
SIZE = 8


def words(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 56, n).tolist()


def total(report: ReuseReport) -> int:
    return report.live + report.ram + report.disk + report.remote + report.evaluated


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_evaluates_what_is_new_and_nothing_else(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    """The oracle: of each prompt all is evaluated that begins no prompt before, and 1 at least."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    cache = PrefixCache(ctx, block_size=SIZE)
    rng = np.random.default_rng(1)
    known: list[list[int]] = []
    alive: list[LlamaSequence] = []
    for step in range(60):
        begin = known[int(rng.integers(len(known)))] if known and rng.random() < 0.8 else []
        prompt = begin[: int(rng.integers(len(begin) + 1))]
        prompt = (prompt + words(step, int(rng.integers(1, 25))))[:100]
        expected = max((common(prompt, other) for other in known), default=0)
        before = ctx.tokens_evaluated
        sequence = cache.sequence(prompt)
        report = sequence.reuse
        assert total(report) == report.n_tokens == len(prompt)
        assert ctx.tokens_evaluated == before, "making a sequence evaluates nothing"
        logits = sequence.logits()
        assert ctx.tokens_evaluated - before == report.evaluated
        assert report.evaluated == max(1, len(prompt) - expected), step
        assert apart(logits, fresh_logits(case.name, prompt)) < case.tolerance
        known.append(prompt)
        if rng.random() < 0.5:
            sequence.close()
        else:
            alive.append(sequence)
        if len(alive) > 4:
            del alive[int(rng.integers(5))], sequence
    stats = cache.stats()
    assert stats.evaluated == ctx.tokens_evaluated
    assert stats.requests == 60
    assert stats.n_tokens == stats.live + stats.ram + stats.evaluated


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_turns_of_a_chat_are_evaluated_once(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    """On every memory: each turn goes on where the last one ended, open or closed."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    cache = PrefixCache(ctx, block_size=SIZE)
    chats: list[list[int]] = [words(i, 21) for i in range(3)]
    for turn in range(3):
        for i, chat in enumerate(chats):
            before = ctx.tokens_evaluated
            with cache.sequence(chat) as sequence:
                logits = sequence.logits()
                made = list(sequence.generate(5))
                sequence.evaluate()
            new = ctx.tokens_evaluated - before
            assert apart(logits, fresh_logits(case.name, chat)) < case.tolerance
            if turn:
                assert new == 7 + len(made), "the new words, and what was generated"
            chat += [*made, *words(10 * turn + i, 7)]


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_branches_begin_at_a_checkpoint(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    cache = PrefixCache(ctx, block_size=SIZE)
    trunk = words(1, 43)
    with cache.sequence(trunk) as sequence:
        sequence.evaluate()
    for i in range(4):
        prompt = trunk + words(50 + i, 10)
        with cache.sequence(prompt) as sequence:
            assert sequence.reuse.evaluated == 10
            assert apart(sequence.logits(), fresh_logits(case.name, prompt)) < case.tolerance
    # In the middle: token by token where cells can be cut, else from a checkpoint.
    prompt = trunk[:42] + words(99, 5)
    with cache.sequence(prompt) as sequence:
        report = sequence.reuse
        assert 5 <= report.evaluated <= 7
        assert apart(sequence.logits(), fresh_logits(case.name, prompt)) < case.tolerance
    assert report.first_difference == 42
    assert "token 42" in report.reason


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_a_chat_goes_on_wherever_an_answer_ends(
    case: Case, keep_logits: bool, make_context: Make, fresh_logits: Fresh
) -> None:
    """At the end of a block, too: no tail comes after it."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    with PrefixCache(ctx, block_size=SIZE, keep_logits=keep_logits) as cache:
        for n in range(1, SIZE + 2):
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


def test_what_was_shifted_is_given_to_nobody(make_context: Make, fresh_logits: Fresh) -> None:
    ctx = make_context("llama", n_seq_max=3)
    cache = PrefixCache(ctx, block_size=SIZE)
    tokens = words(1, 40)
    sequence = cache.sequence(tokens)
    sequence.evaluate()
    sequence.discard(10, 20)
    left = sequence.tokens.tolist()
    for _ in range(2):  # while it is open, and from what it left
        other = cache.sequence(left)
        assert apart(other.logits(), fresh_logits("llama", left)) < 1e-3
        other.close()
        cache.clear()
        if not sequence.is_closed:
            sequence.close()


@pytest.mark.hazard("N92")
def test_namespaces_share_nothing(make_context: Make) -> None:
    ctx = make_context("llama", n_seq_max=4)
    cache = PrefixCache(ctx, block_size=SIZE, namespace="a")
    tokens = words(1, 40)
    one = cache.sequence(tokens)
    one.evaluate()
    assert cache.sequence(tokens, namespace="b").reuse.evaluated == 40
    one.close()
    assert cache.sequence(tokens, namespace="b").reuse.evaluated == 40
    assert cache.sequence(tokens).reuse.evaluated == 1
    cache.clear("a")
    assert cache.sequence(tokens).reuse.evaluated == 40


@pytest.mark.hazard("N91")
def test_bytes_are_bounded_and_accounted(make_context: Make, fresh_logits: Fresh) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    for limit in (0, 3_000, 20 * SIZE * cell, 60 * SIZE * cell):
        cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=limit)
        for i in range(12):
            prompt = words(i % 7, 60) + words(100 + i, 20)
            with cache.sequence(prompt) as sequence:
                logits = sequence.logits()
            assert apart(logits, fresh_logits("llama", prompt)) < 1e-3
            assert cache.stats().ram_bytes <= limit
        stats = cache.stats()
        assert stats.stored - stats.removed == stats.ram_blocks
        assert (stats.removed > 0) == (0 < stats.stored > stats.ram_blocks)
        cache.close()


def test_pins_stay_until_they_are_released_or_expire(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=14 * SIZE * cell)
    kept = words(1, 40)
    cache.sequence([*kept, 7]).evaluate()
    pin = cache.pin(kept)
    assert pin.n_tokens == 40
    expired = cache.pin(words(2, 40), ttl=0)
    assert expired.n_tokens == 0

    def flood() -> None:
        for i in range(10):
            with cache.sequence(words(200 + i, 60)) as sequence:
                sequence.evaluate()

    flood()
    assert cache.sequence([*kept, 9]).reuse.ram >= 40
    pin.release()
    pin.release()
    flood()
    assert cache.sequence([*kept, 9]).reuse.ram < 40


def test_an_exact_repeat_needs_no_decode_with_kept_logits(
    make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context("llama", n_seq_max=2)
    cache = PrefixCache(ctx, block_size=SIZE, keep_logits=True)
    for n in (21, 24):  # with and without a rest after the last block
        tokens = words(n, n)
        with cache.sequence(tokens) as sequence:
            sequence.logits()
        before = ctx.tokens_evaluated
        with cache.sequence(tokens) as sequence:
            assert sequence.reuse.evaluated == 0
            assert sequence.reuse.first_difference is None
            assert apart(sequence.logits(), fresh_logits("llama", tokens)) < 1e-3
        assert ctx.tokens_evaluated == before


def test_it_says_why(make_context: Make) -> None:
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


def test_events_report_what_was_stored_and_dropped(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cell = ctx.native.block_bytes()
    cache = PrefixCache(ctx, block_size=SIZE, ram_bytes=50 * SIZE * cell)
    heard: list[object] = []
    stop = cache.events.subscribe(heard.append)
    cache.events.subscribe(lambda event: 1 / 0)  # an error of the subscriber alone
    there: set[bytes] = set()
    parents: dict[bytes, bytes | None] = {}
    events: list[object] = []
    for i in range(8):
        with cache.sequence(words(i % 3, 30) + words(i, 20)) as sequence:
            sequence.evaluate()
        waiting = [*cache.events]
        assert waiting, "what is taken out at once is not forgotten"
        events += waiting
    assert events == heard
    for event in events:
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            chain = [event.parent_block_hash, *event.block_hashes]
            parents.update(zip(chain[1:], chain[:-1], strict=True))  # type: ignore[arg-type]
            there |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert set(event.block_hashes) <= there
            there -= set(event.block_hashes)
    assert len(there) == cache.stats().ram_blocks
    for name in there:
        assert parents[name] is None or parents[name] in there
    stop()
    cache.clear()
    assert isinstance(list(cache.events)[-1], AllBlocksCleared)
    assert not isinstance(heard[-1], AllBlocksCleared)
    assert cache.stats().ram_blocks == 0


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


def test_without_a_shared_prefix_it_evaluates_everything_once(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=2)
    cache = PrefixCache(ctx, block_size=SIZE)
    for i in range(10):
        tokens = [5 + i, *words(i, 30)]
        with cache.sequence(tokens) as sequence:
            assert sequence.reuse.evaluated == 31
            sequence.logits()
    assert ctx.tokens_evaluated == 310


@pytest.mark.parametrize("n", [1, 9, 20, 31])
def test_a_prompt_that_blocks_contain_is_not_stored_again(n: int, make_context: Make) -> None:
    cache, prompt = PrefixCache(make_context("llama"), block_size=SIZE), words(1, 32)
    with cache.sequence(prompt) as sequence:
        sequence.evaluate()
    before = cache.stats()
    for _ in range(2):
        with cache.sequence(prompt[:n]) as sequence:
            sequence.logits()
    assert cache.stats().ram_blocks == before.ram_blocks


def test_no_tokens_are_no_prompt_to_pin_or_to_prefetch(make_context: Make) -> None:
    cache = PrefixCache(make_context("llama"), block_size=SIZE)
    for call in (cache.pin, cache.prefetch):
        with pytest.raises(TypeError, match="tokens must be text or token ids, not None"):
            call(None)  # type: ignore[arg-type]


def test_pins_are_of_blocks_the_last_perhaps_in_part(make_context: Make) -> None:
    cache, prompt = PrefixCache(make_context("llama"), block_size=SIZE), words(1, 20)
    with cache.sequence(prompt) as sequence:
        sequence.evaluate()
    pins = [cache.pin(prompt[:n] + more) for n in (5, 8, 12, 20) for more in ([], [63])]
    assert [pin.n_tokens for pin in pins] == [5, 5, 8, 8, 12, 12, 20, 20]
