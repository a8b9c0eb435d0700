"""What a handle gives, how requests end, and who drives; text comes as it is certain."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from memory.kit import Make, words
from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    PrefixCache,
    Sampler,
)
from pykvcache.errors import (
    ClosedError,
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    ReentryError,
    UnsupportedOperation,
)
from pykvcache.generate import GenerationHandle
from pykvcache.generate.request import GenerationRequest
from pykvcache.sequence.text import TextStream
from support.models import EXACT

TEXT = "Once upon a time there was a little girl named"
PROMPTS = ["Once upon a time", "One day", "Tim", "The dog", "A girl", "Lily"]


@pytest.fixture
def ctx(stories: LlamaModel) -> Iterator[LlamaContext]:
    with LlamaContext(stories, n_ctx=512, n_seq_max=4, n_threads=1, **EXACT) as ctx:
        yield ctx


def alone(ctx: LlamaContext, prompt: str, n: int) -> list[int]:
    with LlamaSequence(ctx, prompt) as sequence:
        return list(sequence.generate(n))


def test_a_slow_reader_of_the_text_hides_no_stop_string(
    ctx: LlamaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, generator = ctx.model, BatchGenerator(ctx)
    tokens = alone(ctx, "One day", 8)
    stop = model.detokenize(tokens[5:7])
    want = generator.submit("One day", 12, stop=stop).wait()
    assert want.stop_string == stop
    handle = generator.submit("One day", 12, stop=stop)
    while len(handle.tokens) < len(want.tokens) - 1:
        generator.step()
    handle._request._decoded = 0, "", TextStream((stop,))  # as if nobody had read it
    copied, overtaken = threading.Event(), threading.Event()
    reader = threading.Thread(target=lambda: handle.text)
    plain_piece, plain_decode = LlamaModel.token_to_piece, GenerationRequest._decode

    def piece(self: LlamaModel, token: int, **options: Any) -> bytes:
        if threading.current_thread() is reader:
            copied.set()
            overtaken.wait(10)
        return plain_piece(self, token, **options)

    def decode(self: GenerationRequest) -> Any:
        found = plain_decode(self)
        if threading.current_thread() is not reader:
            overtaken.set()  # the reader stores its older text between the steps of this thread
            reader.join()
        return found

    monkeypatch.setattr(LlamaModel, "token_to_piece", piece)
    monkeypatch.setattr(GenerationRequest, "_decode", decode)
    reader.start()
    assert copied.wait(10)
    generator.run(progress=False)
    assert handle.tokens.tolist() == want.tokens.tolist()
    assert (handle.finish_reason, handle.stop_string) == ("stop", stop)
    assert handle.text == want.text


def test_an_iterator_yields_tokens_made_while_it_asks_for_the_end(
    ctx: LlamaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = alone(ctx, "One day", 12)
    generator = BatchGenerator(ctx)
    handle = generator.submit("One day", 12)
    tokens = iter(handle)
    found = [next(tokens), next(tokens)]
    plain: Any = GenerationRequest.finish_reason

    def finish_reason(self: GenerationRequest) -> Any:
        monkeypatch.setattr(GenerationRequest, "finish_reason", plain)
        generator.run(progress=False)  # as another thread may
        return plain.fget(self)

    monkeypatch.setattr(GenerationRequest, "finish_reason", property(finish_reason))
    assert found + list(tokens) == want


def test_iterating_over_one_handle_drives_all_requests(ctx: LlamaContext) -> None:
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
    named = handle.token_logprobs
    assert [one.token for one in named] == handle.tokens.tolist()
    for one, rows in zip(named, handle.logprobs, strict=True):
        assert {best.token: best.logprob for best in one.top}.items() <= rows.items()
        assert one.text == ctx.model.token_to_piece(one.token).decode("utf-8", "replace")
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


def test_closing_ends_the_remaining_requests(ctx: LlamaContext) -> None:
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


# How requests end, and text comes -----------------------------------------------------------------


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
    has_read, n_calls = threading.Event(), 0

    def wait_for_reader(_ids: object, _logits: object) -> None:
        nonlocal n_calls
        n_calls += 1
        assert n_calls < 20 or has_read.wait(60), "no piece before the text's end"

    right = generator.submit(TEXT, 24).wait().text
    pieces = []
    slow = Sampler(temperature=0, stages=[wait_for_reader])
    for piece in generator.submit(TEXT, 24, sampler=slow).stream():
        pieces.append(piece)
        has_read.set()
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


def test_steps_return_tokens_of_kept_handles_and_of_callers_sequences(ctx: LlamaContext) -> None:
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


def test_a_request_without_a_limit_continues_until_the_context_is_full(stories: LlamaModel) -> None:
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


# The progress bar of `run`: in a terminal, with rich, and nowhere else ----------------------------


class Kept(BatchGenerator):
    """A generator that keeps its handles, without which requests end."""

    handles: list[object]


def submit(ctx: LlamaContext) -> BatchGenerator:
    generator = Kept(ctx)
    sampler = Sampler(temperature=1, seed=1)
    generator.handles = [
        generator.submit([5 + i], 6, sampler, n=1 + 2 * (i == 1)) for i in range(3)
    ]
    return generator


def test_a_bar_counts_requests_to_the_end(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = pytest.importorskip("rich.progress")
    ctx, seen = make_context("llama"), list[tuple[float, float | None]]()

    class Bar(progress.Progress):  # type: ignore[misc]
        def update(self, *args: object, **more: object) -> None:
            super().update(*args, **more)
            seen.append((self.tasks[0].completed, self.tasks[0].total))

    monkeypatch.setattr(progress, "Progress", Bar)
    submit(ctx).run(progress=True)
    assert seen[-1] == (5, 5), "samples count, too"
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_bar_is_off_without_a_terminal_or_rich(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ctx = make_context("llama")
    submit(ctx).run()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    submit(ctx).run()
    generator = submit(ctx)
    with pytest.raises(ImportError, match=r"extra cli"):
        generator.run(progress=True)
    assert len(generator._schedule) == 3, "nothing was done"
    assert capfd.readouterr() == ("", "")
    generator.run(progress=False)
