"""llama.h from a Cython class without checks: C plus a method call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from benchmarks.peers.primitives import Answer, Rows
from benchmarks.peers.worker import Worker, serve

sys.path.insert(0, os.environ["PYKVCACHE_BENCH_NATIVE"])
import bench_thin


class Thin(Worker):
    """Memory operations only."""

    STATEMENTS: ClassVar[dict[str, str]] = {
        "pos_max": "thin.pos_max(0)",
        "pos_min": "thin.pos_min(0)",
        "can_shift": "thin.can_shift()",
        "copy": "thin.copy(0, s, -1, -1)",
        "copy_part": "thin.copy(0, s, 0, 8)",
        "copy_over": "thin.remove(s, -1, -1)\nthin.copy(0, s, -1, -1)",
        "remove": "thin.remove(s, -1, -1)",
        "remove_part": "thin.remove(s, 8, 16)",
        "keep": "thin.keep(0)",
        "add": "thin.add(s, -1, -1, delta)",
        "div": "thin.div(s, -1, -1, 2)",
    }

    def __init__(self) -> None:
        super().__init__()
        self.thin: Any = None

    def facts(self) -> Answer:
        """Return versions."""
        return {"binding": "llama.h from Cython, without a check"}

    def open(self, model: str | None, **options: Any) -> None:
        """Open a context."""
        assert model is not None
        names = ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "threads")
        numbers = [options[name] for name in (*names, "flash_attn", "type_k", "type_v")]
        self.thin = bench_thin.Thin(model.encode(), *numbers)
        self.names = {"thin": self.thin}
        self.n_vocab = self.thin.n_vocab()

    def reported(self) -> Answer:
        """Return the context's settings."""
        settings: Answer = self.thin.settings()
        return settings

    def step(self, rows: Rows) -> Callable[[], object]:
        """Return a function that decodes a batch."""
        return lambda: self.thin.decode(self.places(rows))

    def end(self, seq: int) -> int:
        """Return the position after the last token."""
        return int(self.thin.pos_max(seq)) + 1

    def remove(self, seq: int) -> None:
        """Empty a sequence."""
        self.thin.remove(seq, -1, -1)

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        self.thin.copy(src, dst, -1, -1)

    def clear(self) -> None:
        """Empty everything."""
        self.thin.remove(-1, -1, -1)


if __name__ == "__main__":
    serve(Thin())
