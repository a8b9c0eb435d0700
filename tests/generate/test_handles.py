"""What a handle gives, how requests end, and who drives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    Sampler,
)
from pykvcache.errors import (
    ClosedError,
    DecodeAborted,
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    UnsupportedOperation,
)
from support.models import EXACT

PROMPTS = ["Once upon a time", "One day", "Tim", "The dog", "A girl", "Lily"]


@pytest.fixture
def ctx(stories: LlamaModel) -> Iterator[LlamaContext]:
    with LlamaContext(stories, n_ctx=512, n_seq_max=4, n_threads=1, **EXACT) as ctx:
        yield ctx


def alone(ctx: LlamaContext, prompt: str, n: int) -> list[int]:
    with LlamaSequence(ctx, prompt) as sequence:
        return list(sequence.generate(n))


def test_iterating_over_one_drives_them_all(ctx: LlamaContext) -> None:
    generator = BatchGenerator(ctx)
    handles = [generator.submit(prompt, 10) for prompt in PROMPTS]
    assert all(handle.finish_reason is None for handle in handles)
    found = list(handles[2])
    assert found == handles[2].tokens.tolist() == list(handles[2])
    assert len(handles[0].tokens) >= 9
    for handle in handles:
        handle.wait()
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert handle.tokens.tolist() == alone(ctx, prompt, 10)
        assert handle.text == ctx.model.detokenize(handle.tokens)
        assert handle.times.queued < handle.times.tokens[0] < (handle.times.finished or 0)
        assert len(handle.times.tokens) == 10


def test_async_for(ctx: LlamaContext) -> None:
    generator = BatchGenerator(ctx)

    async def read(prompt: str) -> list[int]:
        return [token async for token in generator.submit(prompt, 8)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(read, PROMPTS))

    for background in (False, True):
        if background:
            generator.start()
        found = asyncio.run(main())
        assert found == [alone(ctx, prompt, 8) for prompt in PROMPTS]
    generator.close()


def test_threads_submit_and_one_of_them_drives(ctx: LlamaContext) -> None:
    wanted = {prompt: alone(ctx, prompt, 12) for prompt in PROMPTS}
    for background in (False, True):
        generator = BatchGenerator(ctx)
        if background:
            generator.start()
            generator.start()
        wrong: list[object] = []

        def work(prompt: str, generator: BatchGenerator, wrong: list[object]) -> None:
            try:
                for _ in range(3):
                    if list(generator.submit(prompt, 12)) != wanted[prompt]:
                        wrong.append(prompt)
            except BaseException as error:
                wrong.append(error)

        threads = [
            threading.Thread(target=work, args=(prompt, generator, wrong)) for prompt in PROMPTS
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        generator.close()


def test_stops_end_text_before_them(ctx: LlamaContext) -> None:
    generator = BatchGenerator(ctx)
    whole = generator.submit(PROMPTS[0], 20).wait()
    stop = whole.text[7:12]
    handle = generator.submit(PROMPTS[0], 20, stop=["never", stop]).wait()
    assert handle.finish_reason == "stop"
    assert handle.text == whole.text[: whole.text.index(stop)]
    assert stop in ctx.model.detokenize(handle.tokens)
    token = int(whole.tokens[4])
    first = whole.tokens.tolist().index(token)
    handle = generator.submit(PROMPTS[0], 20, stop=token).wait()
    assert handle.tokens.tolist() == whole.tokens[: first + 1].tolist()
    assert handle.text == ctx.model.detokenize(whole.tokens[:first])


def test_log_probabilities_are_the_models(ctx: LlamaContext) -> None:
    handle = BatchGenerator(ctx).submit(PROMPTS[0], 5, Sampler(seed=4), logprobs=3).wait()
    sequence = LlamaSequence(ctx, PROMPTS[0])
    for token, found in zip(handle.tokens.tolist(), handle.logprobs, strict=True):
        row = sequence.logits().astype(np.float64)
        wanted = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert token in found
        assert list(found)[:3] == np.argsort(-wanted, kind="stable")[:3].tolist()
        for one, value in found.items():
            assert abs(value - wanted[one]) < 1e-3
        sequence.append([token])
    assert BatchGenerator(ctx).submit(PROMPTS[0], 2).wait().logprobs == []


def test_a_submitted_sequence_grows(ctx: LlamaContext) -> None:
    generator = BatchGenerator(ctx)
    sequence = LlamaSequence(ctx, PROMPTS[0])
    n = len(sequence)
    handle = generator.submit(sequence, 6)
    with pytest.raises(ValueError, match="already"):
        generator.submit(sequence, 6)
    handle.wait()
    assert sequence.tokens[n:].tolist() == handle.tokens.tolist()
    assert not sequence.is_closed
    more = generator.submit(sequence, 6).wait()
    assert [*handle.tokens, *more.tokens] == alone(ctx, PROMPTS[0], 12)


def test_abort_ends_one_and_keeps_its_tokens(ctx: LlamaContext) -> None:
    generator = BatchGenerator(ctx)
    first, second = generator.submit(PROMPTS[0], 50), generator.submit(PROMPTS[1], 12)
    for i, _ in enumerate(first):
        if i == 3:
            first.abort()
    assert first.finish_reason == "aborted"
    assert len(first.tokens) >= 4
    assert second.wait().tokens.tolist() == alone(ctx, PROMPTS[1], 12)


def test_an_error_of_one_request_leaves_the_others_alone(ctx: LlamaContext) -> None:
    generator = BatchGenerator(ctx)
    good = generator.submit(PROMPTS[0], 12)
    generator.step()
    with pytest.raises(InvalidBatch):
        generator.submit([5, 10**6], 5)
    with pytest.raises(NoKvCacheSlot):
        generator.submit(np.full(513, 5, np.int32), 5)
    with pytest.raises(ValueError, match="no tokens"):
        generator.submit([], 5)
    # After "a" nothing is allowed, not even the end.
    grammar = 'root ::= "a" "\\x00"'
    sampler = Sampler(temperature=0, grammar=grammar, model=ctx.model)
    bad = generator.submit(PROMPTS[0], 20, sampler)
    with pytest.raises(DecodeError, match="grammar"):
        list(bad)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, DecodeError)
    sequence = LlamaSequence(ctx, PROMPTS[1])
    closed = generator.submit(sequence, 10)
    sequence.close()
    with pytest.raises(ClosedError):
        list(closed)
    assert good.wait().tokens.tolist() == alone(ctx, PROMPTS[0], 12)


def test_what_fills_the_cache_alone_ends_full(stories: LlamaModel) -> None:
    with LlamaContext(stories, n_ctx=256, n_seq_max=2, n_threads=1, **EXACT) as ctx:
        generator = BatchGenerator(ctx)
        handle = generator.submit(PROMPTS[0], 1000)
        other = generator.submit(PROMPTS[1], 1000)
        generator.run()
        for one, prompt in ((handle, PROMPTS[0]), (other, PROMPTS[1])):
            assert one.finish_reason == "full"
            n = len(stories.tokenize(prompt))
            assert len(one.tokens) == 257 - n


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
def test_an_aborted_decode_loses_nothing(ctx: LlamaContext, make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=1024, n_seq_max=2)
    prompt = np.random.default_rng(1).integers(5, 56, 900, dtype=np.int32)
    with LlamaSequence(ctx, prompt) as sequence:
        wanted = list(sequence.generate(5))
    generator = BatchGenerator(ctx)
    handle = generator.submit(prompt, 5)
    stop = threading.Event()

    def nag() -> None:
        while not stop.is_set():
            ctx.abort()

    thread = threading.Thread(target=nag)
    thread.start()
    try:
        with pytest.raises(DecodeAborted):
            generator.run(progress=False)
    finally:
        stop.set()
        thread.join()
    assert handle.wait().tokens.tolist() == wanted


def test_closing_ends_what_is_left(ctx: LlamaContext) -> None:
    with BatchGenerator(ctx) as generator:
        handles = [generator.submit(prompt, 50) for prompt in PROMPTS]
        generator.step()
        generator.close()
        assert {handle.finish_reason for handle in handles} == {"aborted"}
        with pytest.raises(ClosedError):
            generator.submit("x", 1)
    assert not ctx.sequences()
    with pytest.raises(ClosedError):
        generator.step()


def test_arguments_are_checked(ctx: LlamaContext, make_context: Make) -> None:
    generator = BatchGenerator(ctx)
    for call in (
        lambda: generator.submit("x", -1),
        lambda: generator.submit("x", 1, n=0),
        lambda: generator.submit("x", 1, stop=""),
        lambda: generator.submit("x", 1, logprobs=-1),
        lambda: BatchGenerator(ctx, 5),
        lambda: BatchGenerator(ctx, 0),
        lambda: BatchGenerator(ctx, n_chunk=0),
        lambda: generator.submit(LlamaSequence(make_context("llama"), [5]), 1),
    ):
        with pytest.raises(ValueError, match=r"is|another"):
            call()
    for mistyped in (
        lambda: generator.submit("x", 1.5),  # type: ignore[call-overload]
        lambda: generator.submit("x", 1, "greedy"),  # type: ignore[call-overload]
        lambda: generator.submit(5, 1),  # type: ignore[call-overload]
        lambda: BatchGenerator("ctx"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            mistyped()
    with pytest.raises(UnsupportedOperation):
        BatchGenerator(make_context("bert"))
    assert generator.submit("x", 0).finish_reason == "length"
    assert not generator.n_waiting
    generator.run()
