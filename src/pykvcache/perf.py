"""What llama.cpp measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PerfData"]


@dataclass(frozen=True)
class PerfData:
    """What ``llama_perf_context`` counted; times in milliseconds.

    llama.cpp counts a call with one token as generation and any other as prompt.
    """

    t_load_ms: float
    t_p_eval_ms: float
    t_eval_ms: float
    n_p_eval: int
    n_eval: int
    n_reused: int
