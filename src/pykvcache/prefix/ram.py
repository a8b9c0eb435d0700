"""The blocks that a cache keeps in memory: a tree of full blocks, and the tails after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.alike import TokenKeys
from pykvcache.prefix.changes import change
from pykvcache.prefix.kept import RUN_BYTES, Buffer, Kept, Tail, parts_of
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
        self, tokens: bytes, namespace: str, *, needs_rest: bool, is_use: bool = True
    ) -> Found:
        """Return the longest usable prefix; with ``is_use`` it counts as used.

        ``needs_rest``: the memory has parts that blocks do not hold (window, recurrent), so that
        only prefixes that end at a checkpoint are usable.
        """
        if is_use:
            match = self.tree.lookup(tokens, namespace)
        else:
            match = self.tree.match(tokens, namespace)
        run = self.tree.end_of(match)
        size, step = self.block_size, self.tree.step
        found = Found(match.n_blocks * size, run=run, n_known=match.n_blocks * size)
        for part in reversed(list(run.path())):
            found.blocks += [(buffer, size, size) for buffer in part.payloads]
        after = tokens[match.n_blocks * step :]
        if needs_rest:
            self._to_checkpoint(found, run)
            self._exact_tail(found, run, after)
            nearest, n, _ = self._nearest(run, after)
            found.n_known, found.nearest = match.n_blocks * size + n, nearest[4 * n :]
            if found.rest is not None and 4 * found.n == len(tokens):
                found.below = self._point_before(run, found.n)
        elif after:
            self._begun_block(found, run, after)
        if not needs_rest and (whole := self._tails.get((run, after))) is not None:
            found.row = whole.row
            self._tails.move_to_end((run, after))
        return found

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
        return list(self._tails_of(run).values())

    def _tails_of(self, run: Run) -> TokenKeys[Tail]:
        return self._tails_at.get(run) or TokenKeys()

    def _to_checkpoint(self, found: Found, run: Run) -> None:
        point = next((part.checkpoint for part in run.path() if part.checkpoint is not None), None)
        n_blocks = point.start if point is not None else 0
        found.n = n_blocks * self.block_size
        del found.blocks[n_blocks:]
        found.rest = point.payloads[0] if point is not None else None

    def _point_before(self, run: Run, n: int) -> tuple[int, Any] | None:
        """Return the deepest checkpoint before n tokens, and at how many it is."""
        for part in run.path():
            point = part.checkpoint
            if point is not None and point.start * self.block_size < n:
                return point.start * self.block_size, point.payloads[0]
        return None

    def _exact_tail(self, found: Found, run: Run, after: bytes) -> None:
        """Add a whole tail with its partial state, where it matches the next tokens."""
        here = self._tails_of(run)
        if not (known := here.beginnings(after)):
            return
        best = here[known[0]]
        blocks: list[tuple[Buffer, int, int]] = []
        for part in reversed(list(run.path())):
            blocks += [(buffer, self.block_size, self.block_size) for buffer in part.payloads]
        n = len(best.tokens) // 4
        found.blocks = [*blocks, (best.buffer, n, n)]
        found.n = len(blocks) * self.block_size + n
        found.rest, found.row = best.rest, best.row
        self._tails.move_to_end((run, best.tokens))

    def _nearest(self, run: Run, after: bytes) -> tuple[bytes, int, bool]:
        """Return which block or tail after a run begins most like some tokens.

        Its tokens, how many of them agree, and whether it is a tail.
        """
        text, n = run.children.nearest(after)
        if (here := self._tails_at.get(run)) is not None:
            tail, same = here.nearest(after)
            if same > n or not text:
                return tail, same, True
        return text, n, False

    def _begun_block(self, found: Found, run: Run, after: bytes) -> None:
        """Add the first cells of the block, or tail, that shares the most tokens with `after`."""
        nearest, n, is_tail = self._nearest(run, after)
        found.nearest = nearest[4 * n :]
        if not n:
            return
        if not is_tail:
            found.blocks.append((run.children[nearest].payloads[0], self.block_size, n))
        else:
            buffer = self._tails_at[run][nearest].buffer
            found.blocks.append((buffer, len(nearest) // 4, n))
            self._tails.move_to_end((run, nearest))
        found.n += n
        found.n_known = found.n
