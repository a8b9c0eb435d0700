"""The K and V arrays of a cache that is made of cells, one pair per layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_storable, check_shape, converted
from pykvcache.arrays.ollama._cells import Cut, Write
from pykvcache.arrays.ollama.protocol import ShiftFn
from pykvcache.errors import CacheValueError

__all__ = ["Layer", "LayerStore"]

# How many cells are moved at once, which bounds the memory that it takes.
_PIECE = 256


class Layer:
    """K and V of one layer.

    Attributes
    ----------
    keys, values : ndarray, shape (n_cells, n_kv_heads, head_dim)
    keys_out, values_out : ndarray
        The same memory, read-only; `values_out` is ``(n_kv_heads, head_dim, n_cells)`` if V is
        to be permuted.
    key_shape, value_shape : tuple of int, or None
        What ``put`` takes in the current pass without looking closer.
    dtype : dtype
        Likewise, and that of the arrays.
    """

    __slots__ = (
        "dtype",
        "key_shape",
        "keys",
        "keys_out",
        "permuted_v",
        "value_shape",
        "values",
        "values_out",
    )

    def __init__(
        self,
        n_cells: int,
        key: NDArray[Any],
        value: NDArray[Any],
        dtype: np.dtype[Any],
        permuted_v: bool,
    ) -> None:
        for name, array in (("key", key), ("value", value)):
            check_shape(f"{name} of all cells", (n_cells, *array.shape[1:]), dtype)
        self.keys: NDArray[Any] = np.zeros((n_cells, *key.shape[1:]), dtype)
        if permuted_v:
            # Cells lie next to each other in memory, which is what the layout is for.
            self.values: NDArray[Any] = np.zeros((*value.shape[1:], n_cells), dtype)
            self.values = self.values.transpose(2, 0, 1)
        else:
            self.values = np.zeros((n_cells, *value.shape[1:]), dtype)
        self.permuted_v = permuted_v
        self.dtype = dtype
        self.key_shape: tuple[int, ...] | None = None
        self.value_shape: tuple[int, ...] | None = None
        self._make_views()

    def _make_views(self) -> None:
        self.keys_out = self.keys.view()
        self.values_out = self.values.transpose(1, 2, 0) if self.permuted_v else self.values.view()
        self.keys_out.flags.writeable = self.values_out.flags.writeable = False

    def __getstate__(self) -> dict[str, Any]:
        # Copied one by one, the views would no longer be views.
        out = ("keys_out", "values_out")
        return {name: getattr(self, name) for name in self.__slots__ if name not in out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._make_views()

    def expect(self, n_tokens: int | None) -> None:
        """Set the shapes that ``put`` takes in this pass; None takes none."""
        if n_tokens is None:
            self.key_shape = self.value_shape = None
        elif self.key_shape is None or self.key_shape[0] != n_tokens:
            self.key_shape = (n_tokens, *self.keys.shape[1:])
            self.value_shape = (n_tokens, *self.values.shape[1:])


class LayerStore:
    """The layers of a cache, each made by its first ``put``.

    Attributes
    ----------
    layers : dict of int to Layer
    dtype : dtype
        Of K and V.
    """

    def __init__(self, n_cells: int, dtype: np.dtype[Any], permuted_v: bool) -> None:
        self.layers: dict[int, Layer] = {}
        self._index = 0
        self.dtype = dtype
        self._n_cells, self._permuted_v = n_cells, permuted_v

    def select(self, index: int) -> Layer | None:
        """Make a layer the active one; return it, if it has arrays."""
        self._index = index
        return self.layers.get(index)

    def put(self, key: Any, value: Any, n_tokens: int, slot: slice, reserve: bool) -> Layer:
        """Check and store K and V of a batch in the active layer, and return the layer."""
        key = as_storable("key", key, self.dtype)
        value = as_storable("value", value, self.dtype)
        for name, array in (("key", key), ("value", value)):
            if array.ndim != 3:
                raise CacheValueError(
                    f"{name} has shape {array.shape}; (n_tokens, n_kv_heads, head_dim) is needed",
                    name,
                    array.shape,
                    3,
                )
            if len(array) != n_tokens:
                raise CacheValueError(
                    f"inconsistent batch sizes (layer: {self._index}, batch size: {n_tokens}, "
                    f"layer batch size: {len(array)})",
                    f"tokens of {name} in layer {self._index}",
                    len(array),
                    n_tokens,
                )
        if key.shape[1] != value.shape[1]:
            raise CacheValueError(
                f"key has {key.shape[1]} heads, but value {value.shape[1]}",
                "heads of value",
                value.shape[1],
                key.shape[1],
            )
        layer = self.layers.get(self._index)
        if layer is None:
            layer = Layer(self._n_cells, key, value, self.dtype, self._permuted_v)
        for name, array, kept in (("key", key, layer.keys), ("value", value, layer.values)):
            if array.shape[1:] != kept.shape[1:]:
                raise CacheValueError(
                    f"{name} has shape {array.shape}; layer {self._index} holds "
                    f"{kept.shape[1:]} per token",
                    f"{name} of layer {self._index}",
                    array.shape,
                    kept.shape[1:],
                )
        if not reserve:
            key, value = converted(key, self.dtype), converted(value, self.dtype)
            # What `get` returned may come back the other way round.
            if np.may_share_memory(value, layer.keys):
                value = value.copy()
            layer.keys[slot] = key
            layer.values[slot] = value
            layer.expect(n_tokens)
        self.layers[self._index] = layer
        return layer

    def held(self, cells: NDArray[np.intp]) -> list[Write]:
        """Return what `commit` needs to write the data of these cells back."""
        if not cells.size:
            return []
        arrays = [array for layer in self.layers.values() for array in (layer.keys, layer.values)]
        return [(array, cells, array[cells]) for array in arrays]

    def move(self, dst: NDArray[np.intp], src: NDArray[np.intp]) -> None:
        """Copy the data of cells `src` to cells `dst`, some at a time."""
        for layer in self.layers.values():
            for array in (layer.keys, layer.values):
                for i in range(0, dst.size, _PIECE):
                    array[dst[i : i + _PIECE]] = array[src[i : i + _PIECE]]

    def shifted(self, shift_fn: ShiftFn, cut: Cut, max_batch: int) -> list[Write]:
        """Compute the keys of the tokens after a cut, and store none of them.

        What is left of the sequence is visited from its first to its last cell, `max_batch`
        cells at a time; `shift_fn` sees those from the first to the last that moves.

        Returns
        -------
        list of (keys of a layer, cells, keys)
            What to store.
        """
        out: list[Write] = []
        extent = np.flatnonzero(cut.kept)
        for start in range(int(extent[0]), int(extent[-1]) + 1, max_batch):
            cells = start + np.flatnonzero(cut.later[start : start + max_batch])
            if not cells.size:
                continue
            span = slice(int(cells[0]), int(cells[-1]) + 1)
            for index, layer in sorted(self.layers.items()):
                shift = np.where(cut.later[span], cut.begin - cut.end, 0).astype(np.int32)
                # A copy: what fails half-way has then not touched the cache.
                before = layer.keys[span].copy()
                after = as_storable("shift_fn's key", shift_fn(index, before, shift), self.dtype)
                if after.shape != before.shape:
                    raise CacheValueError(
                        f"shift_fn returned shape {after.shape} for keys of {before.shape}",
                        "shift_fn",
                        after.shape,
                        before.shape,
                    )
                rotated = converted(after[cells - span.start], self.dtype)
                out.append((layer.keys, cells, rotated))
        return out
