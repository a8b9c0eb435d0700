"""EncoderCache: an encoder's output, stored once and visible at every position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import as_float_dtype, as_int, as_ints, as_storable, converted
from pykvcache.arrays.ollama.batch import Batch, as_copy, as_layer, as_place, as_range
from pykvcache.arrays.ollama.cache import CacheConfig, OllamaCache
from pykvcache.errors import CacheOrderError, CacheValueError, NotSupported, shown

__all__ = ["EncoderCache"]


class _Pass(NamedTuple):
    batch: Batch
    reserve: bool
    pos: int


class EncoderCache(OllamaCache):
    """Position-independent K and V of the most recent multimodal item.

    Arrays of any shape are stored and returned in their own dtype, without a mask. One sequence
    only. See `Cache` for the methods' arguments.

    Modelled on Ollama's ``kvcache.EncoderCache``. A later ``put`` of another shape raises. The
    item keeps its position when ``remove`` moves the tokens around it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._permuted_v = False
        self._max_batch = 0
        self._clear()

    def _clear(self) -> None:
        self._layer = 0
        self._arrays: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._pass: _Pass | None = None
        self._item_pos = 0
        self._cached_pos: int | None = None

    @property
    def encoder_cached(self) -> bool:
        """Whether an item is stored and not removed."""
        return self._cached_pos is not None

    def init(
        self,
        dtype: DTypeLike,
        max_sequences: SupportsIndex,
        capacity: SupportsIndex,
        max_batch: SupportsIndex,
    ) -> None:
        """Set the cache up, empty. `dtype` is ignored: arrays keep their own.

        Raises
        ------
        NotSupported
            `max_sequences` is over 1, or the configuration asks for padding.
        CacheDTypeError, CacheValueError
            See `Cache.init`.
        """
        batch = as_int("max_batch", max_batch, minimum=1)
        self._check_init(dtype, max_sequences, capacity, batch)
        self._clear()
        self._config = self._config or CacheConfig()
        self._permuted_v = self._config.permuted_v
        self._max_batch, self._closed = batch, False

    def close(self) -> None:
        """Free the arrays; see `Cache.close`."""
        self._clear()
        self._max_batch = 0
        self._closed = True

    def _ready(self) -> int:
        if not self._max_batch:
            raise self._not_ready()
        return self._max_batch

    def _started(self) -> _Pass:
        self._ready()
        if self._pass is None:
            raise CacheOrderError("no batch was started; call start_forward first", "start_forward")
        return self._pass

    def set_layer(self, layer: SupportsIndex) -> None:
        """Set the layer for ``put`` and ``get``; see `Cache.set_layer`."""
        index = as_layer(layer)
        self._ready()
        self._layer = index

    def start_forward(
        self,
        positions: Iterable[SupportsIndex],
        sequences: Iterable[SupportsIndex],
        reserve: bool = False,
        multimodal: Iterable[SupportsIndex] = (),
    ) -> None:
        """Begin a forward pass; see `Cache.start_forward`.

        Its K and V get the position of the last item in `multimodal`; without one, they keep
        that of an earlier pass.
        """
        batch = Batch(positions, sequences, multimodal).check_size(self._ready())
        items = batch.multimodal
        pos = int(batch.positions[items[-1]]) if items.size else self._item_pos
        self._pass = _Pass(batch, bool(reserve), pos)
        if not reserve:
            self._item_pos = pos

    def put(self, key: NDArray[Any], value: NDArray[Any]) -> None:
        """Store K and V of the item in the active layer.

        The first ``put`` of a layer allocates its arrays. A reserve pass does nothing else.

        Parameters
        ----------
        key, value : ndarray
            Any shape, but the same at every ``put`` of a layer.

        Raises
        ------
        CacheOrderError
            No batch was started.
        CacheValueError
            A shape differs from that of the layer's first ``put``, or `value` has fewer than 3
            dimensions and ``permuted_v`` is set.
        CacheDTypeError
            `key` or `value` is not an array of real numbers.
        """
        now = self._started()
        new = as_storable("key", key), as_storable("value", value)
        if self._permuted_v:
            if new[1].ndim < 3:
                message = f"value has shape {new[1].shape}; permuted_v needs 3 axes"
                raise CacheValueError(message, "value", new[1].shape, 3)
            new = new[0], np.moveaxis(new[1], -3, -1)
        stored = self._arrays.get(self._layer)
        if stored is None:
            stored = np.zeros(new[0].shape, new[0].dtype), np.zeros(new[1].shape, new[1].dtype)
        for name, array, old in zip(("key", "value"), new, stored, strict=True):
            if array.shape != old.shape:
                message = f"{name} has shape {array.shape}; layer {self._layer} holds {old.shape}"
                what = f"{name} of layer {self._layer}"
                raise CacheValueError(message, what, array.shape, old.shape)
            as_storable(name, array, old.dtype)
        if not now.reserve:
            rows = [converted(array, old.dtype) for array, old in zip(new, stored, strict=True)]
            # `value` may be a view of the keys, which are written first.
            if np.may_share_memory(rows[1], stored[0]):
                rows[1] = rows[1].copy()
            for array, old in zip(rows, stored, strict=True):
                old[...] = array
            self._cached_pos = now.pos
        self._arrays[self._layer] = stored

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, None]:
        """Return K and V of the active layer as read-only views, and no mask.

        With ``permuted_v``, V's third axis from the end comes last. A layer without arrays returns
        None for all three. As in Ollama, a removed item is still returned; ``encoder_cached`` is
        then False.
        """
        self._ready()
        if self._layer not in self._arrays:
            return None, None, None
        key, value = (array.view() for array in self._arrays[self._layer])
        key.flags.writeable = value.flags.writeable = False
        return key, value, None

    def set_causal(self, except_: Iterable[SupportsIndex] = ()) -> None:
        """Check the rows; there is no mask to change. See `Cache.set_causal`."""
        rows = as_ints("except_", except_)
        self._started().batch.rows("except_", rows)

    def copy_prefix(
        self, src_seq: SupportsIndex, dst_seq: SupportsIndex, n: SupportsIndex
    ) -> NoReturn:
        """Raise `NotSupported`: the cache has one sequence."""
        self._check_copy_prefix(*as_copy(src_seq, dst_seq, n))
        raise AssertionError

    def can_resume(self, seq: SupportsIndex, pos: SupportsIndex) -> bool:
        """Return True: the stored item does not depend on positions."""
        as_place(seq, pos)
        self._ready()
        return True

    def remove(
        self, seq: SupportsIndex, begin: SupportsIndex, end: SupportsIndex | None = None
    ) -> None:
        """Remove the item if its position is in ``[begin, end)``; see `Cache.remove`."""
        _, first, last = as_range(seq, begin, end)
        self._ready()
        if self._cached_pos is not None and first <= self._cached_pos < last:
            self._cached_pos = None

    def _check_init(self, *sizes: Any) -> None:
        dtype, max_sequences, capacity, max_batch = sizes
        as_float_dtype(dtype)
        count = as_int("max_sequences", max_sequences, minimum=1)
        as_int("capacity", capacity, minimum=1)
        as_int("max_batch", max_batch, minimum=1)
        if count > 1:
            message = (
                f"encoder cache does not support multiple sequences; requested: {shown(count)}"
            )
            raise NotSupported(message, "max_sequences", count, 1)
        padding = (self._config or CacheConfig()).cache_padding
        if padding != 1:
            message = f"encoder cache is unable to enforce requested cache_padding ({padding})"
            raise NotSupported(message, "cache_padding", padding, 1)

    def _check_forward(self, batch: Batch, reserve: bool) -> None:
        self._ready()

    def _check_copy_prefix(self, src: int, dst: int, n: int) -> NoReturn:
        self._ready()
        raise NotSupported("encoder cache does not support multiple sequences", "copy_prefix")

    def _check_remove(self, seq: int, begin: int, end: int) -> None:
        self._ready()
