"""A request of a BatchGenerator, and the handle through which a user controls it."""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pykvcache._arguments import IntArray
from pykvcache._native import lib
from pykvcache.errors import ClosedError
from pykvcache.sampling import Sampler
from pykvcache.sequence.logprobs import TokenLogprob, likeliest, named
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.sequence.text import Stop, TextStream

if TYPE_CHECKING:
    from typing_extensions import Self

    from pykvcache.generate.generator import BatchGenerator
    from pykvcache.prefix.sequence import Request

__all__ = ["FinishReason", "GenerationHandle", "GenerationRequest", "HandleStream", "RequestTimes"]

FinishReason = Literal["stop", "length", "full", "aborted", "error"]

_orders = itertools.count()


@dataclass
class RequestTimes:
    """Times of a request, by ``time.perf_counter()``, in seconds.

    Attributes
    ----------
    queued
        Submission.
    tokens
        Choice of each token; the first gives the time to first token.
    finished
        End; None before.
    """

    queued: float = field(default_factory=time.perf_counter)
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def first_token(self) -> float | None:
        """Time of the first token; None before."""
        return self.tokens[0] if self.tokens else None


class GenerationRequest:
    """A request inside its generator; users have a `GenerationHandle`, which can be dropped.

    If it `is_owned`, the request created its sequence: it closes it at the end, and only its
    handle refers to it. `cached` is the cache's record of the sequence.
    """

    def __init__(
        self,
        generator: BatchGenerator,
        sequence: LlamaSequence,
        max_tokens: int,
        sampler: Sampler,
        stop: Stop,
        n_logprobs: int,
        priority: int,
        cached: Request | None,
        *,
        is_owned: bool,
    ) -> None:
        self._generator = generator
        self.sequence = sequence
        self.cells = sequence._cells
        self.cached = cached
        self.priority, self.is_owned = priority, is_owned
        #: Larger priority first, then order of submission.
        self.rank = -priority, next(_orders)
        self._stop = stop
        # Number of tokens that were decoded, their text, and the decoder; replaced together,
        # because any thread may read the text.
        self._decoded = 0, "", TextStream(stop.strings)
        self.stop_string: str | None = None
        self.lane = lib.Lane(
            self.cells.ledger,
            sampler.native,
            max_tokens,
            stop.tokens,
            bool(stop.strings or n_logprobs),
            n_logprobs > 0,
        )
        #: Requests for other samples of the prompt, which wait for its evaluation.
        self.siblings: list[GenerationRequest] = []
        #: The user's handle; None once dropped.
        self.handle: Callable[[], GenerationHandle | None] = lambda: None
        self.tokens = self.lane.tokens
        self.n_logprobs = n_logprobs
        self.logprobs: list[dict[int, float]] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.is_aborted = False
        self.watchers: tuple[Callable[[], object], ...] = ()
        self.times = RequestTimes(tokens=self.lane.times)

    # For the handle -----------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """As in `GenerationHandle`."""
        is_whole = self.finish is not None
        text, stream = self._decode()
        return text + stream.finish() if is_whole else text

    def _decode(self) -> tuple[str, TextStream]:
        """Return the text so far and a copy of its decoder; reads only tokens that are new."""
        n, text, known = self._decoded
        tokens, stream, parts = self.tokens[n:], copy.copy(known), [text]
        for token in tokens:
            if token not in self._stop.tokens:
                parts.append(stream.feed(self.sequence.context.model.token_to_piece(token)))
        text = "".join(parts)
        self._decoded = n + len(tokens), text, stream
        return text, copy.copy(stream)

    @property
    def finish_reason(self) -> FinishReason | None:
        """As in `GenerationHandle`: "aborted" as soon as `abort` was called."""
        return "aborted" if self.finish is None and self.is_aborted else self.finish

    def abort(self) -> None:
        """As in `GenerationHandle`."""
        if self.finish is None and not self.is_aborted:
            self.is_aborted = True
            self._generator._end_aborted()

    def token(self, i: int) -> int | None:
        """Return token i, making steps if no other thread does; None if it ended before."""
        while True:
            reason = self.finish_reason  # read before the tokens, which are complete then
            if i < len(self.tokens):
                return self.tokens[i]
            if reason is not None:
                if self.error is not None and reason == "error":
                    raise self.error
                return None
            self._generator._advance()

    # For the generator --------------------------------------------------------------------------

    def notify(self) -> None:
        """Call the functions that watch this request."""
        for call in self.watchers:
            call()

    def look(self) -> None:
        """Process new tokens, and end the request if one of them ends it."""
        lane, tokens = self.lane, self.tokens
        if self.n_logprobs:
            for i in range(len(self.logprobs), len(tokens)):
                row = lane.rows[i - len(tokens)]
                self.logprobs.append(likeliest(row, self.n_logprobs, tokens[i]))
            lane.rows.clear()
        if self._stop.strings:
            try:
                self.stop_string = self._decode()[1].stopped
            except ClosedError as error:  # the model is closed, so tokens cannot become text
                self.end("error", error)
                return
        if lane.error is not None:
            self.end("error", lane.error)
        elif (
            lane.is_over
            or self.stop_string is not None
            or (tokens and tokens[-1] in self._stop.tokens)
        ):
            self.end("stop")
        elif lane.is_full:
            self.end("length")

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Record why the request ended, unless it has ended before."""
        if self.finish is None:
            if self.is_aborted and reason != "error":
                reason = "aborted"  # `finish_reason` already says so
            self.error = error
            self.times.finished = time.perf_counter()
            self.finish = reason
            self.notify()


class GenerationHandle:
    """A request that was submitted to a `BatchGenerator`.

    Iterating yields its tokens from the first one on, and drives the generator unless another
    thread does; `stream` yields text. ``async for`` and ``await`` do so in a thread. Any thread
    may use it.

    The request is aborted when its handle is dropped (unless it continues the caller's sequence),
    when an ``async for`` over it is left early, or when a task that awaits it is cancelled.
    """

    __slots__ = ("__weakref__", "_request")

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        request.handle = weakref.ref(self)

    # Results ----------------------------------------------------------------------------------

    @property
    def tokens(self) -> IntArray:
        """The new tokens so far, a copy: int32, shape (n,)."""
        return np.array(self._request.tokens, np.int32)

    @property
    def text(self) -> str:
        """The text of the new tokens so far; it ends before a stop string.

        Incomplete characters are omitted until the end. To read it after the model is closed, read
        it once before.
        """
        return self._request.text

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """The model's log-probabilities for each token, as dicts by token id; a copy.

        Contains the ``logprobs`` likeliest tokens and the chosen one; empty if not requested.
        """
        return [dict(one) for one in self._request.logprobs]

    @property
    def token_logprobs(self) -> list[TokenLogprob]:
        """`logprobs` with the text of each token."""
        request = self._request
        model = request.sequence.context.model
        return named(model, request.tokens, request.logprobs, request.n_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs.

        ``"stop"`` (an end-of-generation token or a stop), ``"length"`` (``max_tokens``), ``"full"``
        (no room in the context), ``"aborted"`` (set at once by `abort`), ``"error"`` (see `error`).
        """
        return self._request.finish_reason

    @property
    def error(self) -> Exception | None:
        """The exception behind ``"error"``; iterating raises it."""
        return self._request.error

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the request, or None."""
        return self._request.stop_string

    @property
    def sequence(self) -> LlamaSequence:
        """The sequence of the request; closed at the end unless the caller submitted it."""
        return self._request.sequence

    @property
    def priority(self) -> int:
        """Requests of higher priority run first."""
        return self._request.priority

    @property
    def times(self) -> RequestTimes:
        """Times of submission, tokens and end."""
        return self._request.times

    # Actions ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the request before its next token; its tokens stay. Does nothing if it has ended.

        `finish_reason` changes at once; a step under way may still append a token.
        """
        self._request.abort()

    def watch(self, call: Callable[[], object]) -> None:
        """Set a function to call after each step that made tokens of this request, and at its end.

        It runs in the thread that makes the step and must not call this context; use it to wake
        another thread or an event loop.
        """
        request = self._request
        request.watchers += (call,)
        if request.tokens or request.finish is not None:
            call()

    def wait(self) -> Self:
        """Wait for the end, making steps if no other thread does; raise the request's error."""
        for _ in self:
            pass
        return self

    def stream(self) -> HandleStream:
        """Return an iterator that yields its text once it is final; also for ``async for``.

        Yields whole characters only, and no part of a stop string.
        """
        return HandleStream(self)

    def __iter__(self) -> Iterator[int]:
        i = 0
        while (token := self._request.token(i)) is not None:
            yield token
            i += 1

    def __aiter__(self) -> AsyncIterator[int]:
        return _AsyncTokens(self)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ended().__await__()

    async def _ended(self) -> Self:
        async for _ in self:
            pass
        return self

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None and request.is_owned:
            request.abort()

    def __repr__(self) -> str:
        n, reason = len(self._request.tokens), self.finish_reason
        return f"<GenerationHandle: {n} tokens, {reason or 'not finished'}>"


class _AsyncTokens:
    """Tokens of a handle in an event loop; leaving the loop early aborts the request."""

    __slots__ = ("_handle", "_i", "_is_over")

    def __init__(self, handle: GenerationHandle) -> None:
        self._handle, self._i, self._is_over = handle, 0, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        import asyncio  # here, because it is a tenth of the package's import time

        request = self._handle._request
        token: int | None
        if self._i < len(request.tokens):
            token = request.tokens[self._i]
        else:
            try:
                token = await asyncio.to_thread(request.token, self._i)
            except asyncio.CancelledError:
                self._handle.abort()
                raise
        if token is None:
            self._is_over = True
            raise StopAsyncIteration
        self._i += 1
        return token

    def __del__(self) -> None:
        if not self._is_over:
            self._handle.abort()


class HandleStream:
    """The text of a handle, piece by piece; returned by `GenerationHandle.stream`.

    Leaving an ``async for`` over it early aborts the request.
    """

    def __init__(self, handle: GenerationHandle) -> None:
        self._handle = handle
        self._n = 0
        self._tokens = iter(handle)
        self._async_tokens: AsyncIterator[int] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return self._handle.finish_reason

    def _new(self) -> str:
        text = self._handle.text
        new, self._n = text[self._n :], max(self._n, len(text))
        return new

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        for _ in self._tokens:
            if new := self._new():
                return new
        if new := self._new():
            return new
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._async_tokens is None:
            self._async_tokens = aiter(self._handle)
        async for _ in self._async_tokens:
            if new := self._new():
                return new
        if new := self._new():
            return new
        raise StopAsyncIteration
