"""Sequences that own their tokens.

=================  ================================================================
`sequence.py`      `LlamaSequence`: what users hold; the iterators of `generate` and `stream`
`text.py`          stop strings, and text from tokens
`ledger.py`        tokens, and how many of them are evaluated
`cells.py`         what the context holds of a sequence: rewind, evaluate, park, fork
`pool.py`          ids and room of one context, shared by its sequences
`checkpoints.py`   where memories go back to that cannot be rewound
`logprobs.py`      log-probabilities of tokens, by id and as text
`saved.py`         files
=================  ================================================================
"""

from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.logprobs import TokenLogprob
from pykvcache.sequence.sequence import Generation, LlamaSequence, TextGeneration

__all__ = ["CheckpointPolicy", "Generation", "LlamaSequence", "TextGeneration", "TokenLogprob"]
