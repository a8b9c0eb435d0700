"""Stores of blocks, the storage of tiers: folders, servers and buckets.

A store has five methods over keys and buffers, independent of llama.cpp: see `BlockStore`.
"""

from __future__ import annotations

from pykvcache.prefix.stores.base import BlockStore, StoreCounters, StoreEntry
from pykvcache.prefix.stores.envelope import Envelope, Rejection, SealedStore
from pykvcache.prefix.stores.folder import FolderStore
from pykvcache.prefix.stores.memory import MemoryStore
from pykvcache.prefix.stores.objects import ObjectStore
from pykvcache.prefix.stores.redis import RedisClusterStore, RedisStore
from pykvcache.prefix.stores.tools import TierInput, open_store

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
    "TierInput",
    "open_store",
]
