"""A context and the NumPy ledger side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from memory.kit import apart
from pykvcache import LlamaContext
from support.ledger import END
from support.models import RIGHT
from support.numpy_llama import LedgerLlama
from support.numpy_variants import make_ledger


class Twin:
    """Every call goes to a context and to a ledger; after decodes their logits are compared."""

    def __init__(self, ctx: LlamaContext, path: Path, tolerance: float = RIGHT) -> None:
        self.ctx = ctx
        self.ledger: LedgerLlama = make_ledger(path)
        self.tolerance = tolerance
        self._rng = np.random.default_rng(5)

    def decode(self, seq: int, n: int) -> float:
        """Decode n random tokens; the difference of the last logits, which must be small."""
        tokens = self._rng.integers(5, self.ctx.model.n_vocab - 2, n, dtype=np.int32)
        self.ctx.decode(tokens, seq_id=seq)
        difference = apart(self.ctx.logits(), self.ledger.append(seq, tokens))
        assert difference < self.tolerance, f"sequence {seq} is {difference:.2g} off"
        self.positions()
        return difference

    def remove(self, seq: int, p0: int | None = None, p1: int | None = None) -> None:
        assert self.ctx.clear_kv_cache_seq(seq, p0, p1)
        self.ledger.remove(seq, *span(p0, p1))
        self.positions()

    def copy(self, src: int, dst: int, p0: int | None = None, p1: int | None = None) -> None:
        self.ctx.copy_kv_cache_seq(src, dst, p0, p1)
        self.ledger.copy(src, dst, *span(p0, p1))
        self.positions()

    def add(self, seq: int, p0: int | None, p1: int | None, delta: int) -> None:
        self.ctx.kv_cache_seq_add(seq, p0, p1, delta)
        self.ledger.add(seq, *span(p0, p1), delta)
        self.positions()

    def div(self, seq: int, p0: int | None, p1: int | None, d: int) -> None:
        self.ctx.kv_cache_seq_div(seq, p0, p1, d)
        self.ledger.div(seq, *span(p0, p1), d)
        self.positions()

    def update(self) -> None:
        self.ctx.kv_cache_update()
        self.positions()

    def positions(self) -> None:
        """Both say the same positions; a window may hold less than the sequence means."""
        for seq in range(self.ctx.n_seq_max):
            pos: Any = self.ledger.cells(seq).pos
            first, last = (int(pos.min()), int(pos.max())) if len(pos) else (-1, -1)
            assert self.ctx.kv_cache_seq_pos_max(seq) == last, f"highest of sequence {seq}"
            lowest = self.ctx.kv_cache_seq_pos_min(seq)
            if self.ctx.model.n_swa and len(pos):
                assert first <= lowest <= last, f"lowest of sequence {seq}"
            else:
                assert lowest == first, f"lowest of sequence {seq}"


def span(p0: int | None, p1: int | None) -> tuple[int, int]:
    """The ledger's way to write a range."""
    return (0 if p0 is None else p0, END if p1 is None else p1)
