"""What comes from elsewhere while a sequence is evaluated."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Incoming"]


class Incoming(Protocol):
    """Cells that are being loaded; `SequenceCells` is asked before each part that is evaluated."""

    def meet(self, cells: Any) -> int | None:
        """Put what has come where it belongs; return where to ask again, None for nowhere."""

    def cancel(self) -> None:
        """Let it end: it is not needed any more."""
