"""Metrics of a cache for Prometheus; needs the extra ``prometheus``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pykvcache._arguments import as_text
from pykvcache.errors import ArgumentError, how_to_install, shown
from pykvcache.prefix.cache import PrefixCache
from pykvcache.prefix.report import CacheStats

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["CacheCollector"]

_GAUGES = {
    "ram_bytes": "Bytes used in RAM, including bookkeeping",
    "max_ram_bytes": "The budget of ram_bytes",
    "ram_blocks": "Blocks in RAM",
    "ram_checkpoints": "Recurrent states in RAM",
}
_COUNTERS = {
    "requests": "Requests",
    "hits": "Sequences that reused at least one token",
    "stored": "Blocks stored in RAM",
    "removed": "Blocks removed from RAM",
}
_SOURCES = ("live", "ram", "disk", "remote", "evaluated")


class CacheCollector:
    """A Prometheus collector of `PrefixCache.stats`.

    ``pykvcache_requests_total``, ``_hits_total``, ``_stored_total``, ``_removed_total``,
    ``_prompt_tokens_total`` by ``source`` (live, ram, disk, remote, evaluated), and the gauges
    ``pykvcache_ram_bytes``, ``_max_ram_bytes``, ``_ram_blocks`` and ``_ram_checkpoints``.
    A collector does not keep its caches alive; a closed cache has no metrics.

    Parameters
    ----------
    cache
        The cache to export.
    name
        The label ``cache`` of its metrics, to distinguish several caches of one process.

    Examples
    --------
    ::

        from prometheus_client import REGISTRY, start_http_server

        collector = CacheCollector(cache, "chat")
        collector.add(other_cache, "search")
        REGISTRY.register(collector)
        start_http_server(9000)
    """

    def __init__(self, cache: PrefixCache, name: str = "") -> None:
        try:
            import prometheus_client.core
        except ImportError as error:
            raise ImportError(
                f"metrics need prometheus-client: {how_to_install('prometheus')}"
            ) from error
        self._core: Any = prometheus_client.core
        self._caches: dict[str, _Source] = {}
        self.add(cache, name)

    def add(self, cache: PrefixCache, name: str) -> None:
        """Also export another cache, under a label that no other open cache has.

        A registry accepts only one `CacheCollector`.
        """
        if not isinstance(cache, PrefixCache):
            raise TypeError(f"cache must be a PrefixCache, not {type(cache).__name__}")
        known = self._caches.get(as_text(name, "name"))
        if known is not None and known.stats() is not None:
            raise ArgumentError(f"name {shown(name)} is that of another cache", "name", name)
        # The dict is replaced, not changed: another thread may be collecting.
        self._caches = {**self._caches, name: _Source(cache)}

    def describe(self) -> list[Metric]:
        """Return the metrics without samples, by which a registry detects a second collector."""
        return list(self._metrics([]))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the open caches."""
        found = [(name, one, one.stats()) for name, one in self._caches.items()]
        if some := [(name, one, stats) for name, one, stats in found if stats is not None]:
            yield from self._metrics(some)

    def _metrics(self, found: list[tuple[str, _Source, CacheStats]]) -> Iterator[Metric]:
        core = self._core
        for field, text in _COUNTERS.items():
            counter = core.CounterMetricFamily(f"pykvcache_{field}", text, labels=["cache"])
            for name, one, stats in found:
                counter.add_metric([name], one.counted(stats, field))
            yield counter
        tokens = core.CounterMetricFamily(
            "pykvcache_prompt_tokens", "Tokens of prompts, by origin", labels=["cache", "source"]
        )
        for name, one, stats in found:
            for source in _SOURCES:
                tokens.add_metric([name, source], one.counted(stats, source))
        yield tokens
        for field, text in _GAUGES.items():
            gauge = core.GaugeMetricFamily(f"pykvcache_{field}", text, labels=["cache"])
            for name, _, stats in found:
                gauge.add_metric([name], getattr(stats, field))
            yield gauge


class _Source:
    """A cache, and the highest counts exported so far."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = weakref.ref(cache)
        self._highest: dict[str, int] = {}

    def stats(self) -> CacheStats | None:
        """Return its statistics; None once it is closed or gone."""
        cache = self._cache()
        return None if cache is None or cache.is_closed else cache.stats()

    def counted(self, stats: CacheStats, field: str) -> int:
        """Return a count that never decreases, although waiting sequences may be counted anew."""
        value: int = max(self._highest.get(field, 0), getattr(stats, field))
        self._highest[field] = value
        return value
