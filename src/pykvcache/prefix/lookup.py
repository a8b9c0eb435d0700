"""Finds the longest cached prefix of a prompt, and decides whether to fork or restore it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import IntArray
from pykvcache.model import LlamaModel
from pykvcache.prefix.block_cache import BlockCache
from pykvcache.prefix.block_hash import space_of
from pykvcache.prefix.memory import Cells
from pykvcache.prefix.node import Kind, Match, Resume
from pykvcache.prefix.report import BEFORE, Difference, Reason, ReuseReport
from pykvcache.prefix.sequence import Request
from pykvcache.prefix.tree import PrefixTree
from pykvcache.sequence.cells import PutBack
from pykvcache.sequence.ledger import common_prefix

__all__ = ["Begin", "Live", "PromptLookup", "look_up", "plan_begin"]

Row = npt.NDArray[np.float32]

_ADAPTERS = "adapters or control vectors"


@dataclass(slots=True)
class Live:
    """The live sequences that share most with a prompt."""

    parent: Request | None = None  # the sequence from which the most tokens can be forked
    n: int = 0  # their number
    nearest: Request | None = None  # the sequence with the longest common prefix
    agrees: int = 0  # its length, evaluated or not


def look_up(live: Iterable[Request], tokens: IntArray, namespace: str, new: Request) -> Live:
    """Return the live sequences that share most with a new request, in its namespace."""
    found = Live()
    fresh_agrees = 0
    for other in live:
        if other is new or other.namespace != namespace:
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
    """Where a sequence starts: forked from a live one, or else restored from the tree."""

    parent: Request | None  # the sequence to fork, and after how many tokens
    n: int
    resume: Resume  # the part of the tree that it uses and holds
    row: Row | None = None  # the logits after the prompt, if they are cached


def plan_begin(tree: PrefixTree, match: Match, live: Live, n_tokens: int) -> Begin:
    """Return where a prompt starts, given its matches in RAM and in live sequences."""
    # The last token is evaluated to get its logits, unless they are cached.
    resume, row = tree.resume(match, n_tokens - 1), None
    if match.n == n_tokens and (known := match.end_at(n_tokens).row) is not None:
        whole = tree.resume(match, n_tokens)
        if whole.n == n_tokens:
            resume, row = whole, known
    if (parent := live.parent) is not None:
        n_usable, own_row = live.n, None
        if live.n == n_tokens and (own_row := parent.row_at(n_tokens)) is None:
            n_usable = parent.cells.reachable(n_tokens - 1)
        if n_usable and n_usable >= resume.n:
            return Begin(parent, live.n, resume, own_row)
    return Begin(None, 0, resume, row)


class PromptLookup:
    """Starts sequences from the longest cached prefix; the caller holds the lock."""

    def __init__(
        self,
        model: LlamaModel,
        blocks: BlockCache,
        live: Iterable[Request],
        adapters: Set[bytes],
    ) -> None:
        self._model, self._blocks, self._live, self._adapters = model, blocks, live, adapters
        shape = blocks.shape
        self._part = "state" if shape.needs_state else "window" if shape.window_start else ""

    def begin(self, request: Request) -> None:
        """Start a new sequence from the longest cached prefix of its tokens."""
        ledger = request.cells.ledger
        n = len(ledger)
        if not n:
            return
        ids = request.shareable
        live = look_up(self._live, ids, request.namespace, request)
        with self._blocks.change():
            tree = self._blocks.tree
            match = tree.match(ids.tobytes(), request.space)
            begin = plan_begin(tree, match, live, n)
            after = match.next_token() if match.n < len(ids) else None
            stored = self._cells_of(match, begin.resume)
            tree.use(match, begin.resume, request.priority)
            self._blocks.hold(request, match, begin.resume)
        is_fork = self._execute(request, begin, stored)
        usable = request.usable if is_fork else stored.n
        agrees = max(match.n, live.agrees)
        if self._part == "state":
            request.cells.branches = {*request.boundaries, agrees}
        difference = self._difference(ids, live, match.n, after)
        reason = request.reason = Reason(
            n, agrees, usable, difference, self._part, max(match.n, live.n)
        )
        if live.nearest is not None and live.agrees >= match.n:
            reason.obstacles += _obstacles_of(live.nearest, live.agrees, request.space)
        reason.obstacles += self._obstacles_of_adapters(ids, request, agrees)
        if len(ids) < n:
            reason.obstacles += [f"an adapter is activated at token {len(ids):,}"]
        request.report = ReuseReport(
            n,
            live=usable if is_fork else 0,
            ram=0 if is_fork else usable,
            evaluated=n - usable,
            first_difference=None if difference is None else difference.at,
            unshared=n - len(ids),
        )

    def _cells_of(self, match: Match, resume: Resume) -> Cells:
        """Return the cells and the state that a resume point needs, from RAM."""
        first, window = resume.n, list[Any]()
        if resume.window_first < resume.n:
            first, window = match.chunks(Kind.WINDOW, resume.window_first, resume.n)
        state = None if resume.state is None else resume.state.chunks[0].state
        _, attention = match.chunks(Kind.ATTENTION, 0, resume.n)
        return Cells(resume.n, attention, window, first, state)

    def _execute(self, request: Request, begin: Begin, stored: Cells) -> bool:
        """Fork or restore, the only step that changes the memory; return whether it forked."""
        cells = request.cells
        if begin.parent is not None:
            begin.parent.cells.fork_into(cells, begin.n)
            cells.row = begin.row
            if request.usable >= stored.n:
                return True
            cells.release()  # no sequence id was free, and the parked state is not truncatable
        if stored.n:
            memory = self._blocks.memory
            least = memory.least_cut(stored) if self._part else 0
            cells.state = PutBack(partial(memory.put, cells=stored), least)
            cells.ledger.n_evaluated = stored.n
            if stored.state is not None:
                cells.points.add_state(stored.n, stored.state)
            if begin.parent is None and begin.row is not None:
                cells.row = begin.row
        return False

    def _difference(
        self, ids: IntArray, live: Live, known: int, after: int | None
    ) -> Difference | None:
        """Return where a prompt differs from the closest cached one; None if it does not."""
        at, other = known, after
        if live.nearest is not None and live.agrees >= known:
            theirs = live.nearest.cells.ledger
            at = live.agrees
            other = theirs.token_at(at) if at < min(len(ids), len(theirs)) else None
        if other is None:
            return None
        shown = ids[max(0, at - BEFORE) : at + 1].copy()
        return Difference(self._model, shown, at, other)

    def _obstacles_of_adapters(self, ids: IntArray, request: Request, agrees: int) -> list[str]:
        """Return an obstacle if other adapters have a longer match, in the same namespace."""
        tree, found = self._blocks.tree, list[str]()
        least = agrees + tree.shape.block_size
        for digest in [b"", *self._adapters] if self._adapters and least <= len(ids) else ():
            space = space_of(request.namespace, digest)
            if space != request.space and (n := tree.match(ids.tobytes(), space).n) >= least:
                found, least = [f"{n:,} tokens are cached under other {_ADAPTERS}"], n + 1
        return found

    def renew(self, request: Request) -> bool:
        """Restart a sequence if a longer prefix is cached by now; return whether it was."""
        cells = request.cells
        ids, known, n = request.shareable, request.usable, len(cells.ledger)
        if cells.ledger.shifted_at is not None or known >= min(n - 1, len(ids)):
            return False
        if look_up(self._live, ids, request.namespace, request).n <= known:
            match = self._blocks.tree.match(ids.tobytes(), request.space)
            if self._blocks.tree.resume(match, n - 1).n <= known:
                return False
        cells.release()
        self.begin(request)
        return True


def _obstacles_of(nearest: Request, agrees: int, space: str) -> list[str]:
    """Return why a live sequence does not share its whole common prefix with a prompt."""
    cells = nearest.cells
    if cells.n_fresh >= agrees:
        return []
    start = f"a live sequence begins with the same {agrees} tokens, "
    if nearest.space != space:
        return [start + f"evaluated with other {_ADAPTERS}"]
    if cells.ledger.shifted_at is None:
        return [start + f"and has evaluated {cells.n_fresh} of them so far"]
    n = cells.n_fresh
    return [start + f"but shares only {n}, because it discarded tokens after these"]
