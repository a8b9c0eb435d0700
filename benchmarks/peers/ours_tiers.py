"""pykvcache: what the group *tiers* asks for."""

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
from pykvcache.prefix.tiers.cost_model import EvaluationTime


class Tiered(Many):
    """A prefix cache with a tier, and nothing in its memory."""

    _time: EvaluationTime | None = None
    _cache: PrefixCache | None = None
    _tier: Any = None

    def do_tier(self, where: str | None, n: int) -> Answer:
        """Evaluate a prompt of n tokens and one, and let a tier have it; None for no tier."""
        self.clear()
        self.do_tier_close()
        self._tier = where
        cache = self._open_cache()
        start = time.perf_counter()
        with cache.sequence(self.array(0, n + 1)) as sequence:
            sequence.logits()
            seconds = time.perf_counter() - start
        cache.flush(120)
        core_of(cache).link.evaluation.note(
            0, n + 1, seconds
        )  # of its own accord one without tiers does not
        self._time = core_of(cache).link.evaluation
        self._cache = cache
        self._forget()
        return {"seconds": seconds}

    def _open_cache(self) -> PrefixCache:
        tiers = [] if self._tier is None else [self._tier]
        cache = PrefixCache(self.context, tiers=tiers)
        if self._time is not None:
            core_of(cache).link.evaluation = self._time  # a server has learned it long ago
        return cache

    def _forget(self) -> None:
        if self._tier is not None and self._cache is not None:
            self._cache.clear()

    def do_tier_first(self, n: int, cold: bool = False) -> Answer:
        """Seconds to the logits after a prompt of n tokens that the tier has, and one more."""
        if cold:
            drop_page_cache(Path(self._tier))
        cache = self._cache
        if cache is None:
            raise ValueError("no tier is open")
        tokens = self.array(0, n + 1)
        tokens[n] += 1  # of the last token nothing is known
        start = time.perf_counter()
        sequence = cache.sequence(tokens)
        sequence.logits()
        seconds = time.perf_counter() - start
        report = sequence.reuse
        sequence.close(keep=0)
        self._forget()
        return {"seconds": seconds, "evaluated": report.evaluated}

    def do_tier_last(self, n: int, again: int = 5) -> Answer:
        """Seconds to decode the last token alone: all before it lies in the cells."""
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
        """End the cache in memory."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        return {}

    def do_tier_slow(self, latency: float, bandwidth: float, n: int) -> Answer:
        """How long a prompt takes with a real folder made slow, beside evaluating it alone."""
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
        # Before and after: a machine that others use becomes slower and faster all the time.
        alone = (alone + self._alone(tokens)) / 2
        return {"seconds": seconds / alone, "evaluated": evaluated}

    def _alone(self, tokens: Any) -> float:
        start = time.perf_counter()
        with LlamaSequence(self.context, tokens) as plain:
            plain.logits()
        return time.perf_counter() - start

    def do_tier_write(self, n: int, steps: int, pairs: int) -> Answer:
        """Seconds per token while blocks are written behind, and while nothing is, in turns."""
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
    """Let the system forget what it holds of the files."""
    for path in folder.rglob("*.block"):
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
