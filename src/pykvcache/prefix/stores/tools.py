"""Functions over stores: open one by its address, verify its blocks.

``pykvcache cache`` uses them; none needs a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeAlias

from pykvcache._arguments import as_path
from pykvcache.errors import StoreError, shown
from pykvcache.prefix.stores.base import BlockStore, StoreEntry
from pykvcache.prefix.stores.envelope import Envelope, Rejection, fresh
from pykvcache.prefix.stores.folder import FolderStore
from pykvcache.prefix.stores.redis import RedisStore

__all__ = ["TierInput", "open_existing", "open_store", "verify"]

#: A folder, an address, or a store.
TierInput: TypeAlias = str | os.PathLike[str] | BlockStore

# Timeouts of a server in seconds, for tools, which delay no model.
_PATIENT = {"timeout": 30.0, "connect_timeout": 5.0}
# Position of the key in the header of a sealed block.
_KEY = slice(16, 48)


def open_store(where: TierInput, **options: Any) -> BlockStore:
    """Return the store at an address.

    Parameters
    ----------
    where : str, PathLike or BlockStore
        A folder is a `FolderStore`, ``redis://`` and the like a `RedisStore`, ``redis+cluster://``
        a `RedisClusterStore`, ``s3://``, ``gs://``, ``az://``, ``file://`` an `ObjectStore`. A
        store is returned unchanged. A class of your own is found by its `schemes`.
    **options
        Passed to the class.

    Raises
    ------
    StoreError
        The scheme is unknown, or the class raises it.
    """
    if isinstance(where, BlockStore):
        return where
    name = as_path(where, "a store", error=StoreError)
    scheme, separator, _ = name.partition("://")
    kind = _kind_of(scheme) if separator else FolderStore
    store: BlockStore = kind(name, **options)
    return store


def _kind_of(scheme: str) -> type[Any]:
    """Return the class of stores with this URL scheme, users' classes included."""
    known: dict[str, type[BlockStore]] = {}
    kinds: list[Any] = [BlockStore]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for one in vars(kind).get("schemes", ()):
            known.setdefault(one, kind)
    if scheme in known:
        return known[scheme]
    names = ", ".join(sorted(known))
    text = f"{shown(scheme)[1:-1]}:// is not a store address: known schemes are {names}"
    raise StoreError(text, value=scheme, limit=names)


def open_existing(where: str) -> BlockStore:
    """Return the existing store at an address, for a tool; create nothing.

    Raises FileNotFoundError, NotADirectoryError or `StoreError` if there is none.
    """
    where = as_path(where, "a store", error=StoreError)
    scheme, separator, _ = where.partition("://")
    if separator:
        kind = _kind_of(scheme)
        if not kind.exists(where):
            raise FileNotFoundError(2, "no such store", where)
        # A slow server must not look like an empty one.
        return open_store(where, **_PATIENT if issubclass(kind, RedisStore) else {})
    path = os.path.abspath(os.path.expanduser(where))
    if os.path.exists(path) and not os.path.isdir(path):
        raise NotADirectoryError(20, "this is a file; the blocks of a cache are in a folder", path)
    if not os.path.isdir(path):
        raise FileNotFoundError(2, "no such folder", path)
    if not os.path.isdir(os.path.join(path, "blocks")):
        raise StoreError(f"{path} has no blocks of a cache", value=path)
    return open_store(path, max_bytes=1 << 62)


def verify(
    store: BlockStore, secret: bytes | str | None = None
) -> Iterator[tuple[StoreEntry, Rejection | None]]:
    """Yield every block, and why it is damaged or forged; None for an intact one.

    Without the secret of the writers encrypted blocks are ``LOCKED``. Blocks that are removed
    during the call are left out.
    """
    envelope = Envelope(model="any", layout="any", secret=secret)
    for entry in store.entries():
        buffer = fresh(entry.size)
        # Reused memory may still hold this very block, which would complete a truncated one.
        edge = min(16, len(buffer))
        buffer[:edge] = buffer[len(buffer) - edge :] = bytes(edge)
        if not store.get_into([entry.key], [buffer]):
            continue
        found = envelope.open_named(entry.key, buffer)
        if found is Rejection.FOREIGN and buffer[_KEY] == entry.key:
            found = memoryview(b"")  # intact, whatever its model and layout
        yield entry, found if isinstance(found, Rejection) else None
