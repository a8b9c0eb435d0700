"""The prefix cache: keeps evaluated tokens, so that every prompt begins with its known prefix.

===================  =============================================================================
`cache.py`           `PrefixCache`: makes the parts below, and checks what users pass
`core.py`            `CacheCore`: the flow of a request through the parts
`sequence.py`        `CachedSequence`: begins with known tokens, and gives the cache its new ones;
                     `Request`: what a cache notes of it
`lookup.py`          what is known of a prompt, and the plan that follows
`admission.py`       what is taken over of a sequence that closes
`block_cache.py`     `BlockCache`: the tree, within a budget; one change at a time; pins
`tree.py`            `PrefixTree`: which tokens are known, with which cells; what leaves first
`node.py`            `Node` and `Component`: attention cells, window cells, a state
`match.py`           `Match`, `Offer`, `Plan`: what the tree has of a prompt, and what it lacks
`block_hash.py`      names of blocks: a hash chain over all tokens before
`memory.py`          `CacheMemory`: the one seam to llama.cpp's memory
`tier_link.py`       `TierLink`: the one seam to the tiers
`policies/`          what leaves first, one class each
`tiers/`             stores below memory: searched ahead, written behind
`stores/`            where blocks outlive the process: folder, Redis, object store
`report.py`          where tokens came from, and why there were no more
`events.py`          what was stored and removed; `zmq_events.py` and `prometheus.py` send it on
===================  =============================================================================

`tree.py` and what it imports need errors and NumPy only; `pykvcache.simulate` uses it without a
model.
"""
