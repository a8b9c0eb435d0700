"""EncoderCache: an encoder's output, stored once and visible at every position."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_storable, converted
from pykvcache.arrays.ollama.cache import Batch, CacheConfig, OllamaCache
from pykvcache.errors import CacheValueError, NotSupported

__all__ = ["EncoderCache"]


class EncoderCache(OllamaCache):
    """Position-independent K and V of the most recent multimodal item.

    Arrays of any shape are stored and returned in their own dtype, without a mask. One sequence
    only: ``init`` raises `NotSupported` for more, and for padding, as does ``copy_prefix``. See
    `Cache` for the methods.

    Modelled on Ollama's ``kvcache.EncoderCache``. The item's position is that of the last item in
    `multimodal`, or without one that of an earlier pass, and stays when ``remove`` moves the tokens
    around it. A removed item is still returned, but ``encoder_cached`` is False. A later ``put`` of
    another shape raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._free()

    @property
    def encoder_cached(self) -> bool:
        """Whether an item is stored and not removed."""
        return self._cached_pos is not None

    def _check_init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> None:
        if sequences > 1:
            message = f"encoder cache does not support multiple sequences; requested: {sequences}"
            raise NotSupported(message, "max_sequences", sequences, 1)
        padding = (self._config or CacheConfig()).cache_padding
        if padding != 1:
            message = f"encoder cache is unable to enforce requested cache_padding ({padding})"
            raise NotSupported(message, "cache_padding", padding, 1)

    def _init(self, dtype: np.dtype[Any], sequences: int, tokens: int, batch: int) -> None:
        self._check_init(dtype, sequences, tokens, batch)
        self._free()
        self._config = self._config or CacheConfig()

    def _free(self) -> None:
        self._arrays: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._item_pos = 0
        self._cached_pos: int | None = None

    def _set_layer(self, layer: int) -> None: ...

    def _begin(self, batch: Batch, reserve: bool) -> None:
        if batch.multimodal.size and not reserve:
            self._item_pos = int(batch.positions[batch.multimodal[-1]])

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
        CacheValueError, CacheDTypeError
            A shape differs from that of the layer's first ``put``, or `value` has fewer than 3
            dimensions and ``permuted_v`` is set; or not real numbers.
        """
        self._started()
        new = as_storable("key", key), as_storable("value", value)
        if self._config is not None and self._config.permuted_v:
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
        if not self._reserve:
            rows = [converted(array, old.dtype) for array, old in zip(new, stored, strict=True)]
            # `value` may be a view of the keys, which are written first.
            if np.may_share_memory(rows[1], stored[0]):
                rows[1] = rows[1].copy()
            for array, old in zip(rows, stored, strict=True):
                old[...] = array
            self._cached_pos = self._item_pos
        self._arrays[self._layer] = stored

    def get(self) -> tuple[NDArray[Any] | None, NDArray[Any] | None, None]:
        """Return K and V of the active layer as read-only views, and no mask.

        With ``permuted_v``, V's third axis from the end comes last. A layer without arrays returns
        None for all three.
        """
        self._ready()
        if self._layer not in self._arrays:
            return None, None, None
        key, value = (array.view() for array in self._arrays[self._layer])
        key.flags.writeable = value.flags.writeable = False
        return key, value, None

    def _set_causal(self, ahead: list[int]) -> None: ...

    def _check_copy(self, src: int, dst: int, n: int) -> NoReturn:
        self._ready()
        raise NotSupported("encoder cache does not support multiple sequences", "copy_prefix")

    _copy = _check_copy

    def _can_resume(self, seq: int, pos: int) -> bool:
        return True

    def _remove(self, seq: int, begin: int, end: int) -> None:
        self._ready()
        if self._cached_pos is not None and begin <= self._cached_pos < end:
            self._cached_pos = None
