"""FlatKVCache: one sequence, one flat row of floats per token and layer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pykvcache.arrays._checks import as_float_dtype, as_int, as_storable, check_shape, converted
from pykvcache.errors import CacheLayerError, CacheOrderError, CacheValueError, shown

__all__ = ["FlatKVCache"]


class FlatKVCache:
    """K and V of a single sequence as flat arrays, one per layer.

    A forward pass appends the token's K and V to every layer, reading ``k(layer)`` and
    ``v(layer)`` (which include that token) as it goes, and calls ``advance`` at the end.

    Modelled on forgellm's ``KVCache``; ``extend`` (a prompt at once), ``truncate``, the dtype and
    all checks are additions. A refused call changes nothing. Not thread-safe.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        At least 1 each.
    dtype : dtype, optional
        float32 (the default), float16 or float64.

    Raises
    ------
    CacheValueError, CacheDTypeError
        A size is below 1, or `dtype` is not one of the three.
    """

    def __init__(
        self,
        num_layers: SupportsIndex,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        *,
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._num_layers = as_int("num_layers", num_layers, minimum=1)
        self._num_kv_heads = as_int("num_kv_heads", num_kv_heads, minimum=1)
        self._head_dim = as_int("head_dim", head_dim, minimum=1)
        self._dtype = as_float_dtype(dtype)
        # (K and V, layer, token, element): a layer's tokens are contiguous.
        self._data = self._rows(0)
        self._len = 0
        # Tokens of each layer beyond _len, until advance() counts them.
        self._pending = [0] * self._num_layers

    @classmethod
    def with_capacity(
        cls,
        num_layers: SupportsIndex,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        max_seq_len: SupportsIndex,
        *,
        dtype: DTypeLike = np.float32,
    ) -> FlatKVCache:
        """Make an empty cache that does not reallocate up to `max_seq_len` tokens.

        The cache grows for longer sequences.
        """
        cache = cls(num_layers, num_kv_heads, head_dim, dtype=dtype)
        cache._data = cache._rows(as_int("max_seq_len", max_seq_len, minimum=0))
        return cache

    def append(self, layer: SupportsIndex, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Store the current token's K and V in one layer.

        Parameters
        ----------
        layer : int
            In ``[0, num_layers)``.
        k, v : ndarray, shape (entry_size,)
            Copied, and converted to the cache's dtype.

        Raises
        ------
        CacheLayerError
            There is no such layer.
        CacheValueError, CacheDTypeError
            `k` or `v` has another shape, or is not an array of real numbers.
        CacheOrderError
            The layer has its token already: call ``advance`` first.
        """
        index = self._layer(layer)
        k, v = self._storable("k", k), self._storable("v", v)
        for name, array in (("k", k), ("v", v)):
            if array.shape != (self.entry_size,):
                message = f"{name} has shape {array.shape}; ({self.entry_size},) is needed"
                raise CacheValueError(message, name, array.shape, (self.entry_size,))
        self._store(index, k, v, 1)

    def extend(self, layer: SupportsIndex, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Store K and V of several tokens in one layer; ``advance`` then counts them all.

        Parameters
        ----------
        layer : int
            In ``[0, num_layers)``.
        k, v : ndarray, shape (n * entry_size,)
            Token after token, `n` at least 1 and the same for every layer. Copied.

        Raises
        ------
        CacheLayerError, CacheDTypeError
            As in ``append``.
        CacheValueError
            `k` or `v` is not a whole number of tokens, or the two differ.
        CacheOrderError
            The layer has its tokens already, or another layer got a different number of tokens.
        """
        index = self._layer(layer)
        k, v = self._storable("k", k), self._storable("v", v)
        count, rest = divmod(k.size, self.entry_size)
        if k.ndim != 1 or v.shape != k.shape or rest or count == 0:
            message = (
                f"k has shape {k.shape} and v {v.shape}; "
                f"both must be (n * {self.entry_size},) with n at least 1"
            )
            raise CacheValueError(message, "k and v", (k.shape, v.shape), self.entry_size)
        self._store(index, k, v, count)

    def advance(self) -> None:
        """Count the appended tokens, once every layer holds them.

        Raises
        ------
        CacheOrderError
            A layer got nothing since the last ``advance``.
        """
        if not all(self._pending):
            layer = self._pending.index(0)
            raise CacheOrderError(f"nothing was appended to layer {layer}", "layer", layer)
        self._len += self._pending[0]
        self._pending = [0] * self._num_layers

    def k(self, layer: SupportsIndex) -> NDArray[Any]:
        """Return the keys of a layer, including those appended since the last ``advance``.

        Returns
        -------
        ndarray, shape (n_tokens * entry_size,)
            A read-only view, valid until the next call that changes the cache.
        """
        return self._view(0, layer)

    def v(self, layer: SupportsIndex) -> NDArray[Any]:
        """Return the values of a layer; see ``k``."""
        return self._view(1, layer)

    def truncate(self, length: SupportsIndex) -> None:
        """Keep the first `length` tokens, and drop tokens that ``advance`` has not counted.

        ``truncate(len(cache))`` undoes an unfinished forward pass; more raises `CacheValueError`.
        """
        self._len = as_int("length", length, minimum=0, maximum=self._len)
        self._pending = [0] * self._num_layers

    def clear(self) -> None:
        """Drop all tokens; the memory stays allocated."""
        self.truncate(0)

    def copy(self) -> FlatKVCache:
        """Return an independent copy with the same capacity."""
        return deepcopy(self)

    # The default shallow copy would share the arrays.
    __copy__ = copy

    def __len__(self) -> int:
        """Return the number of tokens that ``advance`` has counted."""
        return self._len

    def is_empty(self) -> bool:
        """Return whether ``len`` is 0."""
        return self._len == 0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._num_layers

    @property
    def num_kv_heads(self) -> int:
        """Number of K/V heads."""
        return self._num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self._head_dim

    @property
    def entry_size(self) -> int:
        """Elements of one token in one layer: ``num_kv_heads * head_dim``."""
        return self._num_kv_heads * self._head_dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the keys and values."""
        return self._dtype

    @property
    def capacity(self) -> int:
        """Number of tokens for which memory is allocated."""
        return int(self._data.shape[2])

    def __repr__(self) -> str:
        return (
            f"FlatKVCache(num_layers={self._num_layers}, num_kv_heads={self._num_kv_heads}, "
            f"head_dim={self._head_dim}, dtype={self._dtype}, len={self._len}, "
            f"capacity={self.capacity})"
        )

    def _layer(self, layer: SupportsIndex) -> int:
        index = as_int("layer", layer)
        if not 0 <= index < self._num_layers:
            message = f"layer is {shown(index)}; the cache has {self._num_layers} layers"
            raise CacheLayerError(message, "layer", index, self._num_layers - 1)
        return index

    def _storable(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        # Fast path: an append takes only a few microseconds.
        if type(array) is np.ndarray and array.dtype == self._dtype:
            return array
        return converted(as_storable(name, array, self._dtype), self._dtype)

    def _store(self, layer: int, k: NDArray[Any], v: NDArray[Any], count: int) -> None:
        if self._pending[layer]:
            message = f"layer {layer} has its tokens already; call advance() first"
            raise CacheOrderError(message, "layer", layer)
        pending = max(self._pending)
        if pending not in (0, count):
            message = f"layer {layer} gets {count} tokens, but another layer got {pending}"
            raise CacheOrderError(message, f"tokens of layer {layer}", count, pending)
        end = self._len + count
        if end > self.capacity:
            # Grow by half, so that every token is copied a constant number of times.
            grown = self._rows(max(end, self.capacity * 3 // 2, 256))
            grown[:, :, : self.capacity] = self._data
            self._data = grown
        # Keys are written first, and `v` may be a view of them.
        if v.base is not None and np.may_share_memory(v, self._data):
            v = v.copy()
        self._data[0, layer, self._len : end] = k.reshape(count, -1)
        self._data[1, layer, self._len : end] = v.reshape(count, -1)
        self._pending[layer] = count

    def _rows(self, count: int) -> NDArray[Any]:
        shape = 2, self._num_layers, count, self.entry_size
        return np.empty(check_shape("the cache", shape, self._dtype), self._dtype)

    def _view(self, which: int, layer: SupportsIndex) -> NDArray[Any]:
        index = self._layer(layer)
        view = self._data[which, index, : self._len + self._pending[index]].reshape(-1)
        view.flags.writeable = False
        return view
