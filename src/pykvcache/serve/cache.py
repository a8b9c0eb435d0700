"""What the server shows of its prefix cache, and how clients steer it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from pykvcache.serve.engine import Engine
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, body_of, models_of, tenant_of
from pykvcache.serve.prompts import chat_prompt, common_prefix
from pykvcache.serve.schemas import CacheRequest, WhyRequest, read

__all__ = ["Recent", "clear", "pin", "prefetch", "show", "why"]


class Recent:
    """The last requests: what was reused, and why not more."""

    def __init__(self, most: int = 200) -> None:
        self._requests: deque[tuple[str, dict[str, Any]]] = deque(maxlen=most)

    def add(self, tenant: str, facts: dict[str, Any]) -> None:
        """Remember a request of a tenant."""
        self._requests.append((tenant, facts))

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """Return the requests of a tenant, the oldest first."""
        return [facts for owner, facts in self._requests if owner == tenant]


async def show(http: Request) -> Response:
    """``GET /cache``: figures of each loaded model, the tree, and the last requests."""
    tenant = tenant_of(http)
    found = {}
    for name, engine in models_of(http).loaded.items():
        with engine.using():
            found[name] = await asyncio.to_thread(_facts, engine, tenant)
    recent: Recent = http.app.state.recent
    return Json({"time": time.time(), "models": found, "requests": recent.of(tenant)})


def _facts(engine: Engine, tenant: str) -> dict[str, Any]:
    llm = engine.llm
    return {
        "stats": asdict(llm.cache.stats()),
        "tree": str(llm.cache.tree(tenant)),
        "cells_used": llm.context.n_cells_used,
        "cells": llm.context.n_ctx,
        "running": llm.generator.n_running,
        "waiting": llm.generator.n_waiting,
    }


async def pin(http: Request) -> Response:
    """``POST /cache/pin``: keep a prefix, for ``ttl`` seconds."""
    return await _on_prefix(
        http,
        lambda engine, tokens, tenant, request: {
            "n_tokens": engine.llm.cache.pin(
                tokens, ttl=request.ttl or 3600.0, namespace=tenant
            ).n_tokens
        },
    )


async def prefetch(http: Request) -> Response:
    """``POST /cache/prefetch``: bring what the tiers have of a prefix to memory."""

    def run(
        engine: Engine, tokens: npt.NDArray[np.int32], tenant: str, _: CacheRequest
    ) -> dict[str, Any]:
        engine.llm.cache.prefetch(tokens, namespace=tenant).wait(60.0)
        return {"n_tokens": len(tokens)}

    return await _on_prefix(http, run)


async def clear(http: Request) -> Response:
    """``POST /cache/clear``: forget a branch, or all that the tenant has in memory."""
    request = read(await body_of(http) or b"{}", CacheRequest)
    if request.prompt is None and request.messages is None:
        async with models_of(http).engine(request.model) as engine:
            await asyncio.to_thread(engine.llm.cache.clear, tenant_of(http))
        return Json({"status": "ok"})

    def run(
        engine: Engine, tokens: npt.NDArray[np.int32], tenant: str, _: CacheRequest
    ) -> dict[str, Any]:
        engine.llm.cache.forget(tokens, namespace=tenant)
        return {"n_tokens": len(tokens)}

    return await _on_prefix(http, run)


async def _on_prefix(
    http: Request, run: Callable[[Engine, npt.NDArray[np.int32], str, CacheRequest], dict[str, Any]]
) -> Response:
    request = read(await body_of(http), CacheRequest)
    async with models_of(http).engine(request.model) as engine:
        tokens = _tokens(engine, request)
        return Json(await asyncio.to_thread(run, engine, tokens, tenant_of(http), request))


def _tokens(engine: Engine, request: CacheRequest) -> npt.NDArray[np.int32]:
    model = engine.llm.model
    if request.messages is not None:
        return chat_prompt(model, request.messages, tools=request.tools).tokens
    if isinstance(request.prompt, str):
        return model.tokenize(request.prompt, parse_special=True)
    if request.prompt:
        return np.array(request.prompt, np.int32)
    raise ApiError(400, "prompt or messages is missing", param="prompt")


async def why(http: Request) -> Response:
    """``POST /cache/why``: where two transcripts part, and what it costs."""
    request = read(await body_of(http), WhyRequest)
    async with models_of(http).engine(request.model) as engine:
        model = engine.llm.model
        before = chat_prompt(model, request.before, tools=request.tools)
        after = chat_prompt(model, request.after, tools=request.tools)
    same = common_prefix(before.tokens, after.tokens)
    message = sum(end <= same for end in after.boundaries)

    def around(tokens: npt.NDArray[np.int32]) -> str:
        return model.detokenize(tokens[same : same + 12], special=True)

    return Json(
        {
            "first_difference": same if same < len(after.tokens) else None,
            "message": message if same < len(after.tokens) else None,
            "shared_text_end": model.detokenize(
                after.tokens[max(same - 12, 0) : same], special=True
            ),
            "before": around(before.tokens),
            "after": around(after.tokens),
            "tokens_before": len(before.tokens),
            "tokens_after": len(after.tokens),
            "tokens_shared": same,
            "tokens_evaluated": len(after.tokens) - same,
        }
    )
