"""Threads that make the steps of a generator, and those that wait for them."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any

import pytest

from memory.kit import Make, words
from pykvcache import BatchGenerator, LlamaContext, LlamaSequence, Sampler
from pykvcache.errors import ClosedError, ReentryError
from pykvcache.generate import GenerationHandle

Found = list[tuple[list[int], str, list[list[int]], str | None]]


def submit(generator: BatchGenerator, ctx: LlamaContext) -> list[GenerationHandle]:
    """Ask for all sorts: samples, stop strings, log-probabilities, priorities; too much at once."""
    hot = Sampler(temperature=1, top_k=20, repeat_penalty=1.2, seed=3)
    handles = [*generator.submit(words(1, 40), 12, hot, n=3)]
    piece = ctx.model.detokenize([9])
    handles.append(generator.submit(words(2, 60), 20, hot, stop=[piece + "x", "never"]))
    handles.append(generator.submit(words(3, 50), 9, hot, logprobs=2, priority=1))
    handles.append(generator.submit(LlamaSequence(ctx, words(4, 70)), 14))
    return handles


def found(handles: list[GenerationHandle]) -> Found:
    return [
        (h.tokens.tolist(), h.text, [list(one) for one in h.logprobs], h.finish_reason)
        for h in handles
    ]


def program(ctx: LlamaContext) -> Found:
    generator = BatchGenerator(ctx, n_chunk=16)
    handles = submit(generator, ctx)
    generator.run(progress=False)
    result = found(handles)
    for handle in handles:
        handle.sequence.close()
    assert not ctx.n_cells_used
    return result


def test_nothing_is_started_that_was_closed(make_context: Make) -> None:
    ctx = make_context("llama")
    generator = BatchGenerator(ctx)
    generator.close()
    generator.close()
    for call in (generator.start, generator.run, generator.step, lambda: generator.submit([5], 1)):
        with pytest.raises(ClosedError):
            call()
    other = BatchGenerator(ctx)
    ctx.close()
    assert other.is_closed
    with pytest.raises(ClosedError):
        other.start()


def test_a_dropped_generator_ends_its_thread(make_context: Make) -> None:
    ctx = make_context("llama")
    for n in (0, 200):
        generator = BatchGenerator(ctx)
        generator.start()
        thread = generator._thread
        assert thread is not None
        if n:
            generator.submit(words(1, 10), n)
        dropped = weakref.ref(generator)
        del generator
        deadline = time.monotonic() + 30
        while thread.is_alive() and time.monotonic() < deadline:
            gc.collect()
            thread.join(0.2)
        assert not thread.is_alive()
        gc.collect()
        assert dropped() is None
    assert not ctx.sequences()


def test_two_event_loops_read_one_handle(make_context: Make) -> None:
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    wanted = program(ctx)
    generator = BatchGenerator(ctx, n_chunk=16)
    handles = submit(generator, ctx)
    seen: dict[int, list[list[int]]] = {0: [], 1: []}

    async def read(handle: GenerationHandle) -> list[int]:
        return [token async for token in handle]

    async def main(loop: int) -> None:
        seen[loop] = await asyncio.gather(*map(read, handles))

    threads = [threading.Thread(target=lambda i=i: asyncio.run(main(i))) for i in (0, 1)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen[0] == seen[1] == [tokens for tokens, *_ in wanted]
    assert found(handles) == wanted


def test_abort_in_the_middle_of_a_step(make_context: Make) -> None:
    """From another thread, while the decode runs: it ends before its next token, others go on."""
    ctx = make_context("llama", n_ctx=512, n_seq_max=3)
    alone = list(LlamaSequence(ctx, words(2, 9)).generate(60, Sampler(temperature=1, seed=1)))
    for _ in range(5):
        generator = BatchGenerator(ctx)
        first = generator.submit(words(1, 9), 400, Sampler(temperature=1, seed=1))
        second = generator.submit(words(2, 9), 60, Sampler(temperature=1, seed=1))
        waiting = [generator.submit(words(3, 9), 400) for _ in range(3)]
        generator.step()

        def abort(first: GenerationHandle = first, waiting: Any = waiting) -> None:
            while len(first.tokens) < 20 and first.finish_reason is None:
                pass
            first.abort()
            waiting[-1].abort()

        thread = threading.Thread(target=abort)
        thread.start()
        second.wait()
        thread.join(60)
        generator.step()
        assert first.finish_reason in ("aborted", "stop")
        assert waiting[-1].finish_reason == "aborted"
        assert not len(waiting[-1].tokens)
        assert second.tokens.tolist() == alone
        generator.close()
    assert not ctx.sequences() or all(s == 2 for s in ctx.sequences())


def test_a_step_within_a_step_is_refused(make_context: Make) -> None:
    ctx = make_context("llama")
    generator = BatchGenerator(ctx)
    handle = generator.submit(words(1, 9), 9)
    errors: list[BaseException] = []

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_step" and not errors:
            try:
                generator.step()
            except ReentryError as error:
                errors.append(error)

    sys.setprofile(look)
    try:
        generator.step()
    finally:
        sys.setprofile(None)
    assert len(errors) == 1
    assert len(handle.wait().tokens) <= 9
