"""K, V and recurrent states of a live context as NumPy arrays, readable and writable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pykvcache.kv.methods import KvMethods
from pykvcache.kv.types import LayerKV, LayerState, RecurrentState, SequenceKV
from pykvcache.kv.view import CacheView

if TYPE_CHECKING:
    from pykvcache.kv.bridge import from_caches, to_caches

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


def __getattr__(name: str) -> Any:
    # Imported on demand: the array caches are a seventh of the import time of a context.
    if name not in ("from_caches", "to_caches"):
        raise AttributeError(f"module 'pykvcache.kv' has no attribute {name!r}")
    from pykvcache.kv import bridge

    value = globals()[name] = getattr(bridge, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
