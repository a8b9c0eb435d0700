"""Endpoints that show the prefix cache, and let clients steer it."""

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

from pykvcache.prefix.prometheus import CacheCollector
from pykvcache.sequence.ledger import common_prefix
from pykvcache.serve.engine import Engine
from pykvcache.serve.errors import ApiError
from pykvcache.serve.http import Json, models_of, read, tenant_of
from pykvcache.serve.prompts import chat_prompt
from pykvcache.serve.schemas import CacheRequest, WhyRequest, seconds

__all__ = ["Recent", "clear", "metrics", "pin", "prefetch", "show", "why"]

#: Most characters of the tree.
MOST_CHARACTERS = 100_000
#: How long `prefetch` waits, in seconds. A longer prefetch continues in the background.
PREFETCH_SECONDS = 10.0


class Recent:
    """The latest requests, with their reused tokens and why no more were reused."""

    def __init__(self, most: int = 200) -> None:
        self._requests: deque[tuple[str, dict[str, Any]]] = deque(maxlen=most)

    def add(self, tenant: str, facts: dict[str, Any]) -> None:
        """Remember a request of a tenant."""
        self._requests.append((tenant, facts))

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """Return the requests of a tenant, the oldest first."""
        return [facts for owner, facts in self._requests if owner == tenant]


async def show(http: Request) -> Response:
    """``GET /cache``: figures of each loaded model, the tree, and the latest requests."""
    tenant = tenant_of(http)
    found = {}
    for name, engine in models_of(http).loaded.items():
        with engine.using():
            found[name] = await asyncio.to_thread(_facts, engine, tenant)
    recent: Recent = http.app.state.recent
    return Json({"time": time.time(), "models": found, "requests": recent.of(tenant)})


def _facts(engine: Engine, tenant: str) -> dict[str, Any]:
    llm = engine.llm
    tree = str(llm.cache.tree(tenant))
    return {
        "stats": asdict(llm.cache.stats()),
        "tree": tree if len(tree) <= MOST_CHARACTERS else tree[:MOST_CHARACTERS] + "\n...",
        "cells_used": llm.context.n_cells_used,
        "cells": llm.context.n_ctx,
        "running": llm.generator.n_running,
        "waiting": llm.generator.n_waiting,
    }


async def pin(http: Request) -> Response:
    """``POST /cache/pin``: keep a prefix, for ``ttl`` seconds."""
    request, tenant = read(http, CacheRequest), tenant_of(http)
    ttl = 3600.0 if request.ttl is None else seconds(request.ttl)
    return await _on_prefix(
        http, request, lambda engine, tokens: engine.pins.pin(tokens, ttl, tenant)
    )


async def prefetch(http: Request) -> Response:
    """``POST /cache/prefetch``: load a prefix's blocks from the tiers into memory."""
    request, tenant = read(http, CacheRequest), tenant_of(http)
    async with models_of(http).engine(request.model) as engine:
        tokens = await asyncio.to_thread(_tokens, engine, request)
        one = await asyncio.to_thread(engine.llm.cache.prefetch, tokens, namespace=tenant)
        until = time.monotonic() + PREFETCH_SECONDS
        while not one.is_done and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return Json({"n_tokens": one.n_tokens, "is_done": one.is_done})


async def clear(http: Request) -> Response:
    """``POST /cache/clear``: drop a prefix and its continuations, or all of the tenant's blocks."""
    request, tenant = read(http, CacheRequest, default=b"{}"), tenant_of(http)
    if request.prompt is None and request.messages is None:
        async with models_of(http).engine(request.model) as engine:
            await asyncio.to_thread(engine.pins.clear, tenant)
            await asyncio.to_thread(engine.llm.cache.clear, tenant)
        return Json({"status": "ok"})

    def forget(engine: Engine, tokens: npt.NDArray[np.int32]) -> int:
        engine.pins.clear(tenant, tokens.tobytes())
        engine.llm.cache.forget(tokens, namespace=tenant)
        return len(tokens)

    return await _on_prefix(http, request, forget)


async def _on_prefix(
    http: Request, request: CacheRequest, run: Callable[[Engine, npt.NDArray[np.int32]], int]
) -> Response:
    async with models_of(http).engine(request.model) as engine:
        n = await asyncio.to_thread(lambda: run(engine, _tokens(engine, request)))
    return Json({"n_tokens": n})


def _tokens(engine: Engine, request: CacheRequest) -> npt.NDArray[np.int32]:
    if request.messages is not None:
        return chat_prompt(engine, request.messages, tools=request.tools).tokens
    if isinstance(request.prompt, str):
        return engine.llm.model.tokenize(request.prompt, parse_special=True)
    if request.prompt:
        return np.array(request.prompt, np.int32)
    raise ApiError(400, "prompt or messages is missing", param="prompt")


async def why(http: Request) -> Response:
    """``POST /cache/why``: where two transcripts diverge, and the tokens to evaluate."""
    request = read(http, WhyRequest)
    async with models_of(http).engine(request.model) as engine:
        return Json(await asyncio.to_thread(_compare, engine, request))


def _compare(engine: Engine, request: WhyRequest) -> dict[str, Any]:
    model = engine.llm.model
    before = chat_prompt(engine, request.before, tools=request.tools).tokens
    whole = chat_prompt(engine, request.after, tools=request.tools)
    after = whole.tokens
    same = common_prefix(before, after)
    is_prefix = same == len(after)

    def text(tokens: npt.NDArray[np.int32]) -> str:
        return model.detokenize(tokens, special=True)

    return {
        "first_difference": None if is_prefix else same,
        "message": None if is_prefix else sum(end <= same for end in whole.ends),
        "shared_text_end": text(after[max(same - 12, 0) : same]),
        "before": text(before[same : same + 12]),
        "after": text(after[same : same + 12]),
        "tokens_before": len(before),
        "tokens_after": len(after),
        "tokens_shared": same,
        "tokens_evaluated": len(after) - same,
    }


async def metrics(http: Request) -> Response:
    """``GET /metrics``: figures of the caches and queues of all loaded models, for Prometheus."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(f"pykvcache_{name}", text, ["model"], registry=registry)

    running = gauge("requests_running", "Requests in the batch")
    waiting = gauge("requests_waiting", "Requests in the queue")
    cells = gauge("cells_used", "Cells of the context in use")
    collector: CacheCollector | None = None
    for name, engine in models_of(http).loaded.items():
        llm = engine.llm
        running.labels(name).set(llm.generator.n_running)
        waiting.labels(name).set(llm.generator.n_waiting)
        cells.labels(name).set(llm.context.n_cells_used)
        if collector is None:
            collector = CacheCollector(llm.cache, name)
        else:
            collector.add(llm.cache, name)
    if collector is not None:
        registry.register(collector)
    data = await asyncio.to_thread(generate_latest, registry)
    return Response(data, media_type=CONTENT_TYPE_LATEST)
