"""Several caches as one, for models whose layers differ in what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex, TypeGuard

from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import MOST, as_int, as_ints
from pykvcache.arrays.ollama._batch import (
    UNLIMITED,
    Batch,
    as_copy,
    as_layer,
    as_position,
    as_range,
    as_sequence,
)
from pykvcache.arrays.ollama._family import FamilyCache
from pykvcache.arrays.ollama.causal import CausalCache
from pykvcache.arrays.ollama.encoder import EncoderCache
from pykvcache.arrays.ollama.protocol import Cache, CacheConfig
from pykvcache.errors import CacheLayerError, CacheOrderError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["WrapperCache"]


class WrapperCache(FamilyCache):
    """A container for caches of several kinds, one of which serves each layer.

    ``set_layer_type`` chooses the cache for ``put`` and ``get``; everything else goes to all
    caches. See `Cache` for the methods' arguments.

    It follows Ollama's ``kvcache.WrapperCache``, but that all caches are asked before any of
    them acts: where one of ours would refuse, none is changed. A foreign `Cache` is not asked:
    if its ``start_forward`` raises, the caches that were started before it are as they were (a
    foreign one removes the batch again); if that fails, if anything else of it raises, or a
    `shift_fn`, some caches have acted: the sequence does not go on (`CacheOrderError`) until
    ``remove(seq, 0)``. ``set_causal`` goes to all caches too.

    Parameters
    ----------
    *caches : Cache
        At least one, each another object.

    Raises
    ------
    TypeError
        A cache lacks methods of `Cache`.
    CacheValueError
        There is no cache, or one is given twice, be it within another `WrapperCache`.
    """

    def __init__(self, *caches: Cache) -> None:
        super().__init__()
        for cache in caches:
            if not isinstance(cache, Cache):
                raise TypeError(f"a cache is needed, not {type(cache).__name__}")
        self._caches = caches
        every = list(self._leaves())
        if not caches or len({id(cache) for cache in every}) != len(every):
            raise CacheValueError(
                "a WrapperCache needs at least one cache, and none twice", "caches", len(every), 1
            )
        self._type = 0
        self._max_batch = 0
        # Sequences that some caches have changed and others not.
        self._torn: set[int] = set()

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The wrapped caches, in the order of their layer types."""
        return self._caches

    @property
    def underlying_cache(self) -> Cache:
        """The cache that ``put`` and ``get`` go to."""
        return self._caches[self._type]

    def _leaves(self) -> Iterator[Cache]:
        """Yield the caches, those of wrapped wrappers in their place."""
        for cache in self._caches:
            if isinstance(cache, WrapperCache):
                yield from cache._leaves()
            else:
                yield cache

    def _own(self) -> list[FamilyCache]:
        return [cache for cache in self._caches if isinstance(cache, FamilyCache)]

    def _all_own(self) -> bool:
        return all(_is_own(cache) for cache in self._caches)

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
        # Half of them set up is none.
        self._max_batch = 0
        for cache in self._caches:
            cache.init(dtype, sequences, tokens, batch)
        self._torn = set()
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
        """Choose the layer, in all caches.

        Raises
        ------
        CacheLayerError
            `layer` is negative.
        """
        index = as_layer(layer)
        self._ready()
        for cache in self._caches:
            cache.set_layer(index)

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
                f"layer type is {shown(index)}; there are {len(self._caches)} caches",
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
        batch = Batch(positions, sequences, multimodal, self._ready)
        self._check_forward(batch, bool(reserve))
        self._begin(batch, bool(reserve))

    def _begin(self, batch: Batch, reserve: bool) -> Callable[[], None]:
        own: list[Callable[[], None]] = []
        foreign: list[Callable[[], None]] = []
        before = self._type

        def undo() -> None:
            # Marked until all are taken back, and for good if one cannot be.
            marked = self._torn.copy()
            self._torn.update(batch.ids)
            failed: list[BaseException] = []
            for one in (*reversed(own), *reversed(foreign)):
                try:
                    one()
                except BaseException as error:
                    failed.append(error)
            self._type = before
            if not failed:
                self._torn = marked
            for found in failed:
                # Another error gives way to the one that led here; an interrupt does not.
                if not isinstance(found, Exception):
                    raise found

        try:
            for cache in self._caches:
                (own if _is_own(cache) else foreign).append(_begun(cache, batch, reserve))
            self._type = 0
        except BaseException as error:
            undo()
            if not (reserve or isinstance(error, Exception) or self._all_own()):
                # A foreign cache that is interrupted may have begun.
                self._torn.update(batch.ids)
            raise
        return undo

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V in the active layer of the chosen cache."""
        self._caches[self._type].put(key, value)

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
        """Return K, V and mask of the active layer of the chosen cache."""
        return self._caches[self._type].get()

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Let batch rows look ahead in all caches; raises what they raise."""
        rows = as_ints("except_", except_).tolist()
        self._ready()
        own = [cache for cache in self._leaves() if isinstance(cache, (CausalCache, EncoderCache))]
        before = [cache._pass for cache in own]
        try:
            for cache in self._caches:
                cache.set_causal(rows)
        except BaseException:
            for one, now in zip(own, before, strict=True):
                one._pass = now
            raise

    def copy_prefix(self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex) -> None:
        """Share a prefix in all caches; raises what any of them raises."""
        src, dst, count = as_copy(src_seq, dst_seq, n)
        self._check_copy_prefix(src, dst, count)
        self._each(dst, lambda cache: cache.copy_prefix(src, dst, count))

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Tell whether all caches can resume, and hold the same tokens."""
        ident, position = as_sequence("seq", seq), as_position("pos", pos)
        self._ready()
        if position and ident in self._torn:
            return False
        return all(cache.can_resume(ident, position) for cache in self._caches)

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove tokens from all caches; raises what any of them raises."""
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        self._check_remove(ident, first, last)
        stop = None if end is None else last
        self._each(ident, lambda cache: cache.remove(ident, first, stop))
        if first == 0 and last == UNLIMITED:
            self._torn.discard(ident)

    def _each(self, seq: int, call: Callable[[Cache], None]) -> None:
        """Let all caches change a sequence, and remember it if only some of them did."""
        known, acted = seq in self._torn, False
        self._torn.add(seq)
        try:
            for cache in self._caches:
                call(cache)
                acted = True
        except Exception:
            if not acted and not known:
                self._torn.discard(seq)
            raise
        if not known:
            self._torn.discard(seq)

    def _check_whole(self, ids: Iterable[int]) -> None:
        """Refuse to go on with a sequence of which the caches hold different tokens."""
        torn = self._torn.intersection(ids)
        if torn:
            raise CacheOrderError(
                f"a call for sequence {min(torn)} ended when only some of the caches had acted; "
                f"call remove({min(torn)}, 0) first",
                "sequence",
                min(torn),
            )

    def _check_idle(self) -> None:
        super()._check_idle()
        for cache in self._own():
            cache._check_idle()

    def _ready(self) -> int:
        self._check_idle()
        if not self._max_batch:
            raise self._not_ready()
        return self._max_batch

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
        self._check_idle()
        for cache in self._own():
            cache._check_init(dtype, max_sequences, capacity, max_batch)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()
        if not reserve:
            self._check_whole(batch.ids)
        for cache in self._own():
            cache._check_forward(batch, reserve)

    def _check_copy_prefix(
        self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
    ) -> None:
        src, _dst, _n = as_copy(src_seq, dst_seq, n)
        self._ready()
        self._check_whole([src])
        for cache in self._own():
            cache._check_copy_prefix(src_seq, dst_seq, n)

    def _check_remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None
    ) -> None:
        ident, (first, last) = as_sequence("seq", seq), as_range(begin, end)
        self._ready()
        if first or last != UNLIMITED:
            self._check_whole([ident])
        for cache in self._own():
            cache._check_remove(seq, begin, end)


def _is_own(cache: Cache) -> TypeGuard[FamilyCache]:
    """Tell whether a cache is one of ours, with a ``start_forward`` of ours."""
    module = getattr(type(cache).start_forward, "__module__", "")
    return isinstance(cache, FamilyCache) and module.startswith("pykvcache.arrays.")


def _begun(cache: Cache, batch: Batch, reserve: bool) -> Callable[[], None]:
    """Start a forward pass in a cache; return what takes it back."""
    if _is_own(cache):
        return cache._begin(batch, reserve)
    lowest = [] if reserve else list(zip(batch.ids, batch.lowest.tolist(), strict=True))
    pos, seq = batch.positions.tolist(), batch.sequences.tolist()
    cache.start_forward(pos, seq, reserve, batch.multimodal.tolist())

    def undo() -> None:
        for ident, position in lowest:
            cache.remove(ident, position)

    return undo
