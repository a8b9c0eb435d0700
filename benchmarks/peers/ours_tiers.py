"""pykvcache: requests of the group *tiers*."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.models import _tests
from benchmarks.peers.ours_many import Many
from benchmarks.peers.primitives import Answer
from pykvcache import LlamaSequence, PrefixCache
from pykvcache.prefix.cache import core_of
from pykvcache.prefix.tiers.tier import EvaluationTime


class Tiered(Many):
    """A prefix cache with a tier and an empty memory."""

    _time: EvaluationTime | None = None
    _cache: PrefixCache | None = None
    _tier: Any = None

    def do_tier(self, where: str | None, n: int) -> Answer:
        """Evaluate a prompt of n + 1 tokens, and write it to a tier; None for no tier."""
        self.clear()
        self.do_tier_close()
        self._tier = where
        cache = self._open_cache()
        start = time.perf_counter()
        with cache.sequence(self.array(0, n + 1)) as sequence:
            sequence.logits()
            seconds = time.perf_counter() - start
        cache.flush(120)
        core_of(cache).link.evaluation.note(0, n + 1, seconds)  # by default only with tiers
        self._time = core_of(cache).link.evaluation
        self._cache = cache
        self._forget()
        return {"seconds": seconds}

    def _open_cache(self) -> PrefixCache:
        tiers = [] if self._tier is None else [self._tier]
        cache = PrefixCache(self.context, tiers=tiers)
        if self._time is not None:
            core_of(cache).link.evaluation = self._time  # as learned by a running server
        return cache

    def _forget(self) -> None:
        if self._tier is not None and self._cache is not None:
            self._cache.clear()

    def do_tier_first(self, n: int, cold: bool = False) -> Answer:
        """Return the seconds to the logits of a prompt of n tokens from the tier and a new one."""
        if cold:
            drop_page_cache(Path(self._tier))
        cache = self._cache
        if cache is None:
            raise ValueError("no tier is open")
        tokens = self.array(0, n + 1)
        tokens[n] += 1  # a new last token
        start = time.perf_counter()
        sequence = cache.sequence(tokens)
        sequence.logits()
        seconds = time.perf_counter() - start
        report = sequence.reuse
        sequence.close(keep=0)
        self._forget()
        return {"seconds": seconds, "evaluated": report.evaluated}

    def do_tier_last(self, n: int, again: int = 5) -> Answer:
        """Return the seconds to decode only the last token, with all others in the cells."""
        self.do_tier_close()
        took = []
        with LlamaSequence(self.context, self.array(0, n + 1)) as sequence:
            sequence.logits()
            for turn in range(again):
                sequence.truncate(n)
                sequence.append([int(self.array(n + 1 + turn, 1)[0])])
                start = time.perf_counter()
                sequence.logits()
                took.append(time.perf_counter() - start)
        return {"seconds": statistics.median(took)}

    def do_tier_close(self) -> Answer:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        return {}

    def do_tier_slow(self, latency: float, bandwidth: float, n: int) -> Answer:
        """Return the time of a prompt with an artificially slow folder, relative to evaluating."""
        _tests()
        from pykvcache.prefix.stores import FolderStore

        self.do_tier_close()
        from tiers.slow import SlowStore

        slow = SlowStore(FolderStore(self._tier), latency, bandwidth)
        tokens = self.array(0, n + 1)
        cache = PrefixCache(self.context, tiers=[slow])
        if self._time is not None:
            core_of(cache).link.evaluation = self._time
        alone = self._alone(tokens)
        start = time.perf_counter()
        sequence = cache.sequence(tokens)
        sequence.logits()
        seconds = time.perf_counter() - start
        evaluated = sequence.reuse.evaluated
        sequence.close(keep=0)
        slow.closing.set()
        cache.close()
        # Before and after, because the speed of a shared machine varies.
        alone = (alone + self._alone(tokens)) / 2
        return {"seconds": seconds / alone, "evaluated": evaluated}

    def _alone(self, tokens: Any) -> float:
        start = time.perf_counter()
        with LlamaSequence(self.context, tokens) as plain:
            plain.logits()
        return time.perf_counter() - start

    def do_tier_write(self, n: int, steps: int, pairs: int) -> Answer:
        """Return the seconds per token with and without write-behind, in turns."""
        took: dict[str, list[float]] = {"written behind": [], "no tier": []}
        for pair in range(pairs):
            for again in range(2):
                busy = (pair + again) % 2 > 0
                took["written behind" if busy else "no tier"].append(self._write(n, steps, busy))
        return dict(took)

    def _write(self, n: int, steps: int, busy: bool) -> float:
        self.do_tier_close()
        shutil.rmtree(self._tier, ignore_errors=True)
        cache = PrefixCache(self.context, tiers=[self._tier] if busy else [])
        sequence = cache.sequence(self.array(n, 64))
        sequence.logits()
        with cache.sequence(self.array(0, n)) as other:
            other.evaluate()
        start = time.perf_counter()
        for _ in range(steps):
            next(sequence.generate(1, self.sampler(1)))
        seconds = time.perf_counter() - start
        sequence.close(keep=0)
        cache.close()
        return seconds / steps


def drop_page_cache(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*.block"):
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
