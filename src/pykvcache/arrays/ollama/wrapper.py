"""Several caches as one, for models whose layers differ in what they attend to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.ollama._batch import Batch, as_copy, as_range
from pykvcache.arrays.ollama._family import FamilyCache
from pykvcache.arrays.ollama.protocol import Cache, CacheConfig
from pykvcache.errors import CacheLayerError, CacheValueError

__all__ = ["WrapperCache"]


class WrapperCache(FamilyCache):
    """A container for caches of several kinds, one of which serves each layer.

    ``set_layer_type`` chooses the cache for ``put`` and ``get``; everything else goes to all
    caches. See `Cache` for the methods' arguments.

    It follows Ollama's ``kvcache.WrapperCache``, but that all caches are asked before any of
    them acts: where one of ours would refuse, none is changed. A foreign `Cache` is not asked:
    if its ``start_forward`` raises, the caches that were started before it remove the batch
    again; if anything else of it raises, or a `shift_fn`, the caches before it have acted and
    ``remove(seq, 0)`` recovers. ``set_causal`` goes to all caches too.

    Parameters
    ----------
    *caches : Cache
        At least one, each another object.

    Raises
    ------
    TypeError
        A cache lacks methods of `Cache`.
    CacheValueError
        There is no cache, or one is given twice.
    """

    def __init__(self, *caches: Cache) -> None:
        super().__init__()
        for cache in caches:
            if not isinstance(cache, Cache):
                raise TypeError(f"a cache is needed, not {type(cache).__name__}")
        if not caches or len({id(cache) for cache in caches}) != len(caches):
            raise CacheValueError(
                "a WrapperCache needs at least one cache, and none twice", "caches", len(caches), 1
            )
        self._caches = caches
        self._type = 0
        self._max_batch = 0

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The wrapped caches, in the order of their layer types."""
        return self._caches

    @property
    def underlying_cache(self) -> Cache:
        """The cache that ``put`` and ``get`` go to."""
        return self._caches[self._type]

    def _own(self) -> list[FamilyCache]:
        return [cache for cache in self._caches if isinstance(cache, FamilyCache)]

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set all caches up; raises what any of them raises."""
        self._check_init(dtype, max_sequences, capacity, max_batch)
        for cache in self._caches:
            cache.init(dtype, max_sequences, capacity, max_batch)
        self._type, self._max_batch, self._closed = 0, as_int("max_batch", max_batch), False

    def set_config(self, config: CacheConfig) -> None:
        """Configure all caches; raises what any of them raises."""
        self._check_set_config(config)
        for cache in self._caches:
            cache.set_config(config)
        self._config = config

    def close(self) -> None:
        """Close all caches."""
        for cache in self._caches:
            cache.close()
        self._max_batch, self._closed = 0, True

    def set_layer(self, layer: SupportsIndex) -> None:
        """Choose the layer, in all caches.

        Raises
        ------
        CacheLayerError
            `layer` is negative.
        """
        self._ready()
        for cache in self._caches:
            cache.set_layer(layer)

    def set_layer_type(self, i: SupportsIndex) -> None:
        """Choose the cache for ``put`` and ``get`` until the next ``start_forward``.

        Raises
        ------
        CacheLayerError
            There is no cache `i`.
        """
        index = as_int("layer type", i)
        if not 0 <= index < len(self._caches):
            raise CacheLayerError(
                f"layer type is {index}; there are {len(self._caches)} caches",
                "layer type",
                index,
                len(self._caches) - 1,
            )
        self._type = index

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Begin a forward pass in all caches and choose the first one; raises what they raise."""
        self._ready()
        batch = Batch(positions, sequences, multimodal, self._max_batch)
        self._check_forward(batch, bool(reserve))
        pos, seq = batch.positions.tolist(), batch.sequences.tolist()
        started: list[Cache] = []
        try:
            for cache in self._caches:
                cache.start_forward(pos, seq, bool(reserve), batch.multimodal.tolist())
                started.append(cache)
        except Exception:
            for cache in () if reserve else reversed(started):
                for ident, lowest in zip(batch.ids, batch.lowest.tolist(), strict=True):
                    cache.remove(ident, lowest)
            raise
        self._type = 0

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V in the active layer of the chosen cache."""
        self._caches[self._type].put(key, value)

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
        """Return K, V and mask of the active layer of the chosen cache."""
        return self._caches[self._type].get()

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let batch rows look ahead in all caches; raises what they raise."""
        self._ready()
        rows = list(except_)
        for cache in self._caches:
            cache.set_causal(rows)

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Share a prefix in all caches; raises what any of them raises."""
        self._check_copy_prefix(src_seq, dst_seq, n)
        for cache in self._caches:
            cache.copy_prefix(src_seq, dst_seq, n)

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Tell whether all caches can resume."""
        self._ready()
        return all(cache.can_resume(seq, pos) for cache in self._caches)

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens from all caches; raises what any of them raises."""
        self._check_remove(seq, begin, end)
        for cache in self._caches:
            cache.remove(seq, begin, end)

    def _ready(self) -> None:
        if not self._max_batch:
            raise self._not_ready()

    def _check_set_config(self, config: CacheConfig) -> None:
        super()._check_set_config(config)
        for cache in self._own():
            cache._check_set_config(config)

    def _check_init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        for cache in self._own():
            cache._check_init(dtype, max_sequences, capacity, max_batch)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()
        for cache in self._own():
            cache._check_forward(batch, reserve)

    def _check_copy_prefix(
        self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
    ) -> None:
        self._ready()
        as_copy(src_seq, dst_seq, n)
        for cache in self._own():
            cache._check_copy_prefix(src_seq, dst_seq, n)

    def _check_remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
    ) -> None:
        self._ready()
        as_range(begin, end)
        for cache in self._own():
            cache._check_remove(seq, begin, end)
