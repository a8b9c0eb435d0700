"""CachedSequence: starts with cached tokens; its cache stores the new ones."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import IntArray, as_int
from pykvcache.errors import DeviceLost
from pykvcache.prefix.report import Reason, ReuseReport
from pykvcache.sequence.cells import SequenceCells
from pykvcache.sequence.sequence import LlamaSequence

if TYPE_CHECKING:
    from typing_extensions import Self

    from pykvcache.prefix.core import CacheCore
    from pykvcache.prefix.tiers.loader import Load

__all__ = ["CachedSequence", "Request", "request_of"]


@dataclass(eq=False)
class Request:
    """The cache's record of a sequence."""

    cells: SequenceCells
    namespace: str
    space: str  # its namespace and the adapters in use (see `block_hash.space_of`)
    priority: int = 0
    boundaries: tuple[int, ...] = ()  # numbers of tokens after which messages end
    keep: int | None = None  # maximum number of its first tokens to store
    report: ReuseReport = field(default_factory=ReuseReport)
    reason: Reason | None = None  # formatted when `reuse` is read
    search: Load | None = None  # the search of the tiers that it waits for
    is_searched: bool = False  # whether the tiers were searched
    is_counted: bool = False  # whether the cache's statistics count it

    def __len__(self) -> int:
        return len(self.cells.ledger)

    @property
    def shareable(self) -> IntArray:
        """The tokens that it can share: all, or those before an adapter is activated."""
        ledger = self.cells.ledger
        return ledger.part(0, ledger.n_base)

    @property
    def reuse(self) -> ReuseReport:
        """The report, with the reason as text."""
        if self.reason is not None and not self.report.reason:
            self.report = replace(self.report, reason=str(self.reason))
        return self.report

    @property
    def usable(self) -> int:
        """Number of its first tokens that need no evaluation before its next logits."""
        cells = self.cells
        n = cells.ledger.n_evaluated
        if n == len(cells.ledger) and cells.row is None:
            # Logits need a decode from the last point before the end that can be rewound to.
            return cells.reachable(n - 1) if n else 0
        return cells.reachable(n)

    def row_at(self, n: int) -> npt.NDArray[np.float32] | None:
        """Return the logits after its first n tokens, if they are cached."""
        cells = self.cells
        if n == len(self) and cells.row is not None:
            return cells.row
        row = cells.points.row
        return row[1] if row is not None and row[0] == n else None

    def set_shared(self) -> None:
        """Report that its prompt was evaluated for the request that it was forked from."""
        n = len(self)
        self.report, self.reason = ReuseReport(n, live=n), None


class CachedSequence(LlamaSequence):
    """A sequence made by `PrefixCache.sequence`; otherwise like `LlamaSequence`.

    When it is closed or garbage-collected, the cache stores the keys and values that it computed.
    """

    _core: CacheCore
    _request: Request
    load = LlamaSequence.load  # returns a plain sequence

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

    def _evaluated(self, row: npt.NDArray[np.float32]) -> None:
        cells, n = self._cells, self._request.report.n_tokens
        if self._core.keep_logits and n == len(self):
            cells.points.row = n, row.copy()
            if n not in cells.points.states:
                cells.checkpoint()  # a single new token takes none by itself

    def close(self, *, keep: SupportsIndex | None = None) -> None:
        """Let the cache store the evaluated tokens, and free the cells. Idempotent.

        Parameters
        ----------
        keep
            Number of first tokens that the cache stores, for example without the model's reasoning.
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
                        pass  # nothing is left to store
                    finally:  # even if a user's policy raises
                        super().close()
        else:
            super().close()

    def __del__(self) -> None:
        # During another call nothing can be stored. The cells are freed anyway, and its holds are
        # released by the next change.
        cells = getattr(self, "_cells", None)
        if cells is None or self._closed or self._context.is_closed:
            return
        with contextlib.suppress(Exception):
            cells.pool.if_quiet(self.close)


def request_of(sequence: LlamaSequence) -> Request | None:
    """Return the cache's record of a sequence, or None if it belongs to no cache."""
    return sequence._request if isinstance(sequence, CachedSequence) else None
