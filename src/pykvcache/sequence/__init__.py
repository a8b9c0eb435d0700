"""Sequences that own their tokens.

====================  ================================================================
`sequence.py`         `LlamaSequence`, the public class; the iterators of `generate` and `stream`
`text.py`             stop strings, and text from tokens
`ledger.py`           tokens, and how many of them are evaluated
`cells.py`            a sequence's cells or saved state: rewind, evaluate, park, fork
`pool.py`             sequence ids and cells of one context, shared by its sequences
`checkpoints.py`      rollback points for memories that cannot be rewound
`logprobs.py`         log-probabilities of tokens, by id and as text
`saved.py`            files
====================  ================================================================
"""

from pykvcache.sequence.checkpoints import CheckpointPolicy
from pykvcache.sequence.logprobs import TokenLogprob
from pykvcache.sequence.sequence import Generation, LlamaSequence, TextGeneration

__all__ = ["CheckpointPolicy", "Generation", "LlamaSequence", "TextGeneration", "TokenLogprob"]
