"""Tiers of a prefix cache: stores below its memory, written behind and read ahead.

================  =================================================================
`ends.py`         `End`: what a memory holds beside blocks at one place of a prompt
`tier.py`         `Tier`: a sealed store, what is known to be in it, how fast it is
`speeds.py`        how fast evaluating and a tier are, as learned
`leases.py`        `Lease`: who of many processes evaluates what is missing
`notices.py`      `Notices`: events of what a tier has
`writing.py`      `WriteBehind`: a thread per tier, a queue that has an end
`fetch.py`        `Fetch`: the search for one prompt, in a thread of its own
`stack.py`        `Tiers`: all of a cache, the nearest first
================  =================================================================

Nothing here knows llama.cpp: blocks are bytes. `pykvcache.prefix.below` lies between this
and the cache.
"""
