"""Tiers of a prefix cache: stores below its memory, written behind and searched ahead.

=================  =================================================================
`tier.py`          `Tier`: a sealed store, what is known to be in it, how fast it is;
                   `Notices`: events of what it has
`cost_model.py`    how long evaluating and loading take, learned; how long to wait
`writer.py`        `Writer`: a thread per tier, and a queue with a limit
`loader.py`        `Load`: the search for one prompt, in a thread of its own;
                   `End`: what a memory holds at one place of a prompt, without full blocks
`stack.py`         `Tiers`: all of a cache, the nearest first
=================  =================================================================

Nothing here knows llama.cpp: blocks are bytes. `pykvcache.prefix.tier_link` lies between this
and the cache.
"""
