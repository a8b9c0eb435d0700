"""What the demo counts, measures and compares with fresh runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt

from pykvcache.context import LlamaContext
from pykvcache.model import LlamaModel

__all__ = ["Fresh", "Meter", "Row"]

Logits = npt.NDArray[np.float32]

RIGHT = 1e-3
"""Logits that differ by less are the same: llama.cpp rounds differently batch by batch."""


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
        """Widen the tolerance to what the model itself gives or takes.

        Quantised weights round the activations too, so that the same tokens one by one
        and in one call differ by more than `RIGHT` with nothing remembered wrongly.
        """
        with self.context(len(tokens)) as ctx:
            for token in tokens:
                ctx.decode([token])
            self.tolerance = max(RIGHT, 4 * self.difference(ctx.logits(), tokens))


def apart(a: Logits, b: Logits) -> float:
    """Return the largest difference; infinite if there is a NaN."""
    worst = float(np.abs(a - b).max())
    return worst if worst == worst else float("inf")
