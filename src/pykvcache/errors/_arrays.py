"""Errors of the array caches; users import them from `pykvcache.errors`."""

from __future__ import annotations

from typing import Any

from pykvcache.errors._base import CacheFullError, DetailedError, KvCacheError, UnsupportedError

__all__ = [
    "CacheDTypeError",
    "CacheKeyError",
    "CacheLayerError",
    "CacheOrderError",
    "CacheValueError",
    "KvCacheFull",
    "NoSlot",
    "NotSupported",
    "ReprocessInputs",
]


class KvCacheFull(CacheFullError):
    """An array cache has no room for the batch; nothing was changed.

    Attributes
    ----------
    capacity : int or None
        Number of cells of the cache.
    batch : int or None
        Number of tokens that were to be stored.
    """

    def __init__(
        self, message: str, *, capacity: int | None = None, batch: int | None = None
    ) -> None:
        super().__init__(message)
        self.capacity = capacity
        self.batch = batch


class NotSupported(DetailedError, UnsupportedError):
    """An array cache of this kind cannot do what was asked; nothing was changed."""


class NoSlot(DetailedError, CacheFullError):
    """Every slot of an ``InputCache`` is in use; nothing was changed."""


class ReprocessInputs(KvCacheError, RuntimeError):
    """A slot could not be shifted and was emptied.

    Attributes
    ----------
    inputs : list
        What the slot would have held after the shift; evaluate it again from position 0.
    """

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__(f"the cache cannot shift; {len(inputs)} inputs need reprocessing")
        self.inputs = inputs

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return type(self), (self.inputs,)


class CacheValueError(DetailedError, ValueError):
    """A number, a shape or a saved state does not fit an array cache; nothing was changed."""


class CacheDTypeError(DetailedError, TypeError):
    """An array has a dtype that an array cache cannot store; nothing was changed."""


class CacheKeyError(DetailedError, KeyError):
    """Nothing is stored under this key."""

    # KeyError shows the repr of its argument, which suits keys and not sentences.
    __str__ = Exception.__str__


class CacheLayerError(DetailedError, IndexError):
    """A layer is not one of an array cache's; nothing was changed."""


class CacheOrderError(DetailedError, RuntimeError):
    """A method of an array cache was called before or after its turn; nothing was changed."""
