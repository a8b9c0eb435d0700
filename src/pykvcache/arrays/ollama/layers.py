"""K and V arrays of a cell-based cache, one pair per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_storable, check_shape, converted
from pykvcache.arrays.ollama.cells import Cut
from pykvcache.errors import CacheValueError

__all__ = ["Layer", "LayerStore", "ShiftFn"]

#: ``shift_fn(layer, key, shift) -> key``: rotate the keys ``(n_tokens, n_kv_heads, head_dim)``
#: of a layer by `shift` positions each, an int32 array ``(n_tokens,)``.
ShiftFn: TypeAlias = Callable[[int, NDArray[Any], NDArray[np.int32]], NDArray[Any]]


class Layer:
    """K and V of one layer, ``(n_cells, n_kv_heads, head_dim)``, and read-only views of them.

    If V is permuted, its view is ``(n_kv_heads, head_dim, n_cells)``. In the current pass, ``put``
    stores arrays of `key_shape`, `value_shape` and `dtype` without further checks.
    """

    __slots__ = (
        "dtype", "key_shape", "keys", "keys_out", "permuted", "value_shape", "values", "values_out"
    )  # fmt: skip

    def __init__(self, keys: NDArray[Any], values: NDArray[Any], permuted: bool) -> None:
        self.keys, self.permuted, self.dtype = keys, permuted, keys.dtype
        self.values = values.transpose(2, 0, 1) if permuted else values
        self.keys_out, self.values_out = keys.view(), values.view()
        self.keys_out.flags.writeable = self.values_out.flags.writeable = False
        self.key_shape: tuple[int, ...] | None = None
        self.value_shape: tuple[int, ...] | None = None

    @classmethod
    def of_zeros(
        cls, n_cells: int, key: NDArray[Any], value: NDArray[Any], dtype: Any, permuted: bool
    ) -> Layer:
        """Allocate a layer for tokens like those of `key` and `value`."""
        shapes = [(n_cells, *array.shape[1:]) for array in (key, value)]
        for name, shape in zip(("key", "value"), shapes, strict=True):
            check_shape(f"{name} of all cells", shape, dtype)
        # If permuted, the cells of a channel are contiguous.
        laid_out = (*shapes[1][1:], n_cells) if permuted else shapes[1]
        return cls(np.zeros(shapes[0], dtype), np.zeros(laid_out, dtype), permuted)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied separately, the views would no longer be views.
        values = self.values.transpose(1, 2, 0) if self.permuted else self.values
        return Layer, (self.keys, values, self.permuted)

    def expect(self, n_tokens: int | None) -> None:
        """Set the shapes that ``put`` stores without further checks; None for none."""
        if n_tokens is None:
            self.key_shape = self.value_shape = None
        elif self.key_shape is None or self.key_shape[0] != n_tokens:
            self.key_shape = (n_tokens, *self.keys.shape[1:])
            self.value_shape = (n_tokens, *self.values.shape[1:])


class LayerStore:
    """The layers of a cache, each allocated by its first ``put``."""

    def __init__(self, n_cells: int, dtype: np.dtype[Any], permuted: bool) -> None:
        self.layers: dict[int, Layer] = {}
        self.dtype = dtype
        self._n_cells, self._permuted = n_cells, permuted

    def put(self, index: int, key: Any, value: Any, n_tokens: int, slot: slice | None) -> Layer:
        """Check K and V of a batch, store them unless `slot` is None, and return the layer."""
        key, value = as_storable("key", key, self.dtype), as_storable("value", value, self.dtype)
        for name, array in (("key", key), ("value", value)):
            if array.ndim != 3:
                message = (
                    f"{name} has shape {array.shape}; (n_tokens, n_kv_heads, head_dim) is needed"
                )
                raise CacheValueError(message, name, array.shape, 3)
            if len(array) != n_tokens:
                message = (
                    f"inconsistent batch sizes (layer: {index}, batch size: {n_tokens}, "
                    f"layer batch size: {len(array)})"
                )
                what = f"tokens of {name} in layer {index}"
                raise CacheValueError(message, what, len(array), n_tokens)
        heads, value_heads = key.shape[1], value.shape[1]
        if heads != value_heads:
            message = f"key has {heads} heads, but value {value_heads}"
            raise CacheValueError(message, "heads of value", value_heads, heads)
        layer = self.layers.get(index)
        if layer is None:
            layer = Layer.of_zeros(self._n_cells, key, value, self.dtype, self._permuted)
        for name, array, stored in (("key", key, layer.keys), ("value", value, layer.values)):
            if array.shape[1:] != stored.shape[1:]:
                message = (
                    f"{name} has shape {array.shape}; layer {index} holds "
                    f"{stored.shape[1:]} per token"
                )
                what = f"{name} of layer {index}"
                raise CacheValueError(message, what, array.shape, stored.shape[1:])
        if slot is not None:
            key, value = converted(key, self.dtype), converted(value, self.dtype)
            # `value` may be a view of the keys, which are written first.
            if np.may_share_memory(value, layer.keys):
                value = value.copy()
            layer.keys[slot] = key
            layer.values[slot] = value
            layer.expect(n_tokens)
        self.layers[index] = layer
        return layer

    def move(self, dst: NDArray[np.intp], src: NDArray[np.intp]) -> None:
        """Copy the data of cells `src` to cells `dst`."""
        for layer in self.layers.values():
            for array in (layer.keys, layer.values):
                array[dst] = array[src]

    def shift(self, shift_fn: ShiftFn, cut: Cut, max_batch: int) -> None:
        """Rotate the keys of the tokens after a cut; store none if `shift_fn` raises.

        Visits the sequence's remaining cells in order, `max_batch` at a time; `shift_fn` gets the
        cells from the first to the last that moves.
        """
        rotated: list[tuple[NDArray[Any], NDArray[np.intp], NDArray[Any]]] = []
        extent = np.flatnonzero(cut.kept)
        for start in range(int(extent[0]), int(extent[-1]) + 1, max_batch):
            cells = start + np.flatnonzero(cut.later[start : start + max_batch])
            if not cells.size:
                continue
            span = slice(int(cells[0]), int(cells[-1]) + 1)
            for index, layer in sorted(self.layers.items()):
                shift = np.where(cut.later[span], cut.begin - cut.end, 0).astype(np.int32)
                before = layer.keys[span].copy()
                after = as_storable("shift_fn's key", shift_fn(index, before, shift), self.dtype)
                if after.shape != before.shape:
                    message = f"shift_fn returned shape {after.shape} for keys of {before.shape}"
                    raise CacheValueError(message, "shift_fn", after.shape, before.shape)
                keys = converted(after[cells - span.start], self.dtype)
                rotated.append((layer.keys, cells, keys))
        for array, cells, keys in rotated:
            array[cells] = keys
