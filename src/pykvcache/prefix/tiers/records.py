"""End records: what a memory holds at one place of a prompt, without the full blocks before.

::

    header, 48 bytes                                                   cells  state  row  window
    magic n_cells zeros zeros len(cells) len(state) len(row) len(window)

Little-endian. The cells are those after the last full block, of layers without and with a window;
the state is that of recurrent parts; the row is the logits. Any of them may be missing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["END_OVERHEAD", "End"]

_HEADER = struct.Struct("<4sI8xQQQQ")
_MAGIC = b"pkve"

#: By how many bytes an encoded end is longer than what is in it.
END_OVERHEAD = _HEADER.size

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class End:
    """What a memory holds at one place: cells of the tokens after the last full block, and more.

    ``row`` are the logits after the last token, float32.
    """

    n_cells: int
    cells: Bytes
    window: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    state: Bytes | None = None
    row: npt.NDArray[np.float32] | None = None

    def has_row(self, n: int) -> bool:
        """Return whether it has that many logits, all of them finite."""
        return self.row is not None and len(self.row) == n and bool(np.isfinite(self.row).all())

    def encode(self) -> bytes:
        """Return the bytes that a store gets."""
        state = b"" if self.state is None else self.state.data
        row = b"" if self.row is None else self.row.astype("<f4").tobytes()
        parts = self.cells.data, state, row, self.window.data
        head = _HEADER.pack(_MAGIC, self.n_cells, *map(len, parts))
        return b"".join((head, *parts))

    @classmethod
    def decode(cls, content: Buffer) -> End | None:
        """Return what bytes say, as copies; None where they make no sense."""
        data = np.frombuffer(memoryview(content), np.uint8)
        if len(data) < _HEADER.size:
            return None
        magic, n_cells, *sizes = _HEADER.unpack_from(data.data)
        if magic != _MAGIC or _HEADER.size + sum(sizes) != len(data) or sizes[2] % 4:
            return None
        at, parts = _HEADER.size, []
        for size in sizes:
            parts.append(data[at : at + size].copy())
            at += size
        cells, state, row, window = parts
        return cls(
            n_cells,
            cells,
            window,
            state if len(state) else None,
            row.view("<f4").astype(np.float32) if len(row) else None,
        )
