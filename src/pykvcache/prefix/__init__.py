"""The prefix cache: keeps evaluated tokens, so that a prompt resumes from its cached prefix.

===================  =============================================================================
`cache.py`           `PrefixCache`: the public class
`core.py`            `CacheCore`: the flow of a request, from lookup to storing
`sequence.py`        `CachedSequence`; `Request`: the cache's record of one
`lookup.py`          finds the longest cached prefix; decides whether to fork or restore it
`block_cache.py`     `BlockCache`: the tree with its budget; one change at a time; pins
`tree.py`            `PrefixTree`: the radix tree and its eviction; `tree_view.py` shows it
`node.py`            `Node` and `Component`: attention cells, window cells, a state;
                     `Match`, `Offer`, `Plan`: what the tree has of a prompt, and what it lacks
`block_hash.py`      block hashes (called names): a hash chain over all tokens before
`memory.py`          `CacheMemory`: the only module that accesses llama.cpp's memory
`tier_link.py`       `TierLink`: searches, loads and writes of a cache; `prefetch.py` uses it
`policies/`          eviction policies, one class each
`tiers/`             stores below RAM: background loads and write-behind
`stores/`            storage that outlives the process: folder, Redis, object store
`report.py`          statistics: where tokens came from, and why no more were reused
`events.py`          block events; `zmq_events.py` and `prometheus.py` export them
===================  =============================================================================

`tree.py` and its imports need only errors and NumPy; `pykvcache.simulate` uses it without a model.
"""
