"""How a prompt begins: what is known of it, in use and in memory, and the plan that follows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pykvcache._convert import IntArray
from pykvcache.prefix.match import Match, Resume
from pykvcache.prefix.node import MemoryShape
from pykvcache.prefix.tree import PrefixTree
from pykvcache.sequence.ledger import common_prefix

if TYPE_CHECKING:
    from pykvcache.prefix.sequence import CachedSequence

__all__ = ["Begin", "Live", "LiveIndex", "plan_begin"]

Row = npt.NDArray[np.float32]


@dataclass(slots=True)
class Live:
    """What the sequences in use have of a prompt.

    Attributes
    ----------
    parent
        The one that most can be forked of; None where nothing can.
    n
        How many tokens that is.
    nearest
        The one that agrees most; None where none does.
    agrees
        How many tokens that is; it may not have evaluated all of them.
    """

    parent: CachedSequence | None = None
    n: int = 0
    nearest: CachedSequence | None = None
    agrees: int = 0


class LiveIndex:
    """The sequences of a cache that are in use, as long as they exist."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[CachedSequence]] = {}

    def add(self, sequence: CachedSequence) -> None:
        """Add a sequence; one that is collected leaves by itself."""
        key = id(sequence)
        self._refs[key] = weakref.ref(sequence, partial(self._refs.pop, key))

    def discard(self, sequence: CachedSequence) -> None:
        """Remove a sequence."""
        self._refs.pop(id(sequence), None)

    def remove(self, namespace: str | None) -> list[CachedSequence]:
        """Remove and return those of a namespace, or all."""
        gone = [one for one in self if namespace is None or one.namespace == namespace]
        for one in gone:
            self.discard(one)
        return gone

    def __contains__(self, sequence: object) -> bool:
        return id(sequence) in self._refs

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[CachedSequence]:
        for ref in list(self._refs.values()):
            if (sequence := ref()) is not None:
                yield sequence

    def look_up(self, tokens: IntArray, namespace: str, new: CachedSequence) -> Live:
        """Return what those of a namespace have of a prompt, but for a new one."""
        found = Live()
        fresh_agrees = 0
        for other in self:
            if other is new or other.namespace != namespace or other.is_closed:
                continue
            cells = other.cells
            same = common_prefix(cells.ledger.part(0, len(cells.ledger)), tokens)
            fresh = min(same, cells.n_fresh)
            if (same, fresh) > (found.agrees, fresh_agrees):
                found.nearest, found.agrees, fresh_agrees = other, same, fresh
            if fresh > found.n and (n := cells.reachable(fresh)) > found.n:
                found.parent, found.n = other, n
        return found


@dataclass(slots=True)
class Begin:
    """What a sequence begins with.

    Attributes
    ----------
    n
        Tokens that it holds from the beginning.
    usable
        How many of these need no evaluation to give the next logits.
    parent
        The sequence that it is forked from; None where it is made of blocks, or of nothing.
    row
        The logits after the prompt, where they are known.
    """

    n: int
    usable: int
    parent: CachedSequence | None = None
    row: Row | None = None


def plan_begin(
    tree: PrefixTree, match: Match, live: Live, n_tokens: int, live_row: Row | None
) -> tuple[Begin, Resume]:
    """Return how a prompt begins, and what of the tree it uses and keeps; changes nothing.

    Parameters
    ----------
    tree
        What is in memory.
    match
        What it knows of the prompt.
    live
        What sequences in use have of it.
    n_tokens
        Tokens of the prompt.
    live_row
        The logits after the whole prompt, where ``live.parent`` has them.
    """
    row = _row(match, n_tokens)
    # Logits are made by a decode: the last token is evaluated where they are not known.
    resume = tree.resume(match, n_tokens if row is not None else n_tokens - 1)
    if row is not None and resume.n < n_tokens:
        row, resume = None, tree.resume(match, n_tokens - 1)
    stored = Begin(resume.n, resume.n, row=row)
    usable = _usable(tree.shape, live, n_tokens, live_row)
    if live.parent is None or usable < stored.usable or not usable:
        return stored, resume
    whole = live.n == n_tokens
    return Begin(live.n, usable, live.parent, live_row if whole else None), resume


def _row(match: Match, n_tokens: int) -> Row | None:
    """Return the logits after a prompt that is known to its end."""
    end = match.end_at(n_tokens)
    return None if end is None else end.row


def _usable(shape: MemoryShape, live: Live, n_tokens: int, row: Row | None) -> int:
    """Return how many tokens of a fork need no evaluation to give the next logits."""
    if live.n < n_tokens or row is not None:
        return live.n
    assert live.parent is not None
    return live.parent.cells.reachable(n_tokens - 1)
