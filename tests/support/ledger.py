"""The ledger: the explicit cells of each sequence.

This defines what "right" means for the memory operations: a cell keeps the K and V computed
when its token was decoded, K is rotated to the position that the cell has *now*, and a query
sees exactly the cells that its sequence holds, up to its own position (and within the window).
After a middle removal, a shift or a division no fresh run can stand in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

END = 2**31 - 1
"""As `p1`: to the end of the sequence."""


@dataclass(frozen=True)
class Cells:
    """A sequence's cells in order of decoding."""

    tokens: Ints
    """Shape (n,); for the reader of a failing test, the forward pass does not use it."""
    pos: Ints
    """Shape (n,); current positions."""
    k: Floats
    """Shape (n_layer, n, n_head_kv, head); never rotated."""
    v: Floats
    """Shape (n_layer, n, n_head_kv, head)."""

    def select(self, wanted: Mask) -> Cells:
        """Only the cells where `wanted`, of shape (n,), is true."""
        return Cells(self.tokens[wanted], self.pos[wanted], self.k[:, wanted], self.v[:, wanted])


class Ledger:
    """Sequences of cells and the operations on them; a subclass says how tokens become cells.

    Sequences never share cells here: a copy is independent, so that an operation on one
    sequence cannot reach another. Ranges are half-open, ``[p0, p1)``.
    """

    n_layer: int
    n_head_kv: int
    head: int

    def __init__(self) -> None:
        self.sequences: dict[int, Cells] = {}
        self.logits: Floats = np.empty(0)
        """Of the last token of the last decode, shape (n_vocab,)."""

    def forward(self, words: Ints, positions: Ints, old: Cells) -> tuple[Floats, Cells]:
        """Return the last layer's output, a row per token, and `old` with the new cells."""
        raise NotImplementedError

    def unembed(self, x: Floats) -> Floats:
        """Logits of shape (n_tokens, n_vocab) of what comes out of the last layer."""
        raise NotImplementedError

    def decode(self, seq: int, tokens: Sequence[int] | NDArray[np.integer]) -> Floats:
        """Append `tokens` after the highest position; logits of all, (n_tokens, n_vocab)."""
        logits = self.unembed(self._append(seq, tokens))
        self.logits = logits[-1]
        return logits

    def append(self, seq: int, tokens: Sequence[int] | NDArray[np.integer]) -> Floats:
        """Append `tokens` after the highest position; logits of the last, (n_vocab,)."""
        self.logits = self.unembed(self._append(seq, tokens)[-1:])[0]
        return self.logits

    def _append(self, seq: int, tokens: Sequence[int] | NDArray[np.integer]) -> Floats:
        words = np.asarray(tokens, dtype=np.int64)
        positions = self.pos_max(seq) + 1 + np.arange(len(words))
        x, self.sequences[seq] = self.forward(words, positions, self.cells(seq))
        return x

    def cells(self, seq: int) -> Cells:
        """Return the cells of `seq`."""
        none = np.empty((self.n_layer, 0, self.n_head_kv, self.head))
        nothing = Cells(np.empty(0, np.int64), np.empty(0, np.int64), none, none)
        return self.sequences.get(seq, nothing)

    def pos_max(self, seq: int) -> int:
        """Highest position in `seq`, -1 when it is empty."""
        return int(self.cells(seq).pos.max(initial=-1))

    def remove(self, seq: int, p0: int = 0, p1: int = END) -> None:
        """Forget the cells of `seq` in the range; the others keep their positions."""
        cells = self.cells(seq)
        self.sequences[seq] = cells.select((cells.pos < p0) | (cells.pos >= p1))

    def copy(self, src: int, dst: int, p0: int = 0, p1: int = END) -> None:
        """Let `dst` hold what `src` holds in the range, and nothing else."""
        if src != dst:
            cells = self.cells(src)
            self.sequences[dst] = cells.select((cells.pos >= p0) & (cells.pos < p1))

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move the cells in the range by `delta` positions."""
        self._move(seq, p0, p1, self.cells(seq).pos + delta)

    def div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of the cells in the range, rounding down."""
        self._move(seq, p0, p1, self.cells(seq).pos // d)

    def keep(self, seq: int) -> None:
        """Forget every sequence but `seq`."""
        self.sequences = {seq: self.cells(seq)}

    def clear(self) -> None:
        """Forget everything."""
        self.sequences = {}

    def _move(self, seq: int, p0: int, p1: int, moved: Ints) -> None:
        cells = self.cells(seq)
        pos = np.where((cells.pos >= p0) & (cells.pos < p1), moved, cells.pos)
        assert pos.min(initial=0) >= 0, f"a cell would move to position {pos.min()}"
        self.sequences[seq] = replace(cells, pos=pos)
