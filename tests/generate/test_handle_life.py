"""Requests end when nobody waits for them any more, and text comes as it is certain."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
)
from pykvcache.generate import GenerationHandle

TEXT = "Once upon a time there was a little girl named"


@pytest.fixture
def ctx(stories: LlamaModel) -> Iterator[LlamaContext]:
    with LlamaContext(stories, n_ctx=1024, n_seq_max=4, n_threads=1) as ctx:
        yield ctx


@pytest.fixture(params=["alone", "cache", "thread"])
def generator(request: pytest.FixtureRequest, ctx: LlamaContext) -> Iterator[BatchGenerator]:
    cache = PrefixCache(ctx) if request.param == "cache" else None
    with BatchGenerator(ctx if cache is None else cache) as generator:
        if request.param == "thread":
            generator.start()
        yield generator


def is_empty(generator: BatchGenerator) -> bool:
    """Wait until no request is left, as a step under way may need."""
    for _ in range(500):
        if generator.n_running + generator.n_waiting == 0:
            return True
        time.sleep(0.01)
    return False


def test_a_stream_is_the_text_in_pieces(generator: BatchGenerator) -> None:
    right = generator.submit(TEXT, 24).wait().text
    pieces = list(generator.submit(TEXT, 24).stream())
    assert len(pieces) > 1
    assert "".join(pieces) == right
    stopped = generator.submit(TEXT, 24, stop=right[20:24])
    assert "".join(stopped.stream()) == right[:20]
    assert stopped.finish_reason == "stop"


def test_async_streams_and_await(generator: BatchGenerator) -> None:
    async def main() -> tuple[str, GenerationHandle, list[int]]:
        pieces = [piece async for piece in generator.submit(TEXT, 12).stream()]
        handle = await generator.submit(TEXT, 12)
        return "".join(pieces), handle, [token async for token in generator.submit(TEXT, 12)]

    text, handle, tokens = asyncio.run(main())
    assert handle.finish_reason == "length"
    assert handle.text == text
    assert handle.tokens.tolist() == tokens


def test_many_tasks_may_wait(generator: BatchGenerator) -> None:
    async def main() -> list[str]:
        handles = [generator.submit(f"{TEXT} {name}", 8) for name in ("Lily", "Tom", "Ben") * 5]
        done = await asyncio.gather(*handles)
        return [handle.text for handle in done]

    texts = asyncio.run(main())
    assert texts[:3] * 5 == texts


def test_abort_shows_at_once(generator: BatchGenerator) -> None:
    handles = [generator.submit(TEXT, 200) for _ in range(6)]
    next(iter(handles[0]))
    for handle in handles:
        handle.abort()
        assert handle.finish_reason == "aborted"
        assert handle.wait() is handle
    assert is_empty(generator)
    assert {handle.finish_reason for handle in handles} == {"aborted"}
    done = generator.submit(TEXT, 4).wait()
    done.abort()
    assert done.finish_reason == "length"


def test_leaving_async_for_aborts(generator: BatchGenerator) -> None:
    async def main() -> None:
        for kind in ("tokens", "text"):
            handle = generator.submit(TEXT, 500)
            async for _ in handle if kind == "tokens" else handle.stream():
                break
            gc.collect()
            assert handle.finish_reason == "aborted", kind

    asyncio.run(main())
    assert is_empty(generator)


def test_cancelling_a_task_aborts(generator: BatchGenerator) -> None:
    async def main() -> list[str | None]:
        handles = [generator.submit(TEXT, 700) for _ in range(2)]

        async def read() -> None:
            async for _ in handles[0].stream():
                pass

        async def wait() -> None:
            await handles[1]

        tasks = [asyncio.create_task(read()), asyncio.create_task(wait())]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [handle.finish_reason for handle in handles]

    assert set(asyncio.run(main())) <= {"aborted", "stop"}
    assert is_empty(generator)


def test_dropping_a_handle_aborts(generator: BatchGenerator) -> None:
    kept = generator.submit(TEXT, 8)
    generator.submit(TEXT, 900)
    samples = generator.submit(TEXT, 900, Sampler(seed=1), n=3)
    assert isinstance(samples, list)
    del samples
    for _ in generator.submit(TEXT, 900):
        break
    gc.collect()
    assert kept.wait().finish_reason == "length"
    assert is_empty(generator)


def test_a_sequence_of_the_caller_goes_on_without_a_handle(ctx: LlamaContext) -> None:
    with LlamaSequence(ctx, TEXT) as sequence, BatchGenerator(ctx) as generator:
        n = len(sequence)
        generator.submit(sequence, 5)
        gc.collect()
        generator.run()
        assert len(sequence) == n + 5


def test_steps_tell_of_handles_that_are_there(ctx: LlamaContext) -> None:
    with LlamaSequence(ctx, TEXT) as sequence, BatchGenerator(ctx) as generator:
        kept = generator.submit(TEXT, 4)
        generator.submit(sequence, 4)
        made = [pair for _ in range(6) for pair in generator.step()]
        assert [token for handle, token in made if handle is kept] == kept.tokens.tolist()
        # The sequence goes on, and `while generator.step()` sees that.
        others = [token for handle, token in made if handle is not kept]
        assert others == sequence.tokens[-4:].tolist()
        with LlamaSequence(ctx, TEXT) as other:
            generator.submit(TEXT, 4)
            generator.submit(other, 3)
            assert sum(len(generator.step()) for _ in range(5)) == 3


def test_abort_from_another_thread_while_steps_are_made(ctx: LlamaContext) -> None:
    with BatchGenerator(ctx) as generator:
        handles = [generator.submit(TEXT, 900) for _ in range(4)]
        thread = threading.Thread(target=generator.run)
        thread.start()
        for handle in handles:
            time.sleep(0.02)
            handle.abort()
        thread.join(30)
        assert not thread.is_alive()
        assert is_empty(generator)


def test_without_a_limit_it_goes_on_to_the_end_of_the_context(stories: LlamaModel) -> None:
    never = Sampler(temperature=0, logit_bias={t: -1e6 for t in range(3)})
    with LlamaContext(stories, n_ctx=256, n_seq_max=1, n_threads=1) as ctx:
        with LlamaSequence(ctx, TEXT) as sequence:
            n = len(sequence)
            generation = sequence.generate(sampler=never)
            assert len(list(generation)) == 256 - n + 1
            assert generation.finish_reason == "full"
        with LlamaSequence(ctx, TEXT) as sequence:
            stream = sequence.stream(None, never, stop=None)
            assert "".join(stream)
            assert stream.finish_reason == "full"
        with BatchGenerator(ctx) as generator:
            handle = generator.submit(TEXT, sampler=never, stop=None)
            assert handle.wait().finish_reason == "full"
            assert len(handle.tokens) == 256 - n + 1
    with LlamaContext(stories, n_ctx=512, n_threads=1) as ctx, BatchGenerator(ctx) as generator:
        assert generator.submit(TEXT, None).wait().finish_reason in ("stop", "full")


def test_log_probabilities_have_text(ctx: LlamaContext) -> None:
    with LlamaSequence(ctx, TEXT) as sequence:
        row = sequence.logits().astype(np.float64)
        generation = sequence.generate(6, logprobs=3)
        tokens = list(generation)
    expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
    first = generation.logprobs[0]
    assert list(first)[:3] == np.argsort(-row, kind="stable")[:3].tolist()
    assert first[tokens[0]] == pytest.approx(expected[tokens[0]], abs=1e-5)
    named = generation.token_logprobs
    assert [one.token for one in named] == tokens
    assert [len(one.top) for one in named] == [3] * 6
    for one, rows in zip(named, generation.logprobs, strict=True):
        assert {best.token: best.logprob for best in one.top}.items() <= rows.items()
        assert one.text == ctx.model.token_to_piece(one.token).decode("utf-8", "replace")
    with BatchGenerator(ctx) as generator:
        handle = generator.submit(TEXT, 6, logprobs=3).wait()
    assert [one.token for one in handle.token_logprobs] == tokens
    assert handle.token_logprobs[0].logprob == pytest.approx(named[0].logprob, abs=1e-4)
    with LlamaSequence(ctx, TEXT) as sequence:
        stream = sequence.stream(6, logprobs=1)
        text = "".join(stream)
        assert "".join(one.text for one in stream.token_logprobs) == text
