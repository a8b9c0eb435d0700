"""A LlamaSequence that begins with what a cache knows, and gives it what it evaluated."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache.context import LlamaContext
from pykvcache.errors import DeviceLost
from pykvcache.prefix.reuse import ReuseReport
from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.state.saved import Path

if TYPE_CHECKING:
    from typing_extensions import Self

    from pykvcache.prefix.reason import Reason
    from pykvcache.prefix.tiers.fetch import Fetch
    from pykvcache.sequence.cells import SequenceCells

__all__ = ["CachedSequence"]


class Owner(Protocol):
    """What a sequence needs of its `PrefixCache`."""

    _keep_logits: bool

    def _joined(self, sequence: CachedSequence, parent: CachedSequence) -> None:
        """Take note of a new sequence, a fork of another; of one that was cleared it is not."""

    def _usable(self, cells: SequenceCells) -> int:
        """Return how many tokens of a new sequence need not be evaluated."""

    def _evaluated(self, sequence: CachedSequence) -> None:
        """Give other processes the blocks that they wait for."""

    def _give(self, sequence: CachedSequence) -> None:
        """Take over what a sequence evaluated, before it closes."""

    def _end_search(self, sequence: CachedSequence) -> None:
        """Give back what it has leased."""


class CachedSequence(LlamaSequence):
    """A sequence of a `PrefixCache`: made by its `sequence`, everything else as LlamaSequence.

    Closing it (or dropping it) gives the cache what it evaluated.
    """

    _cache: Owner
    _namespace: str
    _reuse = ReuseReport()  # of a fork that was cut short, too
    _reason: Reason | None = None  # put into words when it is asked for
    _counted: ReuseReport | None = None  # what the cache's sums have of it
    _search: Fetch | None = None
    _is_searched = False
    _pending: tuple[Fetch, float] | None = None  # the search that a request still waits for

    @property
    def reuse(self) -> ReuseReport:
        """How much of its prompt was known when it was made, or came from tiers since."""
        report, reason = self._reuse, self._reason
        if report.reason or reason is None:
            return report
        return replace(report, reason=reason.text)

    @property
    def namespace(self) -> str:
        """Whose tokens it shares."""
        return self._namespace

    def fork(self, n: SupportsIndex | None = None) -> Self:
        """As `LlamaSequence.fork`; the fork belongs to the cache, too."""
        child = super().fork(n)
        child._cache, child._namespace = self._cache, self._namespace
        with child._held():
            live = self._cache._usable(child._cells)
            self._cache._joined(child, self)
        child._reuse = ReuseReport(len(child), live=live, evaluated=len(child) - live)
        return child

    def _evaluated(self, row: npt.NDArray[np.float32] | None) -> None:
        cells = self._cells
        if row is not None and self._cache._keep_logits and len(self) == self._reuse.n_tokens:
            cells.points.row = len(self), row.copy()
            point = cells.points.at_most(len(self))
            if point is None or point.n < len(self):  # where one token alone was new
                cells.checkpoint()
        if self._search is not None:
            self._cache._evaluated(self)

    def evaluate(self) -> None:
        """As `LlamaSequence.evaluate`."""
        super().evaluate()
        if self._search is not None:
            with self._held():
                self._evaluated(None)

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

    def close(self) -> None:
        """Give the cache what was evaluated, and free the rest; twice does nothing."""
        if not self.is_closed:
            with self._cells.pool.hold():
                if not self._closed:
                    try:
                        self._cache._give(self)
                    except DeviceLost:
                        pass  # there is nothing left to give
                    except Exception:  # of a policy of the user's
                        super().close()
                        raise
        elif self._search is not None:  # its context was closed
            with self._cells.pool.hold():
                self._cache._end_search(self)
        super().close()

    def __del__(self) -> None:
        # In the middle of something else there is no giving: the cells are freed all the same, and
        # what it holds is released by the next call.
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
