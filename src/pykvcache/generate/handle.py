"""GenerationHandle: what a user holds of a request. Dropping it ends the request."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from pykvcache._arguments import IntArray
from pykvcache.generate.request import FinishReason, GenerationRequest, RequestTimes
from pykvcache.sequence.logprobs import TokenLogprob, named
from pykvcache.sequence.sequence import LlamaSequence

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FinishReason", "GenerationHandle", "HandleStream", "RequestTimes", "handle_of"]


class GenerationHandle:
    """A generation that was submitted to a `BatchGenerator`, which makes it.

    Iterating gives its tokens as they come, from the first one on, and drives the generator where
    no other thread does; `stream` gives text. ``async for`` and ``await`` do so in a thread. Any
    thread may use it.

    The request is aborted when its handle is dropped (unless it continues a sequence of the
    caller's), when an ``async for`` over it is left early, and when a task that waits for it is
    cancelled.
    """

    __slots__ = ("__weakref__", "_request")

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        request.handle = weakref.ref(self)

    # What has come of it ----------------------------------------------------------------------

    @property
    def tokens(self) -> IntArray:
        """The new tokens, so far; int32, shape (n,), a copy."""
        return self._request.tokens

    @property
    def text(self) -> str:
        """The text of the new tokens, so far; it ends before a stop string.

        Characters whose bytes are not all there are left out until the end. Read it once before
        the model is closed: the whole text is kept then.
        """
        return self._request.text

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """For each token the log-probabilities that the model gave, by token id; a copy.

        The ``logprobs`` likeliest, and the one that was chosen; empty if none were asked for.
        """
        return self._request.logprobs

    @property
    def token_logprobs(self) -> list[TokenLogprob]:
        """The same with the text of each token."""
        request, rows = self._request, self._request.logprobs
        model = request.sequence.context.model
        return named(model, self.tokens.tolist(), rows, request.n_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None while it runs.

        ``"stop"`` (an end-of-generation token, or a stop), ``"length"`` (``max_tokens``),
        ``"full"`` (it has all the room that there is), ``"aborted"`` (at once after `abort`),
        ``"error"`` (see `error`).
        """
        return self._request.finish_reason

    @property
    def error(self) -> Exception | None:
        """What ended it with ``"error"``; iterating raises it."""
        return self._request.error

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None where it ended otherwise."""
        return self._request.stop_string

    @property
    def sequence(self) -> LlamaSequence:
        """The sequence it continues; closed at the end unless it was the submitted one."""
        return self._request.sequence

    @property
    def priority(self) -> int:
        """Larger ones go first."""
        return self._request.priority

    @property
    def times(self) -> RequestTimes:
        """When things happened."""
        return self._request.times

    # What can be done with it -----------------------------------------------------------------

    def abort(self) -> None:
        """End it before its next token; its tokens stay. Does nothing where it has ended.

        `finish_reason` says so at once; a step that is under way may still append a token.
        """
        self._request.abort()

    def watch(self, call: Callable[[], object]) -> None:
        """Call something after each step that made tokens of this request, and at its end.

        It is called in the thread that makes the step, and must not call this context: let it
        wake another thread or an event loop.
        """
        self._request.watch(call)

    def wait(self) -> Self:
        """Wait until it has ended, making steps if no other thread does; raises its error."""
        for _ in self:
            pass
        return self

    def stream(self) -> HandleStream:
        """Return an iterator over its text, as soon as it is certain; for ``async for``, too.

        Whole characters only, and nothing of a stop string.
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
    """Return a new handle of a request whose own was dropped; None where that has ended it."""
    return None if request.is_owned else GenerationHandle(request)


class _AsyncTokens:
    """The tokens of a handle in an event loop; leaving them early aborts the request."""

    __slots__ = ("_handle", "_i", "_is_over")

    def __init__(self, handle: GenerationHandle) -> None:
        self._handle, self._i, self._is_over = handle, 0, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        import asyncio  # callers have it already; for others it is a tenth of the import

        request = self._handle._request
        token: int | None
        if self._i < request.n_tokens:
            token = int(request.tokens[self._i])
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
    """The text of a handle, piece by piece: made by `GenerationHandle.stream`.

    Leaving an ``async for`` over it early aborts the request.
    """

    def __init__(self, handle: GenerationHandle) -> None:
        self._handle = handle
        self._n = 0
        self._tokens: Iterator[int] | None = None
        self._async_tokens: AsyncIterator[int] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the generation ended; None before."""
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
