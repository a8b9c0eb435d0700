"""What is yielded is in the tokens, whatever ends a generation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from memory.kit import Make, words
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence, Sampler
from pykvcache.errors import (
    ClosedError,
    InvalidBatch,
    NoKvCacheSlot,
    OvertakenError,
    PositionError,
    UnsupportedOperation,
)

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


# Several that generate with one sequence, and edits in the middle of a stream --------------------


def hot(seed: int, ctx: LlamaContext) -> Sampler:
    """Return a sampler that never ends a text, and remembers what it chose."""
    ends = {t: -1e6 for t in range(ctx.model.n_vocab) if ctx.native.is_eog(t)}
    return Sampler(temperature=1, top_k=20, repeat_penalty=1.2, seed=seed, logit_bias=ends)


@pytest.fixture
def small(make_context: Make) -> LlamaContext:
    return make_context("llama", n_ctx=256, n_seq_max=2)


@pytest.mark.hazard("N100")
def test_only_the_newest_generation_continues(small: LlamaContext) -> None:
    sequence = LlamaSequence(small, words(1, 9))
    older = sequence.generate(20, hot(1, small))
    newer = sequence.stream(20, hot(2, small))
    made = [next(older), next(older)]  # what has only been made has not begun
    text = [next(newer)]
    for _ in range(2):
        with pytest.raises(OvertakenError, match="another generation"):
            next(older)
    assert older.finish_reason is None
    before = len(sequence)
    text += newer
    assert newer.finish_reason == "length"
    assert len(sequence) == 9 + 2 + 20
    assert before < len(sequence)
    assert sequence.tokens[9:11].tolist() == made
    assert "".join(text) == b"".join(
        small.model.token_to_piece(int(t)) for t in sequence.tokens[11:]
    ).decode("utf-8", "replace")


@pytest.mark.hazard("N100")
def test_threads_share_one_generation(small: LlamaContext) -> None:
    sequence = LlamaSequence(small, words(1, 9))
    tokens = sequence.generate(60, hot(1, small))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(tokens)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(sequence.tokens[9:].tolist())
    assert len(found) == 60


def test_requests_and_generations_of_one_sequence(small: LlamaContext) -> None:
    sequence = LlamaSequence(small, words(1, 9))
    one, other = BatchGenerator(small), BatchGenerator(small)
    stream = sequence.stream(40, hot(1, small))
    next(stream)
    first = one.submit(sequence, 30, hot(2, small))
    beside = one.submit(words(2, 9), 30, hot(3, small))
    one.step()
    one.step()
    with pytest.raises(OvertakenError):
        next(stream)
    second = other.submit(sequence, 5, hot(4, small))
    other.run()
    assert second.finish_reason == "length"
    one.run()
    assert first.finish_reason == "error"
    assert isinstance(first.error, OvertakenError)
    with pytest.raises(OvertakenError):
        first.wait()
    assert beside.finish_reason == "length"
    n = len(first.tokens) + len(second.tokens)
    assert sequence.tokens[-n:].tolist() == [*first.tokens, *second.tokens]


@pytest.mark.parametrize("what", ["sequence", "context"])
def test_closing_in_the_middle_of_a_stream(what: str, small: LlamaContext) -> None:
    sequence = LlamaSequence(small, words(1, 9))
    stream, tokens = sequence.stream(50, hot(1, small)), LlamaSequence(small, [5]).generate(3)
    next(stream)
    n = len(sequence)
    (sequence if what == "sequence" else small).close()
    for _ in range(2):
        with pytest.raises(ClosedError):
            next(stream)
    assert len(sequence) == n
    assert stream.finish_reason is None
    if what == "context":
        with pytest.raises(ClosedError):
            next(tokens)
    else:
        assert len(list(tokens)) <= 3
        assert not small.sequences() or len(small.sequences()) == 1


def test_a_shift_that_cannot_help_drops_no_tokens(make_context: Make) -> None:
    """Ids that are used by hand are not freed by dropping tokens of a sequence."""
    ctx = make_context("llama", n_seq_max=1)
    ctx.decode(words(2, 5), seq_id=0)
    sequence = LlamaSequence(ctx, words(1, 40))
    tokens = sequence.generate(9, on_full="shift")
    with pytest.raises(NoKvCacheSlot, match="no sequence id is free"):
        next(tokens)
    assert sequence.tokens.tolist() == words(1, 40)
    ctx.clear_kv_cache_seq(0)
    assert len(list(tokens)) <= 9


def test_models_without_a_vocabulary(make_context: Make) -> None:
    """Tokens can be generated; what needs their text is refused by the call, and others go on."""
    ctx = make_context("llama_none")
    sequence = LlamaSequence(ctx, [5, 6])
    assert len(list(sequence.generate(6, stop=[1]))) >= 1
    n = len(sequence)
    generator = BatchGenerator(ctx)
    handle = generator.submit([5, 6], 4)
    for call in (
        lambda: sequence.stream(5),
        lambda: sequence.generate(5, stop="x"),
        lambda: generator.submit([5], 4, stop=[1, "x"]),
    ):
        with pytest.raises(UnsupportedOperation, match="no vocabulary"):
            call()
    generator.run()
    assert handle.finish_reason == "length"
    assert len(sequence) == n
    assert "LlamaSequence" in sequence._repr_html_(), "without its text"
