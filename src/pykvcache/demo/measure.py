"""What the demo counts, measures and compares with fresh runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt

from pykvcache.batch import LlamaBatch
from pykvcache.context import LlamaContext
from pykvcache.errors import InvalidBatch
from pykvcache.model import LlamaModel

__all__ = ["Fresh", "Meter", "Row"]

Logits = npt.NDArray[np.float32]

RIGHT = 1e-3
"""Logits that differ by less are the same: llama.cpp rounds differently batch by batch."""

COARSE = 0.05
"""Noise above this is that of quantised weights."""

ELSEWHERE = (64, 100, 300)
"""Other positions to evaluate the same tokens at."""


@dataclass
class Row:
    """One operation in the table at the end."""

    operation: str
    tokens: int = 0
    tokens_anew: int = 0
    seconds: float = 0.0
    differences: list[float] = field(default_factory=list)
    note: str = ""
    """A mark that refers to a line under the table, or why nothing was compared."""


class Meter:
    """Counts the tokens that a context evaluates in a ``with`` block, and the time."""

    def __init__(self, ctx: LlamaContext) -> None:
        self._ctx = ctx
        self.tokens = 0
        self.seconds = 0.0

    def __enter__(self) -> Meter:
        self._tokens = self._ctx.tokens_evaluated
        self._start = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._start
        self.tokens += self._ctx.tokens_evaluated - self._tokens


class Fresh:
    """Makes contexts that compute exactly, and runs tokens in new ones.

    K and V are stored as float32 and flash attention is off, as it rounds them to
    float16: the same tokens then give the same logits in whatever parts they come.

    Parameters
    ----------
    model
        The model.
    n_threads
        Threads per context.
    """

    def __init__(self, model: LlamaModel, n_threads: int | None) -> None:
        self._model = model
        self._n_threads = n_threads
        self.noise = 0.0
        self.tolerance = RIGHT

    def context(self, n_ctx: int, n_seq_max: int = 1) -> LlamaContext:
        """Return a new context."""
        return LlamaContext(
            self._model,
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_threads=self._n_threads,
            type_k="f32",
            type_v="f32",
            flash_attn="disabled",
        )

    def logits(self, tokens: list[int]) -> Logits:
        """Return the logits after these tokens, evaluated in one call by a new context."""
        with self.context(len(tokens)) as ctx:
            ctx.decode(tokens)
            return ctx.logits()

    def difference(self, logits: Logits, tokens: list[int]) -> float:
        """Return how far logits are from those of a fresh run over the tokens."""
        return apart(logits, self.logits(tokens))

    def calibrate(self, tokens: list[int]) -> None:
        """Measure how far rounding alone moves the logits of this model, and allow for it.

        The same tokens are evaluated at several places. Attention looks at distances, so the
        logits are the same but for rounding, which float16 and above all quantised
        weights pass on: they round activations too, and a last bit may flip a step.
        """
        here = self._logits_at(tokens, 0)
        try:
            self.noise = max(apart(here, self._logits_at(tokens, start)) for start in ELSEWHERE)
        except InvalidBatch:  # positions index the cells, and begin at 0
            self.noise = 0.0
        self.tolerance = max(RIGHT, self.noise * self.factor)

    @property
    def factor(self) -> int:
        """How many times as far as by rounding alone logits may be off."""
        return 2 if self.is_coarse else 5

    @property
    def is_coarse(self) -> bool:
        """Whether rounding moves logits so far that small errors would not be seen."""
        return self.noise > COARSE

    def _logits_at(self, tokens: list[int], start: int) -> Logits:
        n = len(tokens)
        where = np.arange(start, start + n, dtype=np.int32)
        wanted = np.arange(n) == n - 1
        with self.context(n) as ctx:
            ctx.decode(LlamaBatch.from_arrays(tokens, where, 0, wanted))
            return ctx.logits()


def apart(a: Logits, b: Logits) -> float:
    """Return the largest difference; infinite if there is a NaN."""
    worst = float(np.abs(a - b).max())
    return worst if worst == worst else float("inf")
