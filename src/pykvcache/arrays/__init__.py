"""Cache systems over NumPy arrays; independent of the compiled layer."""

from __future__ import annotations

from pykvcache.arrays.batch import BatchKVCache
from pykvcache.arrays.batch_rotating import BatchRotatingKVCache
from pykvcache.arrays.cache_list import CacheList
from pykvcache.arrays.causal import CausalCache
from pykvcache.arrays.checkpointed import RecurrentCache
from pykvcache.arrays.checkpoints import CheckpointRing
from pykvcache.arrays.chunked import ChunkedKVCache
from pykvcache.arrays.encoder import EncoderCache
from pykvcache.arrays.flat import FlatKVCache
from pykvcache.arrays.input_cache import Input, InputCache, Slot
from pykvcache.arrays.kinds import KvCacheKind, from_state
from pykvcache.arrays.lru import LRUPromptCache
from pykvcache.arrays.masks import create_attention_mask, create_causal_mask
from pykvcache.arrays.persist import (
    PromptCacheLayout,
    load_prompt_cache,
    prompt_cache_layout,
    save_prompt_cache,
)
from pykvcache.arrays.prompt import (
    ROTATING_DEFAULT_KEEP,
    PromptCacheConfig,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)
from pykvcache.arrays.protocol import Cache, CacheConfig
from pykvcache.arrays.quantized import QuantizedKVCache
from pykvcache.arrays.recurrent import ArraysCache, MambaCache
from pykvcache.arrays.rotating import RotatingKVCache
from pykvcache.arrays.sliding import ChunkedAttentionCache, SWACache, SWAMemCache
from pykvcache.arrays.standard import ConcatenateKVCache, KVCache
from pykvcache.arrays.token_buffer import TokenBuffer
from pykvcache.arrays.trie import PromptTrie, PromptTrieResult
from pykvcache.arrays.wrapper import WrapperCache
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
