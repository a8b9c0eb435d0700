"""What endpoints need of HTTP: bodies within a limit, JSON, event streams, who asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from pykvcache.serve.answers import dumps, event
from pykvcache.serve.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from pykvcache.serve.models import Models

__all__ = [
    "Handler",
    "Json",
    "body_of",
    "error_response",
    "models_of",
    "stream",
    "tenant_of",
    "until_disconnect",
]

Handler = Callable[[Request], Awaitable[Response]]


class Json(Response):
    """A JSON answer, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return dumps(content)


def models_of(http: Request) -> Models:
    """Return the models of the server."""
    return cast("Models", http.app.state.models)


def tenant_of(http: Request) -> str:
    """Return the namespace of whoever asks: that of the API key."""
    return cast("str", http.state.tenant)


async def body_of(http: Request) -> bytes:
    """Return the body of a request.

    Raises
    ------
    ApiError
        413: it is larger than the server allows.
    """
    if not hasattr(http.state, "body"):
        limit: int = http.app.state.max_body
        parts: list[bytes] = []
        size = 0
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes")
            parts.append(part)
        http.state.body = b"".join(parts)
    return cast("bytes", http.state.body)


def is_anthropic(http: Request) -> bool:
    """Whether a client expects Anthropic's form."""
    return http.url.path.startswith("/v1/messages")


def error_response(http: Request, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    told = as_api_error(error)
    headers = {} if told.retry_after is None else {"Retry-After": str(told.retry_after)}
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    http.state.failure = told
    body = told.anthropic() if is_anthropic(http) else told.openai()
    return Json(body, status_code=told.status, headers=headers)


async def stream(http: Request, events: AsyncIterator[bytes]) -> Response:
    """Return an event stream; what fails before the first event is an answer with a status.

    A failure after that is an event, as the status is sent already.
    """
    try:
        first = await anext(events)
    except StopAsyncIteration:
        first = b""

    async def rest() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(cast("Any", events)):
            yield first
            try:
                async for one in events:
                    yield one
            except Exception as error:
                told = as_api_error(error)
                http.state.failure = told
                if is_anthropic(http):
                    yield event(told.anthropic(), "error")
                else:
                    yield event(told.openai())

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(rest(), media_type="text/event-stream", headers=headers)


async def until_disconnect(http: Request, handler: Handler) -> Response:
    """Run a handler; where the client goes away first, cancel it."""
    await body_of(http)
    work = asyncio.ensure_future(handler(http))
    gone = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, gone):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
