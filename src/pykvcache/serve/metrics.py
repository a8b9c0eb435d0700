"""``GET /metrics``: figures for Prometheus."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pykvcache.prefix.prometheus import CacheCollector
from pykvcache.serve.http import models_of

__all__ = ["metrics"]


async def metrics(http: Request) -> Response:
    """Return the figures of the caches and queues of all loaded models."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    running = Gauge(
        "pykvcache_requests_running", "Requests in the batch", ["model"], registry=registry
    )
    waiting = Gauge(
        "pykvcache_requests_waiting", "Requests in the queue", ["model"], registry=registry
    )
    cells = Gauge(
        "pykvcache_cells_used", "Cells of the context in use", ["model"], registry=registry
    )
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
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
