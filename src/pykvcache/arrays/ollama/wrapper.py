"""WrapperCache: several caches as one, for models with different kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import MOST, as_int, as_ints
from pykvcache.arrays.ollama.batch import UNLIMITED, Batch, as_copy, as_layer, as_place, as_range
from pykvcache.arrays.ollama.cache import Cache, CacheConfig, OllamaCache
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
        At least one; all different objects.

    Raises
    ------
    TypeError
        A cache lacks methods of `Cache`.
    CacheValueError
        No cache is given, or one is given twice, even within another `WrapperCache`.
    """

    def __init__(self, *caches: Cache) -> None:
        super().__init__()
        for cache in caches:
            if not isinstance(cache, Cache):
                raise TypeError(f"a cache is needed, not {type(cache).__name__}")
        self._caches = caches
        every = list(_leaves(self))
        if not caches or len({id(cache) for cache in every}) != len(every):
            message = "a WrapperCache needs at least one cache, each only once"
            raise CacheValueError(message, "caches", len(every), 1)
        self._type = 0
        self._max_batch = 0
        self._batch: Batch | None = None
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

    def _own(self) -> list[OllamaCache]:
        return [cache for cache in self._caches if isinstance(cache, OllamaCache)]

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set all caches up; raises what any of them raises."""
        sequences = as_int("max_sequences", max_sequences, minimum=1, maximum=MOST)
        tokens = as_int("capacity", capacity, minimum=1, maximum=MOST)
        batch = as_int("max_batch", max_batch, minimum=1, maximum=MOST)
        self._check_init(dtype, sequences, tokens, batch)
        self._max_batch = 0  # 0 until all are set up
        for cache in self._caches:
            cache.init(dtype, sequences, tokens, batch)
        self._torn, self._batch = set(), None
        self._type, self._max_batch, self._closed = 0, batch, False

    def set_config(self, config: CacheConfig) -> None:
        """Configure all caches; raises what any of them raises."""
        self._check_set_config(config)
        for cache in self._caches:
            cache.set_config(config)
        self._config = config

    def close(self) -> None:
        """Close all caches."""
        self._check_idle()
        for cache in self._caches:
            cache.close()
        self._max_batch, self._closed = 0, True

    def set_layer(self, layer: SupportsIndex) -> None:
        """Set the layer in all caches."""
        index = as_layer(layer)
        self._ready()
        for cache in self._caches:
            cache.set_layer(index)

    def set_layer_type(self, i: SupportsIndex) -> None:
        """Use cache `i` for ``put`` and ``get`` until the next ``start_forward``.

        `CacheLayerError` if there is none.
        """
        index = as_int("layer type", i)
        if not 0 <= index < len(self._caches):
            message = f"layer type is {shown(index)}; there are {len(self._caches)} caches"
            raise CacheLayerError(message, "layer type", index, len(self._caches) - 1)
        self._type = index

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Begin a forward pass in all caches and use the first one; raises what they raise."""
        batch = Batch(positions, sequences, multimodal).check_size(self._ready())
        self._check_forward(batch, bool(reserve))
        pos, seq, items = (a.tolist() for a in (batch.positions, batch.sequences, batch.multimodal))
        self._each(
            () if reserve else batch.ids,
            lambda cache: cache.start_forward(pos, seq, bool(reserve), items),
        )
        self._type, self._batch = 0, batch

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V in the active layer of the chosen cache."""
        self._caches[self._type].put(key, value)

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
        """Return K, V and mask of the active layer of the chosen cache."""
        return self._caches[self._type].get()

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let batch rows see later positions in all caches; raises what they raise."""
        rows = as_ints("except_", except_)
        self._ready()
        if self._batch is None:
            raise CacheOrderError("no batch was started; call start_forward first", "start_forward")
        ahead = self._batch.rows("except_", rows).tolist()
        for cache in self._caches:
            cache.set_causal(ahead)

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Share a prefix in all caches; raises what any of them raises."""
        src, dst, count = as_copy(src_seq, dst_seq, n)
        self._check_copy_prefix(src, dst, count)
        self._each([dst], lambda cache: cache.copy_prefix(src, dst, count))

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Return whether all caches can resume and have the same tokens."""
        ident, position = as_place(seq, pos)
        self._ready()
        if position and ident in self._torn:
            return False
        return all(cache.can_resume(ident, position) for cache in self._caches)

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens from all caches; raises what any of them raises."""
        ident, first, last = as_range(seq, begin, end)
        self._check_remove(ident, first, last)
        stop = None if end is None else last
        self._each([ident], lambda cache: cache.remove(ident, first, stop))
        if first == 0 and last == UNLIMITED:
            self._torn.discard(ident)

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

    def _ready(self) -> int:
        self._check_idle()
        if not self._max_batch:
            raise self._not_ready()
        return self._max_batch

    # Checks for an outer WrapperCache -----------------------------------------------------

    def _check_idle(self) -> None:
        super()._check_idle()
        for cache in self._own():
            cache._check_idle()

    def _check_set_config(self, config: CacheConfig) -> None:
        super()._check_set_config(config)
        for cache in self._own():
            cache._check_set_config(config)

    def _check_init(self, *sizes: Any) -> None:
        self._check_idle()
        for cache in self._own():
            cache._check_init(*sizes)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()
        if not reserve:
            self._check_whole(batch.ids)
        for cache in self._own():
            cache._check_forward(batch, reserve)

    def _check_copy_prefix(self, src: int, dst: int, n: int) -> None:
        self._ready()
        self._check_whole([src])
        for cache in self._own():
            cache._check_copy_prefix(src, dst, n)

    def _check_remove(self, seq: int, begin: int, end: int) -> None:
        self._ready()
        if begin or end != UNLIMITED:
            self._check_whole([seq])
        for cache in self._own():
            cache._check_remove(seq, begin, end)


def _leaves(cache: Cache) -> Iterator[Cache]:
    """Yield the caches that a `WrapperCache` wraps at any depth, or the cache itself."""
    if isinstance(cache, WrapperCache):
        for wrapped in cache.caches:
            yield from _leaves(wrapped)
    else:
        yield cache
