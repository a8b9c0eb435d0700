"""Sequences that own their tokens.

=================  ================================================================
`sequence.py`      `LlamaSequence`: what users hold
`edits.py`         its tokens and the edits of them
`generation.py`    the iterators of `generate` and `stream`
`text.py`          stop strings, and text from tokens
`ledger.py`        tokens, and how many of them are evaluated
`cells.py`         what the context holds of a sequence: rewind, evaluate, park, fork
`length.py`        how long one can be
`pool.py`          ids and room of one context, shared by its sequences
`checkpoints.py`   where memories go back to that cannot be rewound
`twins.py`         the state of parked sequences that hold the same
`idle.py`          when idle sequences leave
`saved.py`         files
=================  ================================================================
"""

from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.generation import Generation, TextGeneration
from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["CheckpointPolicy", "Generation", "LlamaSequence", "TextGeneration"]
