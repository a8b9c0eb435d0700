"""Requests of the group *generate*; `benchmarks/c/bench_many.c` has the same ones."""

from __future__ import annotations

from typing import NamedTuple

#: Sampling parameters of all contestants.
TEMPERATURE = 0.8
TOP_K = 40


class Request(NamedTuple):
    """A prompt of ``length`` tokens from place ``start`` on, and the number of new tokens."""

    start: int
    length: int
    new: int
    arrival: int
    """The step before which it arrives."""


def workload(what: str) -> list[Request]:
    """Return the requests: ``best`` of 8, 16 ``prompts``, or ``arrivals`` of mixed lengths."""
    if what == "best":
        return [Request(0, 32, 64, 0)] * 8
    if what == "prompts":
        return [Request(100 * i, 32, 64, 0) for i in range(16)]
    lengths = [(8 + i * 37 % 57, 16 + i * 53 % 81) for i in range(48)]
    return [Request(100 * i, n, new, 2 * i) for i, (n, new) in enumerate(lengths)]
