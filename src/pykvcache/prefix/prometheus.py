"""Metrics of a cache for Prometheus; needs ``pykvcache[prometheus]``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pykvcache.prefix.cache import PrefixCache
from pykvcache.prefix.reuse import CacheStats

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["CacheCollector"]

_GAUGES = {
    "ram_bytes": "Bytes that the cache keeps in memory, its accounts included",
    "max_ram_bytes": "The budget of ram_bytes",
    "ram_blocks": "Blocks in memory",
    "ram_checkpoints": "States of windows and recurrent memories that are in memory",
}
_COUNTERS = {
    "requests": "Sequences that were asked for",
    "hits": "Sequences that began with tokens that were known",
    "stored": "Blocks that came into memory",
    "removed": "Blocks that left memory",
}
_SOURCES = ("live", "ram", "disk", "remote", "evaluated")


class CacheCollector:
    """What `PrefixCache.stats` says, whenever Prometheus asks.

    ``pykvcache_requests_total``, ``_hits_total``, ``_stored_total``, ``_removed_total``,
    ``_prompt_tokens_total`` by ``source`` (live, ram, disk, remote, evaluated), and the gauges
    ``pykvcache_ram_bytes``, ``_max_ram_bytes``, ``_ram_blocks`` and ``_ram_checkpoints``.
    Registering a collector does not keep the cache alive; a cache that is closed has no metrics.

    Parameters
    ----------
    cache
        Whose.
    name
        The label ``cache`` of all of them, to tell several caches of one process apart.

    Raises
    ------
    ImportError
        prometheus-client is not installed.

    Examples
    --------
    ::

        from prometheus_client import REGISTRY, start_http_server

        REGISTRY.register(CacheCollector(cache))
        start_http_server(9000)
    """

    def __init__(self, cache: PrefixCache, name: str = "") -> None:
        try:
            import prometheus_client.core
        except ImportError as error:
            raise ImportError(
                "metrics need prometheus-client: pip install 'pykvcache[prometheus]'"
            ) from error
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        self._core: Any = prometheus_client.core
        self._cache = weakref.ref(cache)
        self._name = name
        self._highest: dict[str, int] = {}

    def describe(self) -> list[Metric]:
        """Return nothing: several caches have metrics of the same names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; nothing once the cache is closed or gone."""
        cache = self._cache()
        if cache is not None and not cache.is_closed:
            yield from self._metrics(cache.stats())

    def _metrics(self, stats: CacheStats) -> Iterator[Metric]:
        core, label = self._core, [self._name]
        for field, text in _COUNTERS.items():
            counter = core.CounterMetricFamily(f"pykvcache_{field}", text, labels=["cache"])
            counter.add_metric(label, self._counted(stats, field))
            yield counter
        tokens = core.CounterMetricFamily(
            "pykvcache_prompt_tokens", "Tokens of prompts, by origin", labels=["cache", "source"]
        )
        for source in _SOURCES:
            tokens.add_metric([*label, source], self._counted(stats, source))
        yield tokens
        for field, text in _GAUGES.items():
            gauge = core.GaugeMetricFamily(f"pykvcache_{field}", text, labels=["cache"])
            gauge.add_metric(label, getattr(stats, field))
            yield gauge

    def _counted(self, stats: CacheStats, field: str) -> int:
        """Return a count that never falls: a waiting sequence may get tokens elsewhere later."""
        value: int = max(self._highest.get(field, 0), getattr(stats, field))
        self._highest[field] = value
        return value
