"""Answers: results of a generation, as the events of a stream or as one object."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from pykvcache.openai_format import ChatStream, Delta, make_id, usage_of
from pykvcache.serve.engine import Engine, Generation, Job, Piece
from pykvcache.serve.http import Json, models_of, stream

__all__ = ["Part", "Parts", "Writer", "answer"]


class Writer(ABC):
    """Writes one answer in the form of an API.

    Parameters
    ----------
    generation
        The running job.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        form = generation.job.format
        self.streams = [] if form is None else [ChatStream(form) for _ in range(generation.job.n)]

    @abstractmethod
    def write(self, piece: Piece) -> Iterator[bytes]:
        """Yield the events of a piece."""

    @abstractmethod
    def finish(self) -> Iterator[bytes]:
        """Yield the events after the last piece."""

    @abstractmethod
    def body(self) -> Any:
        """Return the whole answer; called after `finish`."""

    async def keep(self) -> None:  # noqa: B027 (optional)
        """Store the answer, if the client asks for it; called before `finish`."""

    def deltas(self, piece: Piece) -> list[Delta]:
        """Return the new parts of a chat's message."""
        reason = piece.finish_reason
        is_cut = reason not in (None, "stop")
        return self.streams[piece.index].feed(piece.text, is_end=reason is not None, is_cut=is_cut)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` so far."""
        generation, job = self.generation, self.generation.job
        keep = job.keep if job.use_cache else 0
        usage = usage_of(generation.reuse, generation.n_generated, keep)
        model = generation.engine.llm.model
        thought = [one.message.reasoning for one in self.streams if one.message.reasoning]
        n = sum(len(model.tokenize(text, add_special=False)) for text in thought)
        usage["completion_tokens_details"]["reasoning_tokens"] = n
        return usage


async def answer(
    http: Request,
    name: str | None,
    make_job: Callable[[Engine], Job],
    make_writer: Callable[[Generation], Writer],
    *,
    is_stream: bool,
) -> Response:
    """Run a job and return the writer's answer.

    Parameters
    ----------
    http
        The request.
    name
        The model.
    make_job
        Called in a thread.
    make_writer
        Called when the job runs.
    is_stream
        Whether to send events; otherwise the body is sent.
    """
    writers: list[Writer] = []

    async def events() -> AsyncIterator[bytes]:
        async with (
            models_of(http).engine(name) as engine,
            engine.generate(partial(make_job, engine)) as generation,
        ):
            writer = make_writer(generation)
            writers.append(writer)
            async for piece in generation.pieces(stream=is_stream):
                for one in writer.write(piece):
                    yield one
            http.state.log = (generation.reuse, generation.n_generated)
            await writer.keep()
            for one in writer.finish():
                yield one

    if is_stream:
        return await stream(http, events())
    async with contextlib.aclosing(cast("Any", events())) as all_events:
        async for _ in all_events:
            pass
    return Json(writers[0].body())


# Parts of a message -------------------------------------------------------------------------------


@dataclass
class Part:
    """A part of an assistant's message: its reasoning, its text, or one call of a tool.

    Attributes
    ----------
    kind
        ``"reasoning"``, ``"text"`` or ``"call"``.
    index
        Its index in the message.
    id
        Generated here.
    call_id, name
        Id and name of a tool call.
    text
        Its text so far; for a call, the arguments as JSON.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    id: str
    call_id: str = ""
    name: str = ""
    text: str = ""


class Parts:
    """Splits the deltas of one message into parts, of which the last one is open."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._open: tuple[str, int] | None = None

    def split(
        self, deltas: list[Delta], *, is_end: bool
    ) -> Iterator[tuple[Literal["open", "more", "close"], Part, str]]:
        """Yield the event, its part, and the part's new text."""
        for delta in deltas:
            call = delta.call
            if call is not None:
                key, text = ("call", call.index), call.arguments
                new = Part("call", len(self.all), make_id("fc_"), call.id, call.name)
            elif delta.reasoning:
                key, text = ("reasoning", 0), delta.reasoning
                new = Part("reasoning", len(self.all), make_id("rs_"))
            else:
                key, text = ("text", 0), delta.content
                new = Part("text", len(self.all), make_id("msg_"))
            if key != self._open:
                yield from self._open_part(key, new)
            if text:
                self.all[-1].text += text
                yield "more", self.all[-1], text
        if is_end:
            if not self.all:  # an answer has at least one part
                yield from self._open_part(("text", 0), Part("text", 0, make_id("msg_")))
            yield from self._close()

    def _open_part(
        self, key: tuple[str, int], new: Part
    ) -> Iterator[tuple[Literal["open", "close"], Part, str]]:
        closed = self.all[-1] if self._open is not None else None
        self._open = key
        self.all.append(new)
        if closed is not None:  # it is not the last one any more
            yield "close", closed, ""
        yield "open", new, ""

    def _close(self) -> Iterator[tuple[Literal["close"], Part, str]]:
        if self._open is not None:
            self._open = None
            yield "close", self.all[-1], ""
