"""A LlamaSequence that begins with what a cache knows, and gives it what it evaluated."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._convert import as_int
from pykvcache.context import LlamaContext
from pykvcache.errors import DeviceLost
from pykvcache.prefix.report import Reason, ReuseReport
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.state.saved import Path

if TYPE_CHECKING:
    from typing_extensions import Self

    from pykvcache.prefix.tier_link import Search

__all__ = ["CachedSequence"]


class Owner(Protocol):
    """What a sequence needs of its `PrefixCache`."""

    @property
    def keep_logits(self) -> bool:
        """Whether the logits after each prompt are kept."""

    def joined(self, sequence: CachedSequence, parent: CachedSequence) -> None:
        """Take note of a fork."""

    def give(self, sequence: CachedSequence, n: int | None) -> None:
        """Take over what a sequence evaluated, or its first n tokens, before it closes."""


class CachedSequence(LlamaSequence):
    """A sequence of a `PrefixCache`: made by its `sequence`, everything else as LlamaSequence.

    Closing it (or dropping it) gives the cache what it evaluated.
    """

    _cache: Owner
    _namespace: str
    _report = ReuseReport()
    _reason: Reason | None = None  # put into words when it is read
    #: Tokens after which messages end.
    boundaries: tuple[int, ...] = ()
    #: Of what it gives to the cache: lower ones leave first.
    priority: int = 0
    #: The search of the tiers that it still waits for.
    search: Search | None = None
    #: Whether the tiers were asked; whether it counts as a request in the cache's figures.
    is_searched = is_counted = False

    @property
    def reuse(self) -> ReuseReport:
        """How much of its prompt was known when it was made, or came from tiers since."""
        if self._reason is not None and not self._report.reason:
            self._report = replace(self._report, reason=str(self._reason))
        return self._report

    @property
    def namespace(self) -> str:
        """Whose tokens it shares."""
        return self._namespace

    @property
    def cells(self) -> SequenceCells:
        """What the context's memory holds of it."""
        return self._cells

    @property
    def report(self) -> ReuseReport:
        """As `reuse`, without the reason in words."""
        return self._report

    @property
    def usable(self) -> int:
        """How many of its tokens need no evaluation to give its next logits."""
        cells = self._cells
        n = cells.ledger.n_evaluated
        if cells.row is None and n == len(cells.ledger):
            # Logits are made by a decode: of the last token, and of what cannot be gone back over.
            return cells.reachable(n - 1) if n else 0
        return cells.reachable(n)

    # What its cache notes -----------------------------------------------------------------------

    def _join(self, cache: Owner, namespace: str) -> None:
        self._cache, self._namespace = cache, namespace

    def set_report(self, report: ReuseReport, reason: Reason) -> None:
        """Say where its tokens come from."""
        self._report, self._reason = report, reason

    def set_origin(self, *, disk: int, remote: int) -> None:
        """Say how many of its tokens in memory came from tiers just now."""
        report = self._report
        self._report = replace(report, ram=report.ram - disk - remote, disk=disk, remote=remote)

    # What it does otherwise than a plain sequence -------------------------------------------------

    def fork(self, n: SupportsIndex | None = None) -> Self:
        """As `LlamaSequence.fork`; the fork belongs to the cache, too."""
        child = super().fork(n)
        child._join(self._cache, self._namespace)
        child.priority = self.priority
        child.is_searched = True
        with child._held():
            self._cache.joined(child, self)
            live = child.usable
        child._report = ReuseReport(len(child), live=live, evaluated=len(child) - live)
        return child

    def _evaluated(self, row: npt.NDArray[np.float32] | None) -> None:
        cells, n = self._cells, len(self)
        if row is not None and self._cache.keep_logits and n == self._report.n_tokens:
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
        """Give the cache what was evaluated, and free the rest; twice does nothing.

        Parameters
        ----------
        keep
            How many of its first tokens the cache gets: without a model's thinking, say. None for
            all.
        """
        n = None if keep is None else as_int(keep, "keep", 0)
        if not self.is_closed:
            with self._cells.pool.hold():
                if not self._closed:
                    try:
                        self._cache.give(self, n)
                    except DeviceLost:
                        pass  # there is nothing left to give
                    except Exception:  # of a policy of the user's
                        super().close()
                        raise
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
