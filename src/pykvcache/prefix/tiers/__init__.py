"""Tiers of a prefix cache: stores below RAM, with write-behind queues and background loads.

=================  =================================================================
`tier.py`          `Tier`: a sealed store, its known keys, its speed and its counters;
                   `Notices`: its events; `EvaluationTime`: how long evaluating takes
`writer.py`        `Writer`: a write-behind queue and its thread, one per tier
`loader.py`        `Load`: the search for one prompt, in a thread; `TailRecord`
=================  =================================================================

Records are bytes here; `pykvcache.prefix.tier_link` connects the tiers to the cache.
"""
