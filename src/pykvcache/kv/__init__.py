"""Keys, values and recurrent states of a live context as NumPy arrays, and back."""

from pykvcache.kv.bridge import from_caches, to_caches
from pykvcache.kv.methods import KvMethods
from pykvcache.kv.types import LayerKV, LayerState, RecurrentState, SequenceKV
from pykvcache.kv.view import CacheView

__all__ = [
    "CacheView",
    "KvMethods",
    "LayerKV",
    "LayerState",
    "RecurrentState",
    "SequenceKV",
    "from_caches",
    "to_caches",
]
