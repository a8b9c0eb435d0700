"""The blocks that a cache keeps in memory: a tree of full blocks, and the tails after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.alike import TokenKeys, common_tokens
from pykvcache.prefix.changes import change
from pykvcache.prefix.kept import RUN_BYTES, Buffer, Kept, Tail, parts_of
from pykvcache.prefix.match import Match
from pykvcache.prefix.runs import Run

__all__ = ["Buffer", "Found", "RamTier", "Read", "Tail"]

#: Returns the bytes of n blocks, from a token on, and of so many cells after them.
Read = Callable[[int, int, int], list[Buffer]]


@dataclass
class Found:
    """The longest prefix of some tokens that is in memory."""

    n: int = 0
    blocks: list[tuple[Buffer, int, int]] = field(default_factory=list)  # buffer, cells, how many
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


class RamTier(Kept):
    """Keep full blocks in a `BlockTree` and tails beside it, within one budget.

    Tails may take a quarter of the budget; the least recently used is dropped first. A block that
    is evicted while a parked sequence still uses it counts until that sequence releases it. After
    a call that was cut short the next one keeps what is whole, and counts it again.

    Parameters
    ----------
    block_size
        Tokens per block.
    max_bytes
        The budget.
    policy
        What is evicted first.
    root
        Returns the name of a namespace's root.
    events
        Hear of the blocks that come and go.
    on_restart
        Called when nothing of what they heard is true any more: what is there is said again.
    other_bytes
        Returns how many bytes of the budget something else takes.
    release
        Called before anything is evicted, and where there is room, as in `BlockTree`.
    room
        Returns how many bytes of the budget are kept free for what comes at any time.
    renew
        Frees, in a forked child, what another thread holds; returns whether this one is in no call.
    """

    # Storing -------------------------------------------------------------------------------------

    def add(
        self,
        tokens: bytes,
        namespace: str,
        cell_bytes: int,
        read: Read,
        *,
        with_tail: bool = False,
    ) -> Run | None:
        """Store the full blocks of some tokens; return the new run, or None if nothing was stored.

        ``read(first, n, n_tail)`` returns the bytes of n blocks, from a token on, and those of the
        cells after them. ``with_tail``: what comes after the full blocks is stored, too.
        """
        size = self.block_cost(cell_bytes)
        added = self._insert(tokens, namespace, size, read, with_tail=with_tail)
        if isinstance(added, BaseException):
            try:
                raise added
            finally:
                del added  # with its traceback it would keep this call's arrays
        return added

    @change
    def _insert(
        self, tokens: bytes, namespace: str, size: int, read: Read, *, with_tail: bool
    ) -> Run | BaseException | None:
        tree, step = self.tree, self.tree.step
        run = end = tree.insert(tokens, size, namespace)
        text = tokens[len(tokens) // step * step :] if with_tail else b""
        if text:
            if end is None:
                end = tree.end_of(tree.match(tokens, namespace))
            if end.end * step + len(text) != len(tokens) or self._has_tail(end, text):
                text = b""  # the blocks before it are not kept, or it is
        if end is None or (run is None and not text):
            return None
        n = 0 if run is None else run.n_blocks
        try:
            payloads = read((end.end - n) * self.block_size, n, len(text) // 4)
        except BaseException as error:  # this takes longest: often an interrupt comes here
            if run is not None:
                tree.remove(run)
            return error
        if run is not None:
            self.stored += n  # before they are there: `_repair` counts what is missing
            run.payloads[:] = payloads[:n]
            self._count_as_kept(run.payloads)
            if run.parent is not None:
                self._forget_begun(run.parent, run.tokens)
            self._say_stored(run)
        if text:
            self._put_tail(end, Tail(text, payloads[n], None, None))
        return run

    def _has_tail(self, run: Run, text: bytes) -> bool:
        """Whether a block or a tail after a run begins with some tokens; a tail was used then."""
        if run.children.continuation(text) is not None:
            return True
        if (here := self._tails_at.get(run)) is None:
            return False
        known = text if text in here else here.continuation(text)
        if known is not None:
            self._tails.move_to_end((run, known))
        return known is not None

    def _forget_begun(self, run: Run, tokens: bytes) -> None:
        """Drop the tails of a run that its new blocks contain."""
        if (tails := self._tails_at.get(run)) is None:
            return
        for begun in tails.beginnings(tokens):
            if tails[begun].rest is None and tails[begun].row is None:
                self._forget((run, begun))

    @change
    def add_checkpoint(self, tokens: bytes, namespace: str, rest: Any, saved: int) -> None:
        """Store the partial state (window, recurrent) at the end of some full blocks."""
        match = self.tree.match(tokens, namespace)
        if match.n_blocks * self.tree.step != len(tokens) or match.run.is_root:
            return
        run = self.tree.end_of(match)
        point = self.tree.add_checkpoint(run, rest.nbytes + RUN_BYTES, saved)
        if point is not None:
            point.payloads[0] = rest
            self._count_as_kept([rest])
            self._count_twice(run)
            self.n_checkpoints += 1

    @change
    def add_tail(self, tokens: bytes, namespace: str, tail: Tail) -> None:
        """Store what comes after the last full block of some tokens."""
        match = self.tree.match(tokens, namespace)
        if match.n_blocks * self.tree.step + len(tail.tokens) != len(tokens):
            return  # the blocks before it are not kept
        self._put_tail(self.tree.end_of(match), tail)

    def _put_tail(self, run: Run, tail: Tail) -> None:
        """Store a tail after a run, in place of those that it contains."""
        if (here := self._tails_at.get(run)) is not None:
            for begun in here.beginnings(tail.tokens):
                if begun == tail.tokens:
                    tail.row = here[begun].row if tail.row is None else tail.row
                elif here[begun].rest is not None or here[begun].row is not None:
                    continue  # what the longer one does not have
                self._forget((run, begun))
            longer = here.continuation(tail.tokens)
            if longer is not None and tail.rest is None and tail.row is None:
                return  # it contains this one
        if tail.nbytes <= self.max_bytes // 4:
            if run.is_root:
                self.tree.hold(run)
            self._tails[run, tail.tokens] = tail
            self._count_as_kept(parts_of(tail))
            self._tails_at.setdefault(run, TokenKeys())[tail.tokens] = tail
            self._tail_bytes += tail.nbytes
            if not tail.tokens:
                self._count_twice(run)
            while self._tail_bytes > self.max_bytes // 4:
                self._forget(next(iter(self._tails)))
            self.tree.fit()

    # Finding -------------------------------------------------------------------------------------

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
        block = self._next_block(match, begun) if begun else None
        if is_use:
            if is_prompt:
                self.tree.ask(tokens, namespace)
            self.tree.use(match, begun)
        found = Found(n, self._blocks(match), run=match.run, n_known=n + same)
        found.nearest = nearest[4 * same :]
        if needs_rest:
            self._to_checkpoint(found, match)
            self._exact_tail(found, match, after)
            if found.rest is not None and 4 * found.n == len(tokens):
                self._to_point_before(found, match.run)
            return found
        found.n += same
        if block is not None:
            found.blocks.append((block, size, same))
            found.begun = match.run.children[begun] if is_use else None
        elif same:
            tail = self._use_tail(match.run, nearest)
            found.blocks.append((tail.buffer, len(nearest) // 4, same))
        if after in self._tails_of(match):
            found.row = self._use_tail(match.run, after).row
        return found

    def _blocks(self, match: Match) -> list[tuple[Buffer, int, int]]:
        size = self.block_size
        return [(data, size, size) for run, n in match.parts() for data in run.payloads[:n]]

    @staticmethod
    def _next_block(match: Match, tokens: bytes) -> Buffer:
        """Return the bytes of a block that comes next after a match."""
        run, at = match.run, match.offset
        if match.is_whole:
            run, at = run.children[tokens], 0
        block: Buffer = run.payloads[at]
        return block

    def _use_tail(self, run: Run, tokens: bytes) -> Tail:
        """Return a tail, which was used last then."""
        self._tails.move_to_end((run, tokens))
        return self._tails[run, tokens]

    def full_blocks(self, tokens: bytes, namespace: str) -> list[Buffer]:
        """Return the bytes of the full blocks of some tokens; they do not count as used."""
        self.check()
        match = self.tree.match(tokens, namespace)
        blocks: list[Buffer] = []
        for run, n in match.parts():
            blocks += run.payloads[:n]
        return blocks

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
        del found.blocks[n_blocks:]
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

    def _exact_tail(self, found: Found, match: Match, after: bytes) -> None:
        """Add a whole tail with its partial state, where it matches the next tokens."""
        if not (known := self._tails_of(match).beginnings(after)):
            return
        best = self._use_tail(match.run, known[0])
        n = len(best.tokens) // 4
        found.blocks = [*self._blocks(match), (best.buffer, n, n)]
        found.n = match.n_blocks * self.block_size + n
        found.rest, found.row = best.rest, best.row

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
