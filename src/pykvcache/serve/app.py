"""The server as an ASGI application: routes, keys, errors, logs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from pykvcache.prefix.report import ReuseReport
from pykvcache.serve import anthropic, cache, llama_server, openai, responses
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Handler, error_response, until_disconnect
from pykvcache.serve.metrics import metrics
from pykvcache.serve.models import Models

__all__ = ["make_app", "tenants_of"]

log = logging.getLogger("pykvcache.serve")

#: Paths that need no key.
PUBLIC = ("/", "/health", "/v1/health")


def tenants_of(keys: Mapping[str, str]) -> dict[bytes, str]:
    """Return tenants by the digests of their keys, so that keys are not kept.

    Parameters
    ----------
    keys
        Names of tenants by key. The name is the namespace of the prefix cache.
    """
    return {hashlib.sha256(key.encode()).digest(): name for key, name in keys.items()}


def make_app(
    models: Models,
    *,
    keys: Mapping[str, str] | None = None,
    max_body: int = 32 << 20,
) -> Starlette:
    """Return the application.

    Parameters
    ----------
    models
        What it serves; closed with it.
    keys
        Names of tenants by API key; None: no key is asked for.
    max_body
        Largest body of a request in bytes.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watcher = asyncio.ensure_future(models.watch_idle())
        try:
            yield
        finally:
            app.state.is_draining = True
            watcher.cancel()
            await models.close()

    app = Starlette(routes=_routes(), lifespan=lifespan)
    app.state.models = models
    app.state.tenants = None if keys is None else tenants_of(keys)
    app.state.max_body = max_body
    app.state.is_draining = False
    app.state.recent = cache.Recent()
    app.state.responses = responses.StoredResponses()
    app.state.diagnoses = anthropic.Diagnoses()
    return app


def _routes() -> list[Route]:
    get: dict[str, Handler] = {
        "/": page,
        "/health": llama_server.health,
        "/metrics": metrics,
        "/props": llama_server.props,
        "/cache": cache.show,
        "/v1/models": openai.list_models,
        "/v1/models/{id:path}": openai.show_model,
        "/v1/responses/{id}": responses.show_response,
    }
    post: dict[str, Handler] = {
        "/v1/chat/completions": openai.chat_completions,
        "/v1/completions": openai.completions,
        "/v1/embeddings": openai.embeddings,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/v1/responses": responses.create_response,
        "/completion": llama_server.completion,
        "/tokenize": llama_server.tokenize,
        "/detokenize": llama_server.detokenize,
        "/apply-template": llama_server.apply_template,
        "/cache/pin": cache.pin,
        "/cache/prefetch": cache.prefetch,
        "/cache/clear": cache.clear,
        "/cache/why": cache.why,
    }
    # llama-server's clients leave out the version.
    for path in ("/chat/completions", "/embeddings", "/responses"):
        post[path] = post[f"/v1{path}"]
    post["/completions"] = llama_server.completion
    get["/models"] = openai.list_models
    routes = [Route(path, _endpoint(handler), methods=["GET"]) for path, handler in get.items()]
    routes += [Route(path, _endpoint(handler), methods=["POST"]) for path, handler in post.items()]
    routes.append(
        Route("/v1/responses/{id}", _endpoint(responses.delete_response), methods=["DELETE"])
    )
    routes.append(
        Route("/{path:path}", _endpoint(_missing), methods=["GET", "POST", "DELETE", "PUT"])
    )
    return routes


def _endpoint(handler: Handler) -> Handler:
    """Return a handler with what all have in common: keys, errors, a line in the log."""

    async def endpoint(http: Request) -> Response:
        begin = time.perf_counter()
        http.state.tenant = ""
        try:
            http.state.tenant = _authorize(http)
            response = await until_disconnect(http, handler)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.debug("request failed", exc_info=error)
            response = error_response(http, error)
        response.background = _Log(http, response.status_code, begin)  # type: ignore[assignment]
        return response

    return endpoint


def _authorize(http: Request) -> str:
    """Return the tenant of a request.

    Raises
    ------
    ApiError
        401: keys are needed, and this is none.
    """
    tenants: dict[bytes, str] | None = http.app.state.tenants
    if tenants is None or http.url.path in PUBLIC:
        return ""
    given = http.headers.get("authorization", "")
    key = given[7:] if given[:7].lower() == "bearer " else http.headers.get("x-api-key", "")
    digest = hashlib.sha256(key.encode()).digest()
    for known, tenant in tenants.items():
        if hmac.compare_digest(known, digest):
            return tenant
    raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


class _Log:
    """Writes one line when an answer is sent: what was reused, and why not more."""

    def __init__(self, http: Request, status: int, begin: float) -> None:
        self._http, self._status, self._begin = http, status, begin

    async def __call__(self) -> None:
        http, seconds = self._http, time.perf_counter() - self._begin
        line = f"{http.method} {http.url.path} {self._status} {1e3 * seconds:.0f} ms"
        tenant: str = http.state.tenant
        if tenant:
            line += f" [{tenant}]"
        found: tuple[ReuseReport, int] | None = getattr(http.state, "log", None)
        if found is not None:
            reuse, new = found
            cached, n = reuse.n_tokens - reuse.evaluated, reuse.n_tokens
            line += f": {cached} of {n} tokens reused, {new} generated"
            if reuse.reason:
                line += f"; {reuse.reason}"
            facts: dict[str, Any] = {
                "time": time.time(),
                "path": http.url.path,
                "ms": 1e3 * seconds,
                "prompt": reuse.n_tokens,
                "cached": reuse.n_tokens - reuse.evaluated,
                "generated": new,
                "reason": reuse.reason,
            }
            http.app.state.recent.add(tenant, facts)
        failure: ApiError | None = getattr(http.state, "failure", None)
        if failure is not None:
            line += f": {failure}"
        log.log(logging.INFO if self._status < 500 else logging.ERROR, "%s", line)


async def _missing(http: Request) -> Response:
    raise ApiError(404, f"{http.method} {http.url.path} is no endpoint of this server")


async def page(http: Request) -> Response:
    """``GET /``: a page that shows the cache live."""
    text = resources.files("pykvcache.serve").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text)
