"""Array caches: caches over NumPy arrays, independent of the compiled layer."""

from __future__ import annotations

from pykvcache.arrays.flat import FlatKVCache
from pykvcache.arrays.mlx.arrays_cache import ArraysCache, MambaCache
from pykvcache.arrays.mlx.cache_list import CacheList
from pykvcache.arrays.mlx.kinds import KvCacheKind, from_state
from pykvcache.arrays.mlx.kv_cache import BatchKVCache, ChunkedKVCache, ConcatenateKVCache, KVCache
from pykvcache.arrays.mlx.masks import create_attention_mask, create_causal_mask
from pykvcache.arrays.mlx.prompt_cache import (
    ROTATING_DEFAULT_KEEP,
    PromptCacheConfig,
    PromptCacheLayout,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    prompt_cache_layout,
    save_prompt_cache,
    trim_prompt_cache,
)
from pykvcache.arrays.mlx.prompts import LRUPromptCache, PromptTrie, PromptTrieResult, TokenBuffer
from pykvcache.arrays.mlx.quantized import QuantizedKVCache
from pykvcache.arrays.mlx.rotating import BatchRotatingKVCache, RotatingKVCache
from pykvcache.arrays.ollama.cache import Cache, CacheConfig
from pykvcache.arrays.ollama.causal import CausalCache, ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.arrays.ollama.encoder import EncoderCache
from pykvcache.arrays.ollama.input_cache import Input, InputCache, Slot
from pykvcache.arrays.ollama.recurrent import CheckpointRing, RecurrentCache
from pykvcache.arrays.ollama.wrapper import WrapperCache
from pykvcache.errors import KvCacheFull, NoSlot, NotSupported, ReprocessInputs, SharedCellsError

__all__ = [
    "ROTATING_DEFAULT_KEEP",
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "Cache",
    "CacheConfig",
    "CacheList",
    "CausalCache",
    "CheckpointRing",
    "ChunkedAttentionCache",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "EncoderCache",
    "FlatKVCache",
    "Input",
    "InputCache",
    "KVCache",
    "KvCacheFull",
    "KvCacheKind",
    "LRUPromptCache",
    "MambaCache",
    "NoSlot",
    "NotSupported",
    "PromptCacheConfig",
    "PromptCacheLayout",
    "PromptTrie",
    "PromptTrieResult",
    "QuantizedKVCache",
    "RecurrentCache",
    "ReprocessInputs",
    "RotatingKVCache",
    "SWACache",
    "SWAMemCache",
    "SharedCellsError",
    "Slot",
    "TokenBuffer",
    "WrapperCache",
    "can_trim_prompt_cache",
    "create_attention_mask",
    "create_causal_mask",
    "from_state",
    "load_prompt_cache",
    "make_prompt_cache",
    "prompt_cache_layout",
    "save_prompt_cache",
    "trim_prompt_cache",
]
