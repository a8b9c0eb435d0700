"""HTTP for the endpoints: bodies within limits, JSON, event streams, the tenant."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from pykvcache.serve.errors import ApiError, as_api_error

if TYPE_CHECKING:
    from pykvcache.serve.models import Models

__all__ = [
    "Bodies",
    "Handler",
    "Json",
    "error_response",
    "event",
    "models_of",
    "read",
    "stream",
    "tenant_of",
    "until_disconnect",
]

S = TypeVar("S")
Handler = Callable[[Request], Awaitable[Response]]

#: Seconds in which a body must arrive.
BODY_SECONDS = 60.0
#: A stream begins after this time even without an event, as proxies stop waiting.
FIRST_EVENT_SECONDS = 10.0

dumps = msgspec.json.encode


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
    """Return the namespace of the API key."""
    return cast("str", http.state.tenant)


# Bodies -------------------------------------------------------------------------------------------


class Bodies:
    """Reads bodies within limits: on the size of one, on the size of all in flight, and on time.

    Parameters
    ----------
    max_bytes
        Largest body. All bodies together may have 8 times as many bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._in_flight = 0

    @contextlib.asynccontextmanager
    async def reading(self, http: Request) -> AsyncIterator[bytes]:
        """Yield the body of a request; it counts as in flight until the block is left.

        Raises
        ------
        ApiError
            408: it is too slow; 413: it is too large; 429: all bodies together are too large.
        """
        parts: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._read(http, parts), BODY_SECONDS)
            except asyncio.TimeoutError:
                text = f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
                raise ApiError(408, text) from None
            yield b"".join(parts)
        finally:
            self._in_flight -= sum(map(len, parts))

    async def _read(self, http: Request, parts: list[bytes]) -> None:
        size = 0
        async for part in http.stream():
            parts.append(part)
            size += len(part)
            self._in_flight += len(part)
            if size > self._max_bytes:
                raise ApiError(413, f"the body is larger than {self._max_bytes} bytes (--max-body)")
            if self._in_flight > 8 * self._max_bytes:
                raise ApiError(429, "too many large bodies at once", retry_after=1)


def read(http: Request, kind: type[S], default: bytes = b"") -> S:
    """Return the decoded body; `default` takes the place of an empty one.

    Raises
    ------
    ApiError
        400: it is not JSON, or a field is missing or of another type.
    """
    try:
        return msgspec.json.decode(http.state.body or default, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        at = text.rpartition(" - at `$.")[2].rstrip("`") if " - at `$." in text else None
        raise ApiError(400, text, param=at) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


# Answers ------------------------------------------------------------------------------------------


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(data) + b"\n\n"


def is_anthropic(http: Request) -> bool:
    """Whether a client expects Anthropic's form."""
    return http.url.path.startswith("/v1/messages")


def error_response(http: Request, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    told = http.state.failure = as_api_error(error)
    headers = {} if told.retry_after is None else {"Retry-After": str(told.retry_after)}
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if told.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    body = told.anthropic() if is_anthropic(http) else told.openai()
    return Json(body, status_code=told.status, headers=headers)


async def stream(http: Request, events: AsyncIterator[bytes]) -> Response:
    """Return an event stream.

    A failure before the first event is raised, and is answered with a status. A later one becomes
    an event, as the status is sent already.
    """
    first = asyncio.ensure_future(_next(events))
    try:
        await asyncio.wait({first}, timeout=FIRST_EVENT_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise

    async def rest() -> AsyncIterator[bytes]:
        n = 0
        async with contextlib.aclosing(cast("Any", events)):
            try:
                while not first.done():
                    yield b": the prompt is being evaluated\n\n"
                    await asyncio.wait({first}, timeout=FIRST_EVENT_SECONDS)
                yield first.result()
                n = 1
                async for one in events:
                    n += 1
                    yield one
            except Exception as error:
                told = http.state.failure = as_api_error(error)
                yield _failure(http, told, n)
            finally:
                if not first.done():
                    first.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await first

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(rest(), media_type="text/event-stream", headers=headers)


def _failure(http: Request, told: ApiError, n_events: int) -> bytes:
    """Return the event of an error after `n_events` events, in the form of each API."""
    if is_anthropic(http):
        return event(told.anthropic(), "error")
    body = told.openai()
    if http.url.path.endswith("/responses"):
        facts = {key: body["error"][key] for key in ("code", "message", "param")}
        body = {"type": "error", "sequence_number": n_events, **facts, **body}
        return event(body, "error")
    return event(body)


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events, b"")


async def until_disconnect(http: Request, handler: Handler) -> Response:
    """Run a handler; cancel it if the client disconnects."""
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
