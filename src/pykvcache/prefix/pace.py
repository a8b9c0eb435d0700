"""Work beside an evaluation: writing behind, and getting memory in advance."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["SHARE", "Pace"]

#: While tokens are evaluated, work beside takes this part of the time of one processor. The threads
#: of a decode wait for each other: it delays them by as much and more, and at most 2 % is wanted.
SHARE = 0.005
# No pause is longer, in seconds: the machine may have been busy with other things.
_LONGEST_PAUSE = 0.5


class Pace:
    """Tells a thread how long to pause after each piece of work.

    Parameters
    ----------
    progress
        Returns a number that changes when tokens are evaluated.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self._progress, self._seen = progress, progress()

    def pause(self, worked: float) -> float:
        """Return for how many seconds; 0 where nothing was evaluated since it was asked last.

        ``worked``: seconds of a processor that the piece has taken.
        """
        seen, self._seen = self._seen, self._progress()
        return min(worked / SHARE, _LONGEST_PAUSE) if seen != self._seen else 0.0
