"""WrapperCache: several caches as one, for models with different kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.ollama.cache import UNLIMITED, Batch, Cache, CacheConfig, OllamaCache
from pykvcache.errors import CacheLayerError, CacheOrderError, CacheValueError, shown

__all__ = ["WrapperCache"]


class WrapperCache(OllamaCache):
    """A container for several caches, each serving some layers.

    ``set_layer_type`` chooses the cache for ``put`` and ``get``; all other calls go to every
    cache. See `Cache` for the methods' arguments.

    Modelled on Ollama's ``kvcache.WrapperCache``, except that ``set_causal`` goes to all caches,
    and that a call which one of this package's caches refuses changes none. Only foreign
    implementations of `Cache` and a raising `shift_fn` can fail half-way. A sequence that may then
    differ between caches raises `CacheOrderError` until ``remove(seq, 0)``.

    Parameters
    ----------
    *caches : Cache
        At least one, each only once, even within another `WrapperCache`.
    """

    def __init__(self, *caches: Cache) -> None:
        super().__init__()
        for cache in caches:
            if not isinstance(cache, Cache):
                raise TypeError(f"a cache is needed, not {type(cache).__name__}")
        self._caches = caches
        self._own = [cache for cache in caches if isinstance(cache, OllamaCache)]
        every = list(_leaves(self))
        if not caches or len({id(cache) for cache in every}) != len(every):
            message = "a WrapperCache needs at least one cache, each only once"
            raise CacheValueError(message, "caches", len(every), 1)
        self._type = 0
        # Sequences that only some of the caches have changed.
        self._torn: set[int] = set()

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The wrapped caches, indexed by layer type."""
        return self._caches

    @property
    def underlying_cache(self) -> Cache:
        """The cache that ``put`` and ``get`` use."""
        return self._caches[self._type]

    def _init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> None:
        self._check_init(dtype, sequences, tokens, batch)
        self._max_batch = 0  # until all are set up
        for cache in self._caches:
            cache.init(dtype, sequences, tokens, batch)
        self._torn, self._type = set(), 0

    def set_config(self, config: CacheConfig) -> None:
        """Configure all caches; see `Cache.set_config`."""
        self._check_set_config(config)
        for cache in self._caches:
            cache.set_config(config)
        self._config = config

    def _free(self) -> None:
        for cache in self._caches:
            cache.close()

    def _set_layer(self, layer: int) -> None:
        for cache in self._caches:
            cache.set_layer(layer)

    def set_layer_type(self, i: SupportsIndex) -> None:
        """Use cache `i` for ``put`` and ``get`` until the next ``start_forward``.

        `CacheLayerError` if there is none.
        """
        index = as_int("layer type", i)
        if not 0 <= index < len(self._caches):
            message = f"layer type is {shown(index)}; there are {len(self._caches)} caches"
            raise CacheLayerError(message, "layer type", index, len(self._caches) - 1)
        self._type = index

    def _begin(self, batch: Batch, reserve: bool) -> None:
        self._check_forward(batch, reserve)
        pos, seq, items = (a.tolist() for a in (batch.positions, batch.sequences, batch.multimodal))
        self._each(
            () if reserve else batch.ids,
            lambda cache: cache.start_forward(pos, seq, reserve, items),
        )
        self._type = 0

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V in the active layer of the chosen cache."""
        self._caches[self._type].put(key, value)

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
        """Return K, V and mask of the active layer of the chosen cache."""
        return self._caches[self._type].get()

    def _set_causal(self, ahead: list[int]) -> None:
        for cache in self._caches:
            cache.set_causal(ahead)

    def _copy(self, src: int, dst: int, n: int) -> None:
        self._check_copy(src, dst, n)
        self._each([dst], lambda cache: cache.copy_prefix(src, dst, n))

    def _can_resume(self, seq: int, pos: int) -> bool:
        if pos and seq in self._torn:
            return False
        return all(cache.can_resume(seq, pos) for cache in self._caches)

    def _remove(self, seq: int, begin: int, end: int) -> None:
        self._check_remove(seq, begin, end)
        stop = None if end == UNLIMITED else end
        self._each([seq], lambda cache: cache.remove(seq, begin, stop))
        self._torn.discard(seq)  # of a torn sequence only all can be removed

    def _each(self, ids: Iterable[int], change: Callable[[Cache], None]) -> None:
        """Change sequences in all caches; record them as torn if only some did."""
        changed = False
        try:
            for cache in self._caches:
                change(cache)
                changed = True
        except Exception:
            if changed:
                self._torn.update(ids)
            raise

    def _check_whole(self, ids: Iterable[int]) -> None:
        """Refuse a sequence that differs between caches."""
        torn = self._torn.intersection(ids)
        if torn:
            message = (
                f"a call for sequence {min(torn)} ended when only some of the caches had acted; "
                f"call remove({min(torn)}, 0) first"
            )
            raise CacheOrderError(message, "sequence", min(torn))

    # Checks, also for an outer WrapperCache ----------------------------------------------

    def _check_idle(self) -> None:
        for cache in self._own:
            cache._check_idle()

    def _ready(self) -> None:
        self._check_idle()
        super()._ready()

    def _check_set_config(self, config: CacheConfig) -> None:
        super()._check_set_config(config)
        for cache in self._own:
            cache._check_set_config(config)

    def _check_init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> None:
        for cache in self._own:
            cache._check_init(dtype, sequences, tokens, batch)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()
        if not reserve:
            self._check_whole(batch.ids)
        for cache in self._own:
            cache._check_forward(batch, reserve)

    def _check_copy(self, src: int, dst: int, n: int) -> None:
        self._ready()
        self._check_whole([src])
        for cache in self._own:
            cache._check_copy(src, dst, n)

    def _check_remove(self, seq: int, begin: int, end: int) -> None:
        self._ready()
        if begin or end != UNLIMITED:
            self._check_whole([seq])
        for cache in self._own:
            cache._check_remove(seq, begin, end)


def _leaves(cache: Cache) -> Iterator[Cache]:
    """Yield the caches that a `WrapperCache` wraps at any depth, or the cache itself."""
    if isinstance(cache, WrapperCache):
        for wrapped in cache.caches:
            yield from _leaves(wrapped)
    else:
        yield cache
