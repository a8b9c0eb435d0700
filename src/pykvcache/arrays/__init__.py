"""Cache systems over NumPy arrays; independent of the compiled layer."""

from __future__ import annotations

from pykvcache.arrays.causal import CausalCache
from pykvcache.arrays.encoder import EncoderCache
from pykvcache.arrays.flat import FlatKVCache
from pykvcache.arrays.input_cache import Input, InputCache, Slot
from pykvcache.arrays.protocol import Cache, CacheConfig
from pykvcache.arrays.sliding import ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.arrays.wrapper import WrapperCache
from pykvcache.errors import KvCacheFull, NoSlot, NotSupported, ReprocessInputs, SharedCellsError

__all__ = [
    "Cache",
    "CacheConfig",
    "CausalCache",
    "ChunkedAttentionCache",
    "EncoderCache",
    "FlatKVCache",
    "Input",
    "InputCache",
    "KvCacheFull",
    "NoSlot",
    "NotSupported",
    "ReprocessInputs",
    "SWACache",
    "SWAMemCache",
    "SharedCellsError",
    "Slot",
    "WrapperCache",
]
