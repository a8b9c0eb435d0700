"""The server as an ASGI application: routes, keys, errors, logs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import anyio
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, request_response

from pykvcache.prefix.report import ReuseReport
from pykvcache.serve import anthropic, cache, llama_server, openai, responses
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Bodies, Handler, error_response, until_disconnect
from pykvcache.serve.models import Models

__all__ = ["is_loopback", "make_app"]

log = logging.getLogger("pykvcache.serve")

#: Paths that need no key.
PUBLIC = ("/", "/health", "/v1/health")
#: Paths that monitors poll: they are not logged.
WATCHED = (*PUBLIC, "/cache", "/metrics", "/slots")


def make_app(
    models: Models,
    *,
    keys: Mapping[str, str] | None = None,
    max_body: int = 32 << 20,
    stored: responses.Responses | None = None,
    origins: tuple[str, ...] = (),
) -> Starlette:
    """Return the application.

    Parameters
    ----------
    models
        The models to serve; closed with the application.
    keys
        Names of tenants by API key. The name is the namespace of the prefix cache. None: requests
        need no key, and the server must listen on loopback only.
    max_body
        Largest body of a request in bytes.
    stored
        Where responses are stored; default: in memory. Closed with the application.
    origins
        Origins of web pages that may call it, ``"*"`` for all; default: pages of this machine.
    """
    stored = responses.Responses() if stored is None else stored

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group():  # imported here, not in the first stream
            watcher = asyncio.ensure_future(models.watch_idle())
        try:
            yield
        finally:
            watcher.cancel()
            await models.close()
            await asyncio.to_thread(stored.close)

    app = Starlette(routes=_routes(), lifespan=lifespan)
    app.router.default = request_response(_endpoint(_missing))
    state = app.state
    state.models, state.responses, state.origins = models, stored, origins
    # Digests: the keys themselves are not kept in memory.
    state.tenants = None if keys is None else {_digest(k.encode()): keys[k] for k in keys}
    state.bodies = Bodies(max_body)
    state.recent = cache.Recent()
    state.diagnoses = anthropic.Diagnoses()
    return app


def _routes() -> list[Route]:
    get: dict[str, Handler] = {
        "/": page,
        "/health": llama_server.health,
        "/v1/health": llama_server.health,
        "/metrics": cache.metrics,
        "/props": llama_server.props,
        "/slots": llama_server.slots,
        "/cache": cache.show,
        "/models": openai.list_models,
        "/v1/models": openai.list_models,
        "/v1/models/{id:path}": openai.show_model,
        "/v1/responses/{id}": responses.show_response,
    }
    post: dict[str, Handler] = {
        "/v1/chat/completions": openai.chat_completions,
        "/v1/chat/completions/input_tokens": openai.count_input_tokens,
        "/v1/completions": openai.completions,
        "/v1/embeddings": openai.embeddings,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/v1/responses": responses.create_response,
        "/completion": llama_server.completion,
        "/completions": llama_server.completion,
        "/tokenize": llama_server.tokenize,
        "/detokenize": llama_server.detokenize,
        "/apply-template": llama_server.apply_template,
        "/cache/pin": cache.pin,
        "/cache/prefetch": cache.prefetch,
        "/cache/clear": cache.clear,
        "/cache/why": cache.why,
    }
    # llama-server's clients leave out the version.
    for path in (
        "/chat/completions",
        "/chat/completions/input_tokens",
        "/embeddings",
        "/responses",
    ):
        post[path] = post[f"/v1{path}"]
    found = [("GET", path, handler) for path, handler in get.items()]
    found += [("POST", path, handler) for path, handler in post.items()]
    found.append(("DELETE", "/v1/responses/{id}", responses.delete_response))
    routes = [Route(path, _endpoint(handler), methods=[verb]) for verb, path, handler in found]
    anything = ["GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"]
    return [*routes, Route("/{path:path}", _endpoint(_missing), methods=anything)]


def _endpoint(handler: Handler) -> Handler:
    """Wrap a handler with checks of key and origin, limits, error answers, and a log line."""

    async def endpoint(http: Request) -> Response:
        begin = time.perf_counter()
        http.state.tenant = ""
        origin: str | None = None
        try:
            origin = _check_origin(http)
            if http.method == "OPTIONS" and origin is not None:
                return Response(headers=_cors(origin))
            http.state.tenant = _authorize(http)
            async with http.app.state.bodies.reading(http) as http.state.body:
                response = await until_disconnect(http, handler)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.debug("request failed", exc_info=error)
            response = error_response(http, error)
        if origin is not None:
            response.headers.update(_cors(origin))
        response.background = BackgroundTask(_log, http, response.status_code, begin)
        return response

    return endpoint


# Keys and origins ---------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_origin(http: Request) -> str | None:
    """Return the origin of the web page that sends the request, if one does and is allowed.

    A server without keys refuses pages of other sites, including those whose host name
    resolves to loopback (DNS rebinding).

    Raises
    ------
    ApiError
        403: the host or the origin is not allowed.
    """
    state, origin = http.app.state, http.headers.get("origin")
    needs_loopback = state.tenants is None
    if needs_loopback and not is_loopback(http.url.hostname or ""):
        raise ApiError(
            403,
            f"the Host header is {http.url.hostname!r}: without API keys this server answers only "
            "requests to localhost",
        )
    if origin is None:
        return None
    try:
        is_local = is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        is_local = False
    if is_local or origin in state.origins or "*" in state.origins:
        return origin
    if needs_loopback:
        raise ApiError(403, f"pages of {origin} may not call this server: see --cors-origin")
    return None


def _cors(origin: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": "*, Authorization",
        "Vary": "Origin",
    }


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _authorize(http: Request) -> str:
    """Return the tenant of a request.

    Raises
    ------
    ApiError
        401: the key is missing or wrong.
    """
    tenants: dict[bytes, str] | None = http.app.state.tenants
    if tenants is None or http.url.path in PUBLIC:
        return ""
    given = http.headers.get("authorization", "")
    key = given[7:] if given[:7].lower() == "bearer " else http.headers.get("x-api-key", "")
    digest, found = _digest(key.encode("latin-1")), None
    for known, tenant in tenants.items():  # all of them, in constant time
        if hmac.compare_digest(known, digest):
            found = tenant
    if found is None:
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
    return found


# Logs and the page --------------------------------------------------------------------------------


async def _log(http: Request, status: int, begin: float) -> None:
    """Log a request when its answer is sent, with its reuse and why no more was reused."""
    ms, tenant = 1e3 * (time.perf_counter() - begin), http.state.tenant
    path = http.url.path.encode("unicode_escape").decode("ascii")
    line = f"{http.method} {path} {status} {ms:.0f} ms" + (f" [{tenant}]" if tenant else "")
    found: tuple[ReuseReport, int] | None = getattr(http.state, "log", None)
    if found is not None:
        reuse, n_new = found
        cached, n = reuse.n_tokens - reuse.evaluated, reuse.n_tokens
        line += f": {cached} of {n} tokens reused, {n_new} generated"
        line += f"; {reuse.reason}" if reuse.reason else ""
        facts: dict[str, Any] = {"time": time.time(), "path": path, "ms": ms, "prompt": n}
        facts.update(cached=cached, generated=n_new, reason=reuse.reason)
        http.app.state.recent.add(tenant, facts)
    failure: ApiError | None = getattr(http.state, "failure", None)
    if failure is not None:
        line += ": " + str(failure).encode("unicode_escape").decode("ascii")
    level = logging.DEBUG if http.url.path in WATCHED and status < 400 else logging.INFO
    log.log(level if status < 500 else logging.ERROR, "%s", line)


async def _missing(http: Request) -> Response:
    raise ApiError(404, f"{http.method} {http.url.path} is not an endpoint of this server")


async def page(http: Request) -> Response:
    """``GET /``: a page that shows the cache live."""
    text = resources.files("pykvcache.serve").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": "frame-ancestors 'none'"})
