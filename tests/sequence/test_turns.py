"""Several that generate with one sequence, and what is done to it in the middle of a stream."""

from __future__ import annotations

import threading

import pytest

from memory.kit import Make, words
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache.errors import ClosedError, NoKvCacheSlot, OvertakenError, UnsupportedOperation


def ends(ctx: LlamaContext) -> dict[int, float]:
    """Forbid what would end a text."""
    return {t: -1e6 for t in range(ctx.model.n_vocab) if ctx.native.is_eog(t)}


def hot(seed: int, ctx: LlamaContext) -> Sampler:
    """Return a sampler that never ends a text, and remembers what it chose."""
    return Sampler(temperature=1, top_k=20, repeat_penalty=1.2, seed=seed, logit_bias=ends(ctx))


@pytest.fixture
def ctx(make_context: Make) -> LlamaContext:
    return make_context("llama", n_ctx=256, n_seq_max=2)


@pytest.mark.hazard("N100")
def test_only_the_newest_generation_continues(ctx: LlamaContext) -> None:
    sequence = LlamaSequence(ctx, words(1, 9))
    older = sequence.generate(20, hot(1, ctx))
    newer = sequence.stream(20, hot(2, ctx))
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
        ctx.model.token_to_piece(int(t)) for t in sequence.tokens[11:]
    ).decode("utf-8", "replace")


@pytest.mark.hazard("N100")
def test_threads_share_one_generation(ctx: LlamaContext) -> None:
    sequence = LlamaSequence(ctx, words(1, 9))
    tokens = sequence.generate(60, hot(1, ctx))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(tokens)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(sequence.tokens[9:].tolist())
    assert len(found) == 60


def test_requests_and_generations_of_one_sequence(ctx: LlamaContext) -> None:
    sequence = LlamaSequence(ctx, words(1, 9))
    one, other = BatchGenerator(ctx), BatchGenerator(ctx)
    stream = sequence.stream(40, hot(1, ctx))
    next(stream)
    first = one.submit(sequence, 30, hot(2, ctx))
    beside = one.submit(words(2, 9), 30, hot(3, ctx))
    one.step()
    one.step()
    with pytest.raises(OvertakenError):
        next(stream)
    second = other.submit(sequence, 5, hot(4, ctx))
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
def test_closing_in_the_middle_of_a_stream(what: str, ctx: LlamaContext) -> None:
    sequence = LlamaSequence(ctx, words(1, 9))
    stream, tokens = sequence.stream(50, hot(1, ctx)), LlamaSequence(ctx, [5]).generate(3)
    next(stream)
    n = len(sequence)
    (sequence if what == "sequence" else ctx).close()
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
        assert not ctx.sequences() or len(ctx.sequences()) == 1


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
