"""Statistics: where the tokens of a prompt came from, and why no more were reused."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykvcache._arguments import IntArray
from pykvcache._drawing import bar_html
from pykvcache.model import LlamaModel
from pykvcache.prefix.tiers.tier import TierStats
from pykvcache.sequence.text import piece_of, text_of

__all__ = ["BEFORE", "COUNTED", "CacheStats", "Difference", "Reason", "ReuseReport"]

#: The fields of a report that are summed.
COUNTED = ("n_tokens", "live", "ram", "disk", "remote", "evaluated")
#: Number of tokens shown before the one that differs.
BEFORE = 8


@dataclass(frozen=True)
class ReuseReport:
    """How many tokens of a prompt were reused when its sequence was created.

    ``live``, ``ram``, ``disk``, ``remote`` and ``evaluated`` sum to ``n_tokens``.

    Attributes
    ----------
    live
        Tokens forked from a live sequence.
    ram, disk, remote
        Tokens restored from RAM, from a folder, from a server.
    evaluated
        Tokens left to evaluate; at least 1 unless the logits after the prompt are cached.
    unshared
        Tokens from the activation of an adapter on, which the cache does not keep.
    first_difference
        Index of the first token that differs from the closest cached prompt. None if one of the
        two continues the other, if they are equal, or if no cached prompt shares the first token.
    reason
        Why no more was reused, in words.
    """

    n_tokens: int = 0
    live: int = 0
    ram: int = 0
    disk: int = 0
    remote: int = 0
    evaluated: int = 0
    first_difference: int | None = None
    reason: str = ""
    unshared: int = 0

    def plus(self, other: ReuseReport) -> ReuseReport:
        """Return the sums of two reports."""
        return ReuseReport(
            **{name: getattr(self, name) + getattr(other, name) for name in (*COUNTED, "unshared")}
        )

    def _repr_html_(self) -> str:
        parts = [(name, getattr(self, name)) for name in ("live", "ram", "disk", "remote")]
        return bar_html(
            f"{self.n_tokens} tokens", [*parts, ("to evaluate", self.evaluated)], self.reason
        )


@dataclass(frozen=True)
class CacheStats:
    """Totals of a `PrefixCache` since it was created.

    Attributes
    ----------
    requests, hits
        Number of requested sequences, and of those that reused at least one token.
    n_tokens, live, ram, disk, remote, evaluated
        Sums over their `ReuseReport`.
    ram_bytes, ram_blocks, ram_checkpoints
        Current contents of the RAM cache: bytes including bookkeeping, full blocks, and recurrent
        states.
    max_ram_bytes
        The budget, ``ram_bytes``.
    stored, removed
        Number of blocks stored and removed.
    tiers
        Counters of each tier, in the order of ``tiers``.
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


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that differs from the closest cached one."""

    model: LlamaModel
    tokens: IntArray  # the last tokens of the prompt up to it; a copy, since prompts may change
    at: int  # its position
    other: int  # the closest cached prompt's token there

    def __str__(self) -> str:
        at, own = self.at, int(self.tokens[-1])
        text = text_of(self.model, self.tokens[:-1])
        mine, theirs = piece_of(self.model, own), piece_of(self.model, self.other)
        if text is None or mine is None or theirs is None:
            return f"token {at}: {own} here, {self.other} in the closest cached prompt"
        place = f"token {at}" + (f", after {text[-40:]!r}" if text else "")
        return f"{place}: {mine!r} here, {theirs!r} in the closest cached prompt"


@dataclass
class Reason:
    """Why no more tokens of a prompt were reused; formatted when it is read."""

    n: int  # tokens of the prompt
    agrees: int  # length of its common prefix with the closest cached prompt
    reused: int  # tokens that need not be evaluated
    difference: Difference | None = None  # from the closest cached prompt
    part: str = ""  # "window" or "state": needed to resume besides attention cells
    known: int = 0  # tokens whose attention cells are cached
    obstacles: list[str] = field(default_factory=list)  # why cached tokens cannot be shared

    def __str__(self) -> str:
        reasons = [] if self.difference is None else [str(self.difference)]
        if self.reused < min(self.known, self.n - 1) and self.part:
            is_window = self.part == "window"
            if self.reused:
                last = "the last complete window ends" if is_window else "the last saved state is"
                last += f" at token {self.reused:,}"
            else:
                last = "no window is complete" if is_window else "no state was saved"
            reasons.append(f"{self.known:,} tokens are cached, but {last}")
        reasons += self.obstacles
        if reasons:
            return "; ".join(reasons)
        if self.agrees >= self.n:
            return "the whole prompt was cached"
        return "the rest is new" if self.agrees else "no cached prompt starts the same way"
