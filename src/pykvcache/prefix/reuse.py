"""Where the tokens of a sequence came from, and why there was no more."""

from __future__ import annotations

from dataclasses import dataclass

from pykvcache._drawing.html import bar_html
from pykvcache.prefix.tiers.tier import TierStats

__all__ = ["CacheStats", "ReuseReport"]


@dataclass(frozen=True)
class ReuseReport:
    """How much of a prompt was known when its sequence was made.

    What tiers bring while the prompt is evaluated counts, too: it is there after that.
    ``live``, ``ram``, ``disk``, ``remote`` and ``evaluated`` sum to ``n_tokens``.

    Attributes
    ----------
    n_tokens
        Tokens of the prompt.
    live
        Taken from a sequence that is in use, by a fork.
    ram, disk, remote
        Put together of blocks of the cache's memory, of a folder, of a server.
    evaluated
        What is left to evaluate; at least 1 where the logits after the prompt are not known.
    first_difference
        First token in which the prompt differs from the nearest known one; None where one goes on
        where the other ends, on a repeat, and where nothing begins like it.
    reason
        Why no more was known, in words.
    """

    n_tokens: int = 0
    live: int = 0
    ram: int = 0
    disk: int = 0
    remote: int = 0
    evaluated: int = 0
    first_difference: int | None = None
    reason: str = ""

    def plus(self, other: ReuseReport, sign: int = 1) -> ReuseReport:
        """Return the sums of both, or the differences."""
        return ReuseReport(
            self.n_tokens + sign * other.n_tokens,
            live=self.live + sign * other.live,
            ram=self.ram + sign * other.ram,
            disk=self.disk + sign * other.disk,
            remote=self.remote + sign * other.remote,
            evaluated=self.evaluated + sign * other.evaluated,
        )

    def _repr_html_(self) -> str:
        parts = [(name, getattr(self, name)) for name in ("live", "ram", "disk", "remote")]
        return bar_html(
            f"{self.n_tokens} tokens", [*parts, ("to evaluate", self.evaluated)], self.reason
        )


@dataclass(frozen=True)
class CacheStats:
    """Figures of a `PrefixCache` since it was made.

    Attributes
    ----------
    requests
        Sequences that were asked for.
    n_tokens, live, ram, disk, remote, evaluated
        Sums over their `ReuseReport`.
    ram_bytes, ram_blocks, ram_checkpoints
        What is kept now: bytes with the cache's own accounts, blocks, and states of windows and
        recurrent memories.
    max_ram_bytes
        The budget.
    stored, removed
        Blocks that were stored and dropped.
    tiers
        Of each tier, the nearest first.
    hits
        Of the requests, those of which anything was known.
    """

    requests: int
    n_tokens: int
    live: int
    ram: int
    disk: int
    remote: int
    evaluated: int
    ram_bytes: int
    ram_blocks: int
    ram_checkpoints: int
    max_ram_bytes: int
    stored: int
    removed: int
    tiers: tuple[TierStats, ...] = ()
    hits: int = 0
