"""How long evaluating and loading take, learned."""

from __future__ import annotations

import threading

__all__ = ["EvaluationTime", "TwoTerms"]

# What is learned counts less and less: a machine that was busy a minute ago may be idle.
_DECAY = 0.9
_LEAST = 1e-7


class TwoTerms:
    """``seconds = a * x + b * y`` with a and b of 0 or more, learned by relative least squares."""

    def __init__(self, a: float, b: float) -> None:
        self.a, self.b = a, b
        self.n = 0
        self._xx = self._xy = self._yy = self._x = self._y = 0.0
        self._lock = threading.Lock()

    def note(self, x: float, y: float, seconds: float) -> None:
        """Learn from one measurement."""
        seconds = max(seconds, _LEAST)
        with self._lock:
            if self.n:
                self._rescale(seconds / max(self.a * x + self.b * y, _LEAST), of_y=y > 0)
            x, y = x / seconds, y / seconds
            self.n += 1
            self._xx = _DECAY * self._xx + x * x
            self._xy = _DECAY * self._xy + x * y
            self._yy = _DECAY * self._yy + y * y
            self._x = _DECAY * self._x + x
            self._y = _DECAY * self._y + y
            self._solve()

    def _rescale(self, change: float, *, of_y: bool) -> None:
        """Scale both learned times if everything has become slower or faster.

        A measurement without y says nothing about b: if a was nearly 0, the change can have any
        size.
        """
        if 0.25 < change < 4:
            return
        other = change if of_y else 1.0
        self._xx /= change**2
        self._xy /= change * other
        self._yy /= other**2
        self._x /= change
        self._y /= other

    def _solve(self) -> None:
        a = b = -1.0
        det = self._xx * self._yy - self._xy * self._xy
        if det > 1e-6 * self._xx * self._yy:
            a = (self._x * self._yy - self._y * self._xy) / det
            b = (self._y * self._xx - self._x * self._xy) / det
        if a < 0 or b < 0:
            # One term explains it better alone: the one that leaves less.
            one = self._x / self._xx if self._xx else 0.0
            other = self._y / self._yy if self._yy else 0.0
            if one * self._x >= other * self._y:
                a, b = one, 0.0
            else:
                a, b = 0.0, other
        self.a, self.b = a, b

    def seconds(self, x: float, y: float) -> float:
        """Return the estimate."""
        return self.a * x + self.b * y


class EvaluationTime:
    """How long evaluating the tokens of ``[begin, end)`` takes: linear and quadratic terms.

    What is believed before anything was evaluated should rather be too little.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self._terms = TwoTerms(seconds_per_token, 0.0)

    def note(self, begin: int, end: int, seconds: float) -> None:
        """Learn from an evaluation of the tokens ``[begin, end)``."""
        if end - begin >= 16:
            self._terms.note(end - begin, float(end) ** 2 - float(begin) ** 2, seconds)

    @property
    def is_learned(self) -> bool:
        """Whether any evaluation was measured."""
        return self._terms.n > 0

    def seconds(self, begin: int, end: int) -> float:
        """Return the estimate for the tokens ``[begin, end)``."""
        return self._terms.seconds(end - begin, float(end) ** 2 - float(begin) ** 2)
