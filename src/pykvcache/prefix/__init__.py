"""The prefix cache: blocks that are stored once, found by their tokens, and evicted by a policy.

=================  ================================================================
`blocks.py`        names of blocks: a hash chain over all tokens before
`runs.py`          nodes of the tree: blocks that were always used together
`tree.py`          `BlockTree`: the longest known beginning, the budget, what may go
`policies/`        what goes first, one class each
`stores/`          where blocks outlive the process: folder, Redis, object store
=================  ================================================================

These need errors and NumPy only; `pykvcache.simulate` uses them without a model.
"""
