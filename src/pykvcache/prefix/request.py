"""What a cache notes of a sequence of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pykvcache.prefix.report import Reason, ReuseReport
from pykvcache.sequence.cells import SequenceCells

if TYPE_CHECKING:
    from pykvcache.prefix.tiers.loader import Load

__all__ = ["Request"]


@dataclass(eq=False)
class Request:
    """A sequence as its cache sees it: the request, and its outcome.

    Attributes
    ----------
    cells
        What the context's memory holds of the sequence.
    space
        What its tokens are kept under: the namespace, with the adapters that are in use.
    boundaries
        Tokens after which messages end.
    keep
        Number of its first tokens that the cache gets at most; None for all.
    report, reason
        Where its tokens come from; why there are no more, put into words when `reuse` is read.
    search
        The search of the tiers that it still waits for.
    is_searched
        Whether the tiers were asked.
    is_counted
        Whether it counts in the cache's figures.
    """

    cells: SequenceCells
    namespace: str
    space: str
    priority: int = 0
    boundaries: tuple[int, ...] = ()
    keep: int | None = None
    report: ReuseReport = field(default_factory=ReuseReport)
    reason: Reason | None = None
    search: Load | None = None
    is_searched: bool = False
    is_counted: bool = False

    def __len__(self) -> int:
        return len(self.cells.ledger)

    @property
    def tokens(self) -> bytes:
        """All its tokens, as `token_bytes` gives them."""
        return self.cells.ledger.part(0, len(self)).tobytes()

    @property
    def reuse(self) -> ReuseReport:
        """The report, with the reason in words."""
        if self.reason is not None and not self.report.reason:
            self.report = replace(self.report, reason=str(self.reason))
        return self.report

    @property
    def usable(self) -> int:
        """How many of its tokens need no evaluation to give its next logits."""
        cells = self.cells
        n = cells.ledger.n_evaluated
        if n == len(cells.ledger) and cells.row is None:
            # Logits are made by a decode: of the last token, and of what cannot be gone back over.
            return cells.reachable(n - 1) if n else 0
        return cells.reachable(n)

    def row_at(self, n: int) -> npt.NDArray[np.float32] | None:
        """Return the logits after its first n tokens, where they are known."""
        cells = self.cells
        if n == len(self) and cells.row is not None:
            return cells.row
        row = cells.points.row
        return row[1] if row is not None and row[0] == n else None

    def set_shared(self) -> None:
        """Say that its prompt was evaluated for the request that it was forked from."""
        n = len(self)
        self.report, self.reason = ReuseReport(n, live=n), None

    def set_origin(self, *, disk: int, remote: int) -> None:
        """Say how many of its tokens in memory came from tiers just now."""
        ram = self.report.ram - disk - remote
        self.report = replace(self.report, ram=ram, disk=disk, remote=remote)
