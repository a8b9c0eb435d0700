"""A store by its address, for tiers that are given as text."""

from __future__ import annotations

import os
from typing import Any

from pykvcache._paths import as_path
from pykvcache.errors import StoreError
from pykvcache.errors._shown import shown
from pykvcache.prefix.stores.base import BlockStore
from pykvcache.prefix.stores.cluster import CLUSTER_SCHEMES, RedisClusterStore
from pykvcache.prefix.stores.folder import FolderStore
from pykvcache.prefix.stores.objects import ObjectStore
from pykvcache.prefix.stores.redis import SCHEMES, RedisStore

__all__ = ["open_store"]

_OBJECTS = {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https"}
_OBJECTS |= {"file", "memory"}


def open_store(where: str | os.PathLike[str] | BlockStore, **options: Any) -> BlockStore:
    """Return the store that an address names.

    Parameters
    ----------
    where : str, PathLike or BlockStore
        A folder is a `FolderStore`, ``redis://`` and its kin a `RedisStore`, ``redis+cluster://``
        a `RedisClusterStore`, ``s3://``, ``gs://``, ``az://``, ``file://`` an `ObjectStore`. A
        store is returned as it is.
    **options
        Passed to the class.

    Raises
    ------
    StoreError
        The URL is of no known kind, or what the class raises.
    """
    if isinstance(where, BlockStore):
        return where
    name = as_path(where, "a store", error=StoreError)
    scheme, separator, _ = name.partition("://")
    if not separator:
        return FolderStore(name, **options)
    if scheme in SCHEMES:
        return RedisStore(name, **options)
    if scheme in CLUSTER_SCHEMES:
        return RedisClusterStore(name, **options)
    if scheme in _OBJECTS:
        return ObjectStore(name, **options)
    known = ", ".join(sorted(SCHEMES | CLUSTER_SCHEMES | _OBJECTS))
    raise StoreError(
        f"{shown(scheme)[1:-1]}:// is not a store: known are {known}", value=scheme, limit=known
    )
