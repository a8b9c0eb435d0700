"""What blocks and tails have in common that begin alike: memory that is kept once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Block",
    "Buffer",
    "Cells",
    "CopyCells",
    "Joined",
    "Pieces",
    "arrays_of",
    "blocks_of",
    "cut",
    "is_whole",
    "taken",
]

Buffer = npt.NDArray[np.uint8]

#: Bytes of cells, how many cells they are, how many of them count.
Block = tuple[Buffer, int, int]

#: Overhead in bytes of what consists of pieces, of each that it uses, and of a piece: measured
#: with tracemalloc (tests/prefix/test_pieces.py).
_JOINED_BYTES, _PART_BYTES, _PIECE_BYTES = 160, 100, 320

#: What must be saved so that it pays: so many bytes, and one of so many parts of a block. Prompts
#: that have nothing in common often begin with the same token or two of a template.
_LEAST_BYTES, _LEAST_PART = 2048, 16

#: Copies cells between blocks: `pykvcache._native.lib.BlockLayout.copy_cells`.
CopyCells = Callable[[Buffer, int, int, Buffer, int], None]


class Piece:
    """Memory of some cells, of which those that share it use the first ones.

    Attributes
    ----------
    data
        The bytes, and how many cells they are; replaced, never changed.
    used
        By a number of cells: how many of those that share it use so many.
    """

    __slots__ = ("data", "used")

    def __init__(self, buffer: Buffer, n: int) -> None:
        self.data = buffer, n
        self.used: dict[int, int] = {}


class Joined:
    """The cells of a block or a tail that shares its beginning.

    Attributes
    ----------
    parts
        Pieces in their order, and how many cells of each count.
    nbytes
        Bytes of all its cells, as if it shared none.
    shared
        Bytes of those that others had already when it came.
    """

    __slots__ = ("nbytes", "parts", "shared")

    def __init__(self, parts: tuple[tuple[Piece, int], ...], nbytes: int, shared: int = 0) -> None:
        self.parts = parts
        self.nbytes = nbytes
        self.shared = shared

    @property
    def is_whole(self) -> bool:
        """Whether all of its cells are there: an interrupt may have come as it left."""
        return all(count <= piece.data[1] for piece, count in self.parts)

    @property
    def overhead(self) -> int:
        """Bytes that it takes beside its pieces."""
        return _JOINED_BYTES + _PART_BYTES * len(self.parts)

    def blocks(self, used: int) -> Iterator[Block]:
        """Yield the first cells as `set_blocks` takes them."""
        for piece, count in self.parts:
            if used <= 0:
                return
            yield *piece.data, min(used, count)
            used -= count


#: The cells of a block or a tail.
Cells = Buffer | Joined


class Pieces:
    """Lets blocks and tails share their beginnings, and counts what that saves.

    A piece lives as long as something uses it, and is cut when what used most of it leaves.

    Parameters
    ----------
    copy
        None: nothing is shared.

    Attributes
    ----------
    saved
        Bytes by which all takes less than each would alone; overhead can make it negative.
    """

    def __init__(self, copy: CopyCells | None) -> None:
        self._copy = copy
        self.saved = 0

    def least(self, block_size: int, cell_bytes: int) -> int:
        """Return how many cells must be equal so that it pays; more than a block: it never does."""
        if self._copy is None or not cell_bytes:
            return block_size + 1
        return max(-(-_LEAST_BYTES // cell_bytes), block_size // _LEAST_PART)

    def join(
        self, rest: Buffer, n: int, theirs: Cells, n_theirs: int, same: int
    ) -> tuple[Joined, Joined]:
        """Share the first of n cells, which are equal; return what is to be kept in place of both.

        ``rest``: those after them.
        """
        cell = theirs.nbytes // n_theirs
        if not isinstance(theirs, Joined):
            theirs = self._add(Joined(((Piece(theirs, n_theirs), n_theirs),), theirs.nbytes))
        parts: list[tuple[Piece, int]] = []
        left = same
        for piece, count in theirs.parts:
            if left > 0:
                parts.append((piece, min(left, count)))
            left -= count
        if n > same:
            parts.append((Piece(rest, n - same), n - same))
        return self._add(Joined(tuple(parts), cell * n, cell * same)), theirs

    def part(self, buffer: Buffer, n: int, first: int, count: int) -> Buffer:
        """Return a copy of some of n cells."""
        part = np.empty(buffer.nbytes // n * count, np.uint8)
        assert self._copy is not None
        self._copy(buffer, first, count, part, 0)
        part.setflags(write=False)
        return part

    def _add(self, joined: Joined) -> Joined:
        self.saved += joined.nbytes - joined.overhead
        for piece, count in joined.parts:
            if not piece.used:
                self.saved -= piece.data[0].nbytes + _PIECE_BYTES
            piece.used[count] = piece.used.get(count, 0) + 1
        return joined

    def leave(self, cells: Any) -> list[Any]:
        """Let go of cells, or of anything else that was kept; return the memory that goes with it.

        What others use less of is cut. If that is all that was done when an interrupt comes, the
        cells are not whole any more.
        """
        if not isinstance(cells, Joined):
            return [cells]
        self.saved -= cells.nbytes - cells.overhead
        gone = []
        for piece, count in cells.parts:
            piece.used[count] -= 1
            if not piece.used[count]:
                del piece.used[count]
            if piece.used:
                gone += self._shorten(piece)
            else:
                gone.append(piece.data[0])
                self.saved += gone[-1].nbytes + _PIECE_BYTES
        return gone

    def _shorten(self, piece: Piece) -> list[Buffer]:
        """Cut what nobody uses off a piece; return the memory that it had."""
        (buffer, n), most = piece.data, max(piece.used)
        if most == n:
            return []
        try:
            piece.data = self.part(buffer, n, 0, most), most
        except MemoryError:
            return []  # it counts as long as it is
        self.saved += buffer.nbytes - piece.data[0].nbytes
        return [buffer]

    def count_again(self, kept: Iterable[Any]) -> list[Buffer]:
        """Count what is kept and nothing else; return the memory of what is cut for it."""
        joined = [cells for cells in kept if isinstance(cells, Joined)]
        pieces = {piece for cells in joined for piece, _ in cells.parts}
        for piece in pieces:
            piece.used = {}
        self.saved = 0
        for cells in joined:
            self._add(cells)
        return [buffer for piece in pieces for buffer in self._shorten(piece)]

    def whole(self, cells: Cells, n: int) -> Buffer:
        """Return n cells in one piece."""
        if not isinstance(cells, Joined):
            return cells
        assert self._copy is not None
        out, at = np.empty(cells.nbytes, np.uint8), 0
        for buffer, _, count in cells.blocks(n):
            self._copy(buffer, 0, count, out, at)
            at += count
        out.setflags(write=False)
        return out


def arrays_of(things: Iterable[Any]) -> Iterator[Any]:
    """Yield all memory that some cells consist of; what is something else as it is."""
    for thing in things:
        if isinstance(thing, Joined):
            yield from (piece.data[0] for piece, _ in thing.parts)
        else:
            yield thing


def is_whole(cells: Any) -> bool:
    """Whether cells, or something else that is kept, are there."""
    return cells.is_whole if isinstance(cells, Joined) else cells is not None


def taken(cells: Any) -> int:
    """Return the bytes that cells take; of a piece, their share."""
    if isinstance(cells, Joined):
        return sum(piece.data[0].nbytes // sum(piece.used.values()) for piece, _ in cells.parts)
    return int(cells.nbytes)


def blocks_of(cells: Cells, n: int, used: int) -> list[Block]:
    """Return the first of n cells as `set_blocks` takes them."""
    return [*cells.blocks(used)] if isinstance(cells, Joined) else [(cells, n, used)]


def cut(blocks: Iterable[Block], n: int) -> list[Block]:
    """Return the blocks up to n cells."""
    found: list[Block] = []
    for buffer, cells, used in blocks:
        if n <= 0:
            break
        found.append((buffer, cells, min(used, n)))
        n -= used
    return found
