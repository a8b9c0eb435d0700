"""Stores of blocks: where a prefix cache keeps what outlives its memory, its process, its machine.

A store is five methods over keys and buffers and knows nothing of llama.cpp: see `BlockStore`.
"""

from __future__ import annotations

from pykvcache.prefix.stores._open import open_store
from pykvcache.prefix.stores.base import BlockStore, StoreCounters, StoreEntry
from pykvcache.prefix.stores.cluster import RedisClusterStore
from pykvcache.prefix.stores.envelope import Envelope, Rejection
from pykvcache.prefix.stores.folder import FolderStore
from pykvcache.prefix.stores.memory import MemoryStore
from pykvcache.prefix.stores.objects import ObjectStore
from pykvcache.prefix.stores.redis import RedisStore
from pykvcache.prefix.stores.sealed import SealedStore

__all__ = [
    "BlockStore",
    "Envelope",
    "FolderStore",
    "MemoryStore",
    "ObjectStore",
    "RedisClusterStore",
    "RedisStore",
    "Rejection",
    "SealedStore",
    "StoreCounters",
    "StoreEntry",
    "open_store",
]
