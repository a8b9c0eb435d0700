"""The longest prefix of some tokens that a cache keeps in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.alike import TokenKeys, common_tokens
from pykvcache.prefix.changes import change
from pykvcache.prefix.kept import Kept, Tail
from pykvcache.prefix.match import Match
from pykvcache.prefix.pieces import Block, Buffer, Cells, Joined, blocks_of, cut
from pykvcache.prefix.runs import Run

__all__ = ["Finding", "Found"]


@dataclass
class Found:
    """The longest prefix of some tokens that is in memory."""

    n: int = 0
    blocks: list[Block] = field(default_factory=list)
    rest: Any = None
    run: Run | None = None
    begun: Run | None = None  # a block after it, of which the beginning is used
    #: The deepest checkpoint on the way, and the one of `below`, if any.
    points: list[Run] = field(default_factory=list)
    row: npt.NDArray[np.float32] | None = None
    #: Where it ends with the tokens and has a rest: a rest before the last token, and where.
    below: tuple[int, Any] | None = None
    #: How many tokens some known prompt begins with; `n` is less where a partial state is missing.
    n_known: int = 0
    nearest: bytes = b""  # tokens after n_known in the nearest known prompt


class Exact(NamedTuple):
    """A tail of which all tokens match, with its partial state."""

    n: int
    blocks: list[Block]
    rest: Any
    row: npt.NDArray[np.float32] | None


class Finding(Kept):
    """Finding blocks and tails; part of `RamTier`."""

    @change
    def find(
        self,
        tokens: bytes,
        namespace: str,
        *,
        needs_rest: bool,
        is_use: bool = True,
        is_prompt: bool = True,
    ) -> Found:
        """Return the longest usable prefix; with ``is_use`` it counts as used.

        ``needs_rest``: the memory has parts that blocks do not hold (window, recurrent), so that
        only prefixes that end at a checkpoint are usable. ``is_prompt``: it is used by a prompt.
        """
        match = self.tree.match(tokens, namespace)
        size = self.block_size
        n = match.n_blocks * size
        after = tokens[4 * n :]
        nearest, same, is_tail = self._nearest(match, after) if after else (b"", 0, False)
        begun = nearest if same and not (is_tail or needs_rest) else b""
        # What a prompt uses is found before its use lets anything leave.
        beside = blocks_of(self._next_block(match, begun), size, same) if begun else []
        exact = row = None
        if needs_rest:
            exact = self._exact_tail(match, after)
        else:
            if same and is_tail:
                tail = self._use_tail(match.run, nearest)
                beside = blocks_of(tail.buffer, len(nearest) // 4, same)
            if after in self._tails_of(match):
                row = self._use_tail(match.run, after).row
        if is_use:
            if is_prompt:
                self.tree.ask(tokens, namespace)
            self.tree.use(match, begun)
        found = Found(n, self._blocks(match), run=match.run, n_known=n + same)
        found.nearest = nearest[4 * same :]
        if not needs_rest:
            found.n, found.row = n + same, row
            found.blocks += beside
            found.begun = match.run.children[begun] if is_use and begun else None
            return found
        whole = found.blocks
        self._to_checkpoint(found, match)
        if exact is not None:
            found.n, found.rest, found.row = n + exact.n, exact.rest, exact.row
            found.blocks = whole + exact.blocks
        if found.rest is not None and 4 * found.n == len(tokens):
            self._to_point_before(found, match.run)
        return found

    def _blocks(self, match: Match) -> list[Block]:
        size, found = self.block_size, list[Block]()
        for run, n in match.parts():
            # Where runs part, and nowhere else, a block may share its beginning.
            if n and isinstance(run.payloads[0], Joined):
                found += blocks_of(run.payloads[0], size, size)
                found += [(data, size, size) for data in run.payloads[1:n]]
            else:
                found += [(data, size, size) for data in run.payloads[:n]]
        return found

    @staticmethod
    def _next_block(match: Match, tokens: bytes) -> Cells:
        """Return the bytes of a block that comes next after a match."""
        run, at = match.run, match.offset
        if match.is_whole:
            run, at = run.children[tokens], 0
        block: Cells = run.payloads[at]
        return block

    def _use_tail(self, run: Run, tokens: bytes) -> Tail:
        """Return a tail, which was used last then."""
        self._tails.move_to_end((run, tokens))
        return self._tails[run, tokens]

    def n_blocks(self, tokens: bytes, namespace: str) -> int:
        """Return how many full blocks of some tokens are there."""
        self.check()
        return self.tree.match(tokens, namespace).n_blocks

    def full_blocks(self, tokens: bytes, namespace: str) -> tuple[list[Block], int]:
        """Return the full blocks of some tokens, and how many they are: none counts as used.

        One that shares its beginning is several in the list.
        """
        self.check()
        match = self.tree.match(tokens, namespace)
        return self._blocks(match), match.n_blocks

    def whole_blocks(self, tokens: bytes, namespace: str) -> list[Callable[[], Buffer]]:
        """Return, for each full block of some tokens, what returns its bytes in one piece."""
        self.check()
        return [
            partial(self._pieces.whole, cells, self.block_size)
            for run, n in self.tree.match(tokens, namespace).parts()
            for cells in run.payloads[:n]
        ]

    def tails_at(self, run: Run) -> list[Tail]:
        """Return the tails after the end of a run."""
        return list(self._tails_at.get(run, TokenKeys()).values())

    def _tails_of(self, match: Match) -> TokenKeys[Tail]:
        """Return the tails where a match ends."""
        here = self._tails_at.get(match.run) if match.is_whole else None
        return TokenKeys() if here is None else here

    def _to_checkpoint(self, found: Found, match: Match) -> None:
        point = match.checkpoint
        n_blocks = point.start if point is not None else 0
        found.n = n_blocks * self.block_size
        found.blocks = cut(found.blocks, found.n)
        if point is not None:
            found.rest = point.payloads[0]
            found.points.append(point)

    def _to_point_before(self, found: Found, run: Run) -> None:
        """Add the deepest checkpoint before the last token."""
        for part in run.path():
            point = part.checkpoint
            if point is not None and point.start * self.block_size < found.n:
                found.below = point.start * self.block_size, point.payloads[0]
                found.points.append(point)
                return

    def _exact_tail(self, match: Match, after: bytes) -> Exact | None:
        """Return the longest tail that matches the next tokens; it was used last then."""
        if not (known := self._tails_of(match).beginnings(after)):
            return None
        tail, n = self._use_tail(match.run, known[0]), len(known[0]) // 4
        return Exact(n, blocks_of(tail.buffer, n, n), tail.rest, tail.row)

    def _nearest(self, match: Match, after: bytes) -> tuple[bytes, int, bool]:
        """Return which block or tail after a match begins most like some tokens.

        Its tokens, how many of them agree, and whether it is a tail.
        """
        run = match.run
        if not match.is_whole:
            text = run.tokens[match.offset * run.step : (match.offset + 1) * run.step]
            return text, common_tokens(text, after), False
        text, n = run.children.nearest(after)
        if (here := self._tails_at.get(run)) is not None:
            tail, same = here.nearest(after)
            if same > n or not text:
                return tail, same, True
        return text, n, False
