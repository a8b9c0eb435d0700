"""What is yielded is in the tokens, whatever ends a generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext, LlamaModel, LlamaSequence
from pykvcache.errors import InvalidBatch, NoKvCacheSlot, PositionError

PROMPT = "Once upon a time"


@pytest.fixture
def ctx(stories: LlamaModel) -> Iterator[LlamaContext]:
    with LlamaContext(stories, n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        yield ctx


def greedy(ctx: LlamaContext, prompt: str, n: int) -> list[int]:
    """Tokens as `LlamaContext.generate` makes them, by hand in sequence 0."""
    ctx.clear_kv_cache_seq(0)
    tokens = list(ctx.generate(prompt, n))
    ctx.clear_kv_cache_seq(0)
    return tokens


def test_no_token_is_lost_by_repeated_calls_break_or_exceptions(ctx: LlamaContext) -> None:
    wanted = greedy(ctx, PROMPT, 20)
    seq = LlamaSequence(ctx, PROMPT)
    n = len(seq)
    assert list(seq.generate(5)) == wanted[:5]
    for i, token in enumerate(seq.generate(100)):
        assert token == wanted[5 + i]
        assert seq.tokens[n:].tolist() == wanted[: 6 + i]
        if i == 4:
            break
    with contextlib.suppress(ZeroDivisionError):
        for _ in seq.generate(100):
            raise ZeroDivisionError
    assert seq.tokens[n:].tolist() == wanted[:11]
    assert list(seq.generate(9)) == wanted[11:20]


def test_a_full_cache_raises_stops_or_shifts(ctx: LlamaContext) -> None:
    seq = LlamaSequence(ctx, PROMPT)
    made: list[int] = []
    with pytest.raises(NoKvCacheSlot):
        made.extend(seq.generate(1000))
    assert seq.tokens.tolist()[-len(made) :] == made
    assert seq.n_evaluated == ctx.n_ctx
    assert len(seq) == ctx.n_ctx + 1  # the last one is pending
    stopping = seq.generate(1000, on_full="stop")
    assert list(stopping) == []
    assert stopping.finish_reason == "full"
    shifting = seq.generate(300, on_full="shift", n_keep=2)
    assert len(list(shifting)) == 300
    assert shifting.finish_reason == "length"
    assert len(seq) <= ctx.n_ctx + 1
    assert seq.tokens[:2].tolist() == ctx.model.tokenize(PROMPT)[:2].tolist()


def test_a_prompt_that_does_not_fit_changes_nothing(ctx: LlamaContext) -> None:
    other = LlamaSequence(ctx, PROMPT)
    other.evaluate()
    seq = LlamaSequence(ctx, np.full(ctx.n_ctx + 1, 5, np.int32))
    before = ctx.tokens_evaluated
    with pytest.raises(NoKvCacheSlot, match=r"257.*truncate.*discard.*on_full.*n_ctx"):
        seq.logits()
    assert list(seq.generate(5, on_full="stop")) == []
    assert ctx.tokens_evaluated == before
    assert len(seq) == ctx.n_ctx + 1
    assert other.seq_id is not None, "nobody left for what cannot fit anyway"


def test_on_full_shift_evaluates_again_if_the_memory_cannot_shift(make_context: Make) -> None:
    ctx = make_context("jamba", n_ctx=256, n_seq_max=1)
    seq = LlamaSequence(ctx, np.arange(5, 15, dtype=np.int32))
    gen = seq.generate(600, on_full="shift")
    assert len(list(gen)) == 600 or gen.finish_reason == "stop"
    assert len(seq) <= 257


def test_arguments_are_checked_by_the_call(ctx: LlamaContext) -> None:
    seq = LlamaSequence(ctx, PROMPT)
    tokens = seq.tokens
    for call in (
        lambda: seq.generate(-1),
        lambda: seq.generate(5, stop=""),
        lambda: seq.generate(5, stop=[99999]),
        lambda: seq.generate(5, on_full="explode"),  # type: ignore[arg-type]
        lambda: seq.generate(5, n_keep=-1),
        lambda: seq.stream(2**40),
    ):
        with pytest.raises(ValueError, match=r"max_tokens|stop|on_full|n_keep"):
            call()
    for mistyped in (
        lambda: seq.generate(1.5),  # type: ignore[arg-type]
        lambda: seq.generate(5, "greedy"),  # type: ignore[arg-type]
        lambda: seq.generate(5, stop=2.5),  # type: ignore[arg-type]
        lambda: seq.append(3.5),  # type: ignore[arg-type]
        lambda: seq.append([1.5]),  # type: ignore[list-item]
        lambda: seq.truncate("3"),  # type: ignore[arg-type]
        lambda: LlamaSequence("ctx"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            mistyped()
    for outside in (
        lambda: seq.truncate(6),
        lambda: seq.truncate(-1),
        lambda: seq.fork(6),
        lambda: seq.discard(3, 2),
        lambda: seq.discard(0, 6),
        lambda: seq.discard(-1, 2),
        lambda: seq.truncate(2**80),
    ):
        with pytest.raises((PositionError, ValueError)):
            outside()
    with pytest.raises(InvalidBatch, match="-1"):
        seq.append([5, -1])
    with pytest.raises(ValueError, match="no tokens"):
        LlamaSequence(ctx).logits()
    assert seq.tokens.tolist() == tokens.tolist()
