"""Replay traces of prompts against policies of eviction, without a model.

=================  ================================================================
`traces.py`        `Trace`, and readers of the formats
`workloads.py`     made-up traces, for every way in which prompts share beginnings
`record.py`        a cache's own lookups as a trace
`replay.py`        one trace, one policy, one size: how many tokens were there
`clairvoyant.py`   the most that any policy could have found
`report.py`        many of them: a table, a picture
`__main__.py`      ``python -m pykvcache.simulate TRACE ...``
=================  ================================================================

The tree and the policies are those of the cache. No model is needed, and no compiled layer.
"""

from pykvcache.simulate.clairvoyant import most_hits
from pykvcache.simulate.record import record
from pykvcache.simulate.replay import Result, replay
from pykvcache.simulate.report import Report, compare, draw
from pykvcache.simulate.traces import Trace, read_trace
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
