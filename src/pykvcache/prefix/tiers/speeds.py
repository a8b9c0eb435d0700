"""Load or recompute: what is known of how long either takes, and the rule.

With T the time that evaluating would take and E the estimate of loading:

- E over 20 T: nothing is loaded.
- E below T/2: the request waits for it, 0.04 T at most.
- Else, and after that wait: both. Evaluation begins at the front, loading at the back, and they
  meet (arXiv 2410.03065). So the worst case is the wait, and what joining costs.
"""

from __future__ import annotations

import threading

__all__ = ["EvaluationTime", "TwoTerms", "load_wait", "next_chunk"]

#: Estimates over this many times the evaluation are not tried.
HOPELESS = 20.0
#: Below this part of the evaluation, a request waits.
NEAR = 0.5
#: For how long: a part of the evaluation.
PATIENCE = 0.04

#: Tokens that are evaluated before it is looked what has come, at least.
LEAST_PART = 256

# What is learned counts less and less: a machine that was busy a minute ago may be idle.
_DECAY = 0.9
_LEAST = 1e-7


class TwoTerms:
    """``seconds = a * x + b * y`` with a and b of 0 or more, learned by relative least squares.

    Parameters
    ----------
    a, b
        What is believed before anything was measured.
    """

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
        """Where everything has become slower, or faster, what was learned of its shape stays.

        What was measured without y says nothing of b: where a was thought to be nearly 0, such a
        change is of any size.
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
    """How long it takes to evaluate tokens: ``a n + b n**2``, learned.

    Parameters
    ----------
    seconds_per_token
        What is believed before anything was evaluated; too little is the safe side.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self._terms = TwoTerms(seconds_per_token, 0.0)

    def note(self, begin: int, end: int, seconds: float) -> None:
        """Learn from an evaluation of the tokens ``[begin, end)``."""
        if end - begin >= 16:
            self._terms.note(end - begin, float(end) ** 2 - float(begin) ** 2, seconds)

    def seconds(self, begin: int, end: int) -> float:
        """Return the estimate for the tokens ``[begin, end)``."""
        return self._terms.seconds(end - begin, float(end) ** 2 - float(begin) ** 2)


def load_wait(estimate: float, evaluation: float) -> float | None:
    """Return how many seconds a request waits for tiers; None where they are not worth asking.

    Parameters
    ----------
    estimate
        Seconds that loading is thought to take.
    evaluation
        Seconds that evaluating is thought to take.
    """
    if estimate > HOPELESS * evaluation:
        return None
    return PATIENCE * evaluation if estimate < NEAR * evaluation else 0.0


def next_chunk(pending: int, seconds: float, n_ubatch: int) -> int:
    """Return how many tokens to evaluate before looking what has come.

    Parameters
    ----------
    pending
        Tokens that are to be evaluated.
    seconds
        How long all of them are thought to take.
    n_ubatch
        Tokens that are computed together: parts of this size cost nothing.
    """
    # Not below 50 ms: a part has costs of its own. In parts of 102 tokens all takes 30 % longer.
    part = max(0.05, 0.05 / seconds if seconds > 0 else 1.0)
    return max(1, min(n_ubatch, max(LEAST_PART, int(part * pending))))
