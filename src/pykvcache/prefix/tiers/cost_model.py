"""Estimates, from past requests, of how long evaluating and loading take."""

from __future__ import annotations

__all__ = ["EvaluationTime", "Rate", "TierSpeed"]


class Rate:
    """Seconds per unit: the mean over about the last ``span`` units.

    Measurements are weighted by their units, so short ones, dominated by overhead, count little.
    The initial estimate counts as ``n`` units.
    """

    def __init__(self, seconds: float, span: float, n: float = 0.0) -> None:
        self.seconds = seconds
        self.n = n
        self._span = span

    def note(self, units: float, seconds: float) -> None:
        """Add a measurement."""
        self.n = min(self.n + units, self._span)
        self.seconds += min(1.0, units / self.n) * (seconds / units - self.seconds)


class EvaluationTime:
    """How long evaluating tokens takes; the caller holds the sequence pool's lock.

    Long prompts take more time per token, so each power of two of the length has its own rate.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self._unmeasured = seconds_per_token
        self._rates: dict[int, Rate] = {}

    def note(self, begin: int, end: int, seconds: float) -> None:
        """Add the measured time of evaluating the tokens ``[begin, end)``."""
        if end - begin >= 16:
            rate = self._rates.setdefault(end.bit_length(), Rate(0.0, span=4096))
            rate.note(end - begin, seconds)

    @property
    def is_learned(self) -> bool:
        """Whether any evaluation was measured."""
        return bool(self._rates)

    def seconds(self, begin: int, end: int) -> float:
        """Return the estimate for the tokens ``[begin, end)``."""
        if not self._rates:
            return self._unmeasured * (end - begin)
        nearest = min(self._rates, key=lambda bits: abs(bits - end.bit_length()))
        return self._rates[nearest].seconds * (end - begin)


class TierSpeed:
    """How long reading from a store takes: a time per search request, and a time per byte.

    The overhead of requests that read blocks is included in the time per byte.
    """

    def __init__(self, per_request: float, per_byte: float) -> None:
        self._request = Rate(per_request, span=8)
        self._byte = Rate(per_byte, span=16 << 20, n=1 << 20)
        #: Whether any read was timed.
        self.is_measured = False

    def note(self, n_bytes: int, seconds: float) -> None:
        """Add the time of a request that read n_bytes, or of a search if that is 0."""
        if n_bytes:
            self._byte.note(n_bytes, seconds)
            self.is_measured = True
        else:
            self._request.note(1, seconds)

    def seconds(self, n_bytes: int) -> float:
        """Return the estimate for a search, in two requests, and for reading n_bytes."""
        return 2 * self._request.seconds + n_bytes * self._byte.seconds
