"""The blocks that a cache keeps in memory: a tree of full blocks, and the tails after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pykvcache.prefix.alike import TokenKeys
from pykvcache.prefix.changes import change
from pykvcache.prefix.finding import Finding
from pykvcache.prefix.kept import RUN_BYTES, TAIL_BYTES, Buffer, Tail, parts_of
from pykvcache.prefix.pieces import Cells, Joined
from pykvcache.prefix.runs import Run

__all__ = ["Buffer", "RamTier", "Read", "Tail"]

#: Returns the bytes of n blocks, from a token on, and of so many cells after them. The last number
#: says how many cells at the beginning are not needed: it may leave these out.
Read = Callable[[int, int, int, int], list[Buffer]]


class Alike(NamedTuple):
    """What begins like a block or a tail."""

    of: Run | Tail  # the first block of a run, or a tail
    cells: Cells
    n: int  # how many they are
    same: int  # how many leading ones are equal


class RamTier(Finding):
    """Keep full blocks in a `BlockTree` and tails beside it, within one budget.

    Tails may take what blocks do not need, and a quarter of the budget where some block may leave;
    the least recently used is dropped first. A block that
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
    expect
        Called with the number of blocks that are about to get memory, before others leave for them.
    copy
        Copies cells between blocks: what branches have in common of the block in which they part
        is then kept once.
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

        ``with_tail``: what comes after the full blocks is stored, too.
        """
        added = self._insert(tokens, namespace, cell_bytes, read, with_tail=with_tail)
        if isinstance(added, BaseException):
            try:
                raise added
            finally:
                del added  # with its traceback it would keep this call's arrays
        return added

    @change
    def _insert(
        self, tokens: bytes, namespace: str, cell_bytes: int, read: Read, *, with_tail: bool
    ) -> Run | BaseException | None:
        tree, size = self.tree, self.block_size
        run = tree.insert(tokens, self.block_cost(cell_bytes), namespace)
        end, text = run, tokens[len(tokens) // tree.step * tree.step :] if with_tail else b""
        if text:
            end = tree.end_of(tree.match(tokens, namespace)) if run is None else run
            if not self._wants_tail(end, tokens, text, cell_bytes):
                text = b""
        if end is None or (run is None and not text):
            self._expect(0)
            return None
        # What is new, and what it follows.
        n, before, new = 0, end, text
        if run is not None and run.parent is not None:
            n, before, new = run.n_blocks, run.parent, run.tokens[: tree.step]
        # First, so that nothing is shared with tails that go. Only they are lost if `read` fails.
        self._forget_begun(before, new)
        alike = self._alike(before, new, cell_bytes)
        same = 0 if alike is None else alike.same
        try:
            payloads: list[Any] = [*read(before.end * size, n, len(text) // 4, same)]
        except BaseException as error:  # this takes longest: often an interrupt comes here
            self._expect(0)
            if run is not None:
                tree.remove(run)
            return error
        if alike is not None:
            payloads[0] = self._join(payloads[0], len(new) // 4, alike)
        if run is not None:
            self._expect(0)
            self.stored += n  # before they are there: `_repair` counts what is missing
            run.payloads[:] = payloads[:n]
            self._count_as_kept(run.payloads)
            self._say_stored(run)
        if text:
            self._put_tail(end, Tail(text, payloads[n], None, None))
        elif alike is not None:
            tree.fit(end)  # very small pieces may take more than they save
        return run

    def _wants_tail(self, end: Run, tokens: bytes, text: bytes, cell_bytes: int) -> bool:
        """Whether the last of some tokens are to be kept after a run."""
        is_next = end.end * self.tree.step + len(text) == len(tokens)  # else some before it left
        n_bytes = len(text) // 4 * (cell_bytes + 4) + TAIL_BYTES
        return is_next and self._is_small(n_bytes) and not self._has_tail(end, text)

    def _is_small(self, n_bytes: int) -> bool:
        """Whether a tail of so many bytes can stay, in place of other tails at most."""
        if n_bytes <= self._most_tails:
            return True
        others = self._tail_bytes - self._shared_bytes
        return n_bytes <= self.max_bytes - self.tree.used_bytes + others

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
        """Drop the tails of a run that what is new after it contains."""
        if (tails := self._tails_at.get(run)) is None:
            return
        for begun in tails.beginnings(tokens):
            if tails[begun].rest is None and tails[begun].row is None:
                self._forget((run, begun))

    def _alike(self, run: Run, tokens: bytes, cell_bytes: int) -> Alike | None:
        """Return the block or tail after a run that shares most leading tokens with another.

        None where no other shares so many that it pays.
        """
        least = self._pieces.least(self.block_size, cell_bytes)
        if 4 * least > len(tokens):
            return None
        key, same = run.children.alike(tokens, least)
        here = self._tails_at.get(run)
        if here is not None:
            begun, in_tail = here.alike(tokens, least)
            if in_tail > same:
                tail = here[begun]
                return Alike(tail, tail.buffer, len(begun) // 4, in_tail)
        if not same or (block := (child := run.children[key]).payloads[0]) is None:
            return None
        return Alike(child, block, self.block_size, same)

    def _join(self, buffer: Buffer, n: int, alike: Alike) -> Cells:
        """Let n cells share their beginning with others; it may have been left out already."""
        rest, same = buffer, alike.same
        if n > same and buffer.nbytes == alike.cells.nbytes // alike.n * n:
            try:
                rest = self._pieces.part(buffer, n, same, n - same)
            except MemoryError:
                return buffer
        mine, theirs = self._pieces.join(rest, n, alike.cells, alike.n, same)
        if isinstance(alike.of, Tail):
            alike.of.buffer = theirs
        else:
            alike.of.payloads[0] = theirs
        if rest is not buffer or n == same:
            self._count_while_used([buffer])  # a sequence may begin with it
        return mine

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
        if self._is_small(tail.nbytes):
            if run.is_root:
                self.tree.hold(run)
            n = len(tail.tokens) // 4
            if n and not isinstance(tail.buffer, Joined):
                alike = self._alike(run, tail.tokens, tail.buffer.nbytes // n)
                if alike is not None:
                    tail.buffer = self._join(tail.buffer, n, alike)
            self._tails[run, tail.tokens] = tail
            self._count_as_kept(parts_of(tail))
            self._tails_at.setdefault(run, TokenKeys())[tail.tokens] = tail
            self._tail_bytes += tail.nbytes
            self._shared_bytes += tail.shared
            if not tail.tokens:
                self._count_twice(run)
            if not self.tree.fit(is_new=True):
                self._fit_tail((run, tail.tokens))

    def _fit_tail(self, new: tuple[Run, bytes]) -> None:
        """Let other tails leave for a new one, or that one where they would leave in vain."""
        others = self._tail_bytes - self._shared_bytes
        if (tail := self._tails.get(new)) is not None:
            others -= tail.nbytes - tail.shared
            if self.tree.used_bytes - self.max_bytes > others:
                self._forget(new)
                return  # its memory is free when this call has ended
        self.tree.fit()
