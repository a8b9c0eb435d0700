"""llama.h from a Cython class without a single check: C plus the call of a method."""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

from benchmarks.peers.worker import Answer, Worker, serve

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
        "add": "thin.add(s, -1, -1, 1)",
        "div": "thin.div(s, -1, -1, 2)",
    }

    def __init__(self) -> None:
        super().__init__()
        self.thin: Any = None

    def facts(self) -> Answer:
        """Return versions."""
        return {"binding": "llama.h from Cython, without a check"}

    def open(self, **options: Any) -> None:
        """Open a context."""
        path = options["model"].encode()
        sizes = [options[key] for key in ("n_ctx", "n_seq_max", "n_batch", "threads")]
        self.thin = bench_thin.Thin(path, *sizes)
        self.names = {"thin": self.thin}
        self.n_vocab = options.get("n_vocab", 800)

    def decode_rows(self, rows: list[tuple[int, int, int]]) -> None:
        """Decode one batch."""
        self.thin.decode(self.places(rows))

    def extend(self, seq: int, n: int) -> None:
        """Append tokens."""
        self.decode_rows([(self.thin.pos_max(seq) + 1, n, seq)])

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
