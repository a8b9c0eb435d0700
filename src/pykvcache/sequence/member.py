"""What the pool of a context's sequence ids needs to know of those that it lends them to."""

from __future__ import annotations

from typing import Protocol

from pykvcache.sequence.checkpoints import Checkpoints

__all__ = ["Member", "Stage"]


class Stage:
    """Where several run together: nobody who is on it is parked while it is on."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False


class Member(Protocol):
    """One that borrows an id, and can be parked; `SequenceCells` is one."""

    seq_id: int | None
    points: Checkpoints

    @property
    def n_held(self) -> int:
        """Tokens that the memory or the saved state holds."""

    @property
    def is_pinned(self) -> bool:
        """Whether it takes part in what runs now, and cannot be parked."""

    def trim(self) -> bool:
        """Give back the cells of tokens that were dropped; return whether there were any."""

    def park(self) -> None:
        """Give back all cells and the id, and keep the state."""
