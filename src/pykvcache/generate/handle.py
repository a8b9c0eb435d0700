"""GenerationHandle: a user's control of a request. Dropping it ends the request."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvcache._arguments import IntArray
from pykvcache.generate.request import FinishReason, GenerationRequest, RequestTimes
from pykvcache.sequence.logprobs import TokenLogprob, named
from pykvcache.sequence.sequence import LlamaSequence

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FinishReason", "GenerationHandle", "HandleStream", "RequestTimes", "handle_of"]


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
        self._request.watch(call)

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


def handle_of(request: GenerationRequest) -> GenerationHandle | None:
    """Return a new handle of a request whose handle was dropped; None if dropping has ended it."""
    return None if request.is_owned else GenerationHandle(request)


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
        self._tokens: Iterator[int] | None = None
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
        if self._tokens is None:
            self._tokens = iter(self._handle)
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
