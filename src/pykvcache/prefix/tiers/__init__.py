"""Tiers of a prefix cache: stores below its memory, written behind and searched ahead.

=================  =================================================================
`records.py`       `End`: what a memory holds at one place of a prompt, without full blocks
`tier.py`          `Tier`: a sealed store, what is known to be in it, how fast it is
`cost_model.py`    how long evaluating and loading take, learned; how long to wait
`notices.py`       `Notices`: events of what a tier has
`writer.py`        `Writer`: a thread per tier, and a queue with a limit
`loader.py`        `Load`: the search for one prompt, in a thread of its own
`stack.py`         `Tiers`: all of a cache, the nearest first
=================  =================================================================

Nothing here knows llama.cpp: blocks are bytes. `pykvcache.prefix.tier_link` lies between this
and the cache.
"""
