"""Why no more of a prompt was known, put into words when somebody asks."""

from __future__ import annotations

from functools import cached_property

from pykvcache._convert import IntArray
from pykvcache.model import LlamaModel
from pykvcache.sequence.ledger import Ledger
from pykvcache.sequence.text import piece_of, text_of

__all__ = ["Difference", "Reason"]

#: Tokens of text that are shown before the one that differs.
_BEFORE = 8


class Difference:
    """The first token of a prompt that differs from the nearest known one.

    Takes what it needs at once: the prompt may be edited later, and the other one be gone.
    """

    def __init__(self, model: LlamaModel, ledger: Ledger, at: int, other: int) -> None:
        self.model, self.at, self.other = model, at, other
        self.tokens: IntArray = ledger.part(max(0, at - _BEFORE), at + 1).copy()

    def __str__(self) -> str:
        at, own = self.at, int(self.tokens[-1])
        text = text_of(self.model, self.tokens[:-1])
        mine, theirs = piece_of(self.model, own), piece_of(self.model, self.other)
        if text is None or mine is None or theirs is None:
            return f"token {at} is {own}: the nearest known has {self.other}"
        return f"token {at}, after {text[-40:]!r}, is {mine!r}: the nearest known has {theirs!r}"


class Reason:
    """Why a prompt of n tokens shares so many and no more.

    Parameters
    ----------
    n
        Tokens of the prompt.
    agrees
        How many of them the nearest prompt has.
    reused
        How many of them need not be evaluated.
    difference
        Where it goes on otherwise; None where it does not.
    """

    def __init__(self, n: int, agrees: int, reused: int, difference: Difference | None) -> None:
        self.n, self.agrees, self.reused, self.difference = n, agrees, reused, difference
        self.known = agrees
        self.held: str | None = None

    def pends(self, fresh: int, stored: int, shifted_at: int | None) -> None:
        """Say that the nearest is a sequence in use that holds few of them; others are stored."""
        self.known = max(fresh, stored)
        self.held = f"{'holds' if shifted_at is None else 'held before a discard'} {fresh}"

    @cached_property
    def text(self) -> str:
        """Return the reason in words."""
        reasons = [] if self.difference is None else [str(self.difference)]
        if self.held is not None:
            reasons.append(
                f"{self.agrees} tokens are those of a sequence in use, which {self.held} of them"
            )
        if self.reused < min(self.known, self.n - 1):
            reasons.append(
                f"{self.known} tokens are known, and a checkpoint of the memory's other parts only "
                f"at {self.reused}"
            )
        if reasons:
            return "; ".join(reasons)
        if self.agrees >= self.n:
            return "all of it was known"
        return "the rest is new" if self.agrees else "nothing that begins like it is known"
