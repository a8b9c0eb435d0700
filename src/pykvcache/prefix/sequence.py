"""CachedSequence: starts with cached tokens, and gives the new ones to its cache."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import as_int
from pykvcache.context import LlamaContext
from pykvcache.errors import DeviceLost
from pykvcache.prefix.report import ReuseReport
from pykvcache.prefix.request import Request
from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.state.saved import Path

if TYPE_CHECKING:
    from typing_extensions import Self

    from pykvcache.prefix.core import CacheCore

__all__ = ["CachedSequence", "request_of"]


class CachedSequence(LlamaSequence):
    """A sequence of a `PrefixCache`, made by `PrefixCache.sequence`; else like LlamaSequence.

    Closing it, or garbage collection, gives the tokens that it evaluated to the cache.
    """

    _core: CacheCore
    _request: Request

    @property
    def reuse(self) -> ReuseReport:
        """How many tokens of its prompt came from the cache, and why not more."""
        return self._request.reuse

    @property
    def namespace(self) -> str:
        """Namespace of the prefixes that it shares."""
        return self._request.namespace

    def fork(self, n: SupportsIndex | None = None) -> Self:
        """Return a fork, as `LlamaSequence.fork` does; it also belongs to the cache."""
        child = super().fork(n)
        child._core = self._core
        child._request = Request(
            child._cells, self.namespace, self._request.space, self._request.priority
        )
        with child._held():
            self._core.join(child._request, self._request)
        return child

    def _evaluated(self, row: npt.NDArray[np.float32] | None) -> None:
        cells, n = self._cells, self._request.report.n_tokens
        if row is not None and self._core.keep_logits and n == len(self):
            cells.points.row = n, row.copy()
            if not cells.points.has_state_at(n):
                cells.checkpoint()  # where one token alone was new

    @classmethod
    def load(
        cls,
        context: LlamaContext,
        path: Path,
        *,
        checkpoints: CheckpointPolicy | None = None,
        convert: bool = False,
    ) -> LlamaSequence:
        """Return a plain sequence from a file, as `LlamaSequence.load`."""
        return LlamaSequence.load(context, path, checkpoints=checkpoints, convert=convert)

    def close(self, *, keep: SupportsIndex | None = None) -> None:
        """Give the evaluated tokens to the cache, and free the cells. Idempotent.

        Parameters
        ----------
        keep
            Number of first tokens that the cache gets, for example without the model's reasoning.
            Default: all.
        """
        if keep is not None:
            self._request.keep = as_int(keep, "keep", 0)
        if not self.is_closed:
            with self._cells.pool:
                if not self._closed:
                    try:
                        self._core.give(self._request)
                    except DeviceLost:
                        pass  # there is nothing left to give
                    finally:  # also where a policy of the user's raises
                        super().close()
        else:
            super().close()

    def __del__(self) -> None:
        # In the middle of another call there is no giving: the cells are freed all the same, and
        # what it holds is released with the next change.
        cells = getattr(self, "_cells", None)
        if cells is None or self._closed or self._context.is_closed:
            return
        if cells.pool.lock.acquire(blocking=False):
            try:
                if cells.pool.is_quiet:
                    with contextlib.suppress(Exception):
                        self.close()
            finally:
                cells.pool.lock.release()


def request_of(sequence: LlamaSequence) -> Request | None:
    """Return what the cache of a sequence notes of it; None where it belongs to none."""
    return sequence._request if isinstance(sequence, CachedSequence) else None
