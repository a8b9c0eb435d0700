"""What stands beside the blocks at one place of a prompt: the last cells, other parts, logits.

::

    header, 48 bytes                                  cells     rest      row
    magic cells first pos len(cells) len(rest) len(row)

Little-endian. The cells are those after the last full block; the rest is the state of windows and
recurrent parts at that place; the row is the logits there. Any of them may be missing.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["END_OVERHEAD", "End", "end_key"]

_HEADER = struct.Struct("<4sIiiQQQ8x")
_MAGIC = b"pkve"

#: By how many bytes an encoded end is longer than what is in it.
END_OVERHEAD = _HEADER.size


def end_key(name: bytes, tokens: bytes) -> bytes:
    """Return the key of an end: so many tokens after the block of that name."""
    return hashlib.sha256(b"pykvcache.end.1" + name + tokens).digest()


@dataclass(frozen=True)
class End:
    """What a memory holds at one place beside the full blocks before it.

    Attributes
    ----------
    n_cells
        Tokens after the last full block.
    cells
        Their bytes.
    rest
        State of the parts that blocks do not hold; None where the memory has no such parts.
    first, pos
        First and last position that the rest is of.
    row
        Logits after the last token, float32; None where they are not kept.
    """

    n_cells: int
    cells: npt.NDArray[np.uint8]
    rest: npt.NDArray[np.uint8] | None = None
    first: int = 0
    pos: int = 0
    row: npt.NDArray[np.float32] | None = None

    def has_row(self, n: int) -> bool:
        """Whether it has that many logits, all of them finite."""
        return self.row is not None and len(self.row) == n and bool(np.isfinite(self.row).all())

    def encode(self) -> bytes:
        """Return the bytes that a store gets."""
        rest = b"" if self.rest is None else self.rest.data
        row = b"" if self.row is None else self.row.astype("<f4").tobytes()
        head = _HEADER.pack(
            *(_MAGIC, self.n_cells, self.first, self.pos),
            *(len(self.cells), len(rest), len(row)),
        )
        return b"".join((head, self.cells.data, rest, row))

    @classmethod
    def decode(cls, content: Buffer) -> End | None:
        """Return what bytes say, as copies; None where they make no sense."""
        data = np.frombuffer(memoryview(content), np.uint8)
        if len(data) < _HEADER.size:
            return None
        magic, n_cells, first, pos, *sizes = _HEADER.unpack_from(data.data)
        if magic != _MAGIC or _HEADER.size + sum(sizes) != len(data) or sizes[2] % 4:
            return None
        at = _HEADER.size
        parts = []
        for size in sizes:
            parts.append(data[at : at + size].copy())
            at += size
        cells, rest, row = parts
        return cls(
            *(n_cells, cells, rest if len(rest) else None, first, pos),
            row.view("<f4").astype(np.float32) if len(row) else None,
        )
