"""Replay traces of prompts against eviction policies, without a model.

=================  ================================================================
`traces.py`        `Trace`; reads trace files, and records a cache's lookups as one
`workloads.py`     synthetic traces, one for each way in which prompts share prefixes
`replay.py`        replays one trace with one policy and one size; upper bound of all policies
`report.py`        compares policies: tables and pictures
`__main__.py`      ``python -m pykvcache.simulate TRACE ...``
=================  ================================================================

Uses the cache's own tree and policies. Needs no model and no compiled layer.
"""

from pykvcache.simulate.replay import Result, most_hits, replay
from pykvcache.simulate.report import Report, compare, draw
from pykvcache.simulate.traces import Trace, read_trace, record
from pykvcache.simulate.workloads import WORKLOADS, workload

__all__ = [
    "WORKLOADS",
    "Report",
    "Result",
    "Trace",
    "compare",
    "draw",
    "most_hits",
    "read_trace",
    "record",
    "replay",
    "workload",
]
