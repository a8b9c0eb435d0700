"""Convert arrays to the parts of a llama.cpp state; everything is checked first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import ByteArray, check_kind
from pykvcache._native import lib
from pykvcache.enums import GgmlType
from pykvcache.errors import StateError, UnsupportedOperation
from pykvcache.kv.rope import rotate
from pykvcache.kv.types import Array, LayerKV, LayerState, RecurrentState, SequenceKV
from pykvcache.state.convert import NATURAL, as_floats, as_rows, as_stored, stored_dtype
from pykvcache.state.layout import Part, PartLayout, Rows, layouts_from_native

__all__ = ["as_parts"]


def as_parts(native: lib.Context, arrays: SequenceKV[Any]) -> list[Part]:
    """Return the state parts of a sequence with these arrays."""
    layouts = {part.part: part for part in layouts_from_native(native, "write_kv")}
    if "index" in layouts:
        raise UnsupportedOperation(
            "write_kv", "this memory holds more than keys and values: use get_state()"
        )
    for name, kind in (("window", SequenceKV), ("recurrent", RecurrentState)):
        given = getattr(arrays, name)
        if (given is None) == (name in layouts):
            needs = "needs a" if given is None else "has no"
            raise StateError(f"a {native.memory_kind} memory {needs} {name} part", what=name)
        if given is not None:
            check_kind(given, kind, name)
    if "attention" not in layouts and (len(arrays.positions) or len(arrays.layers)):
        raise StateError(f"a {native.memory_kind} memory has no attention layers")
    given = {"attention": arrays, "window": arrays.window, "recurrent": arrays.recurrent}
    parts = [
        _recurrent(given[name], layout)
        if name == "recurrent"
        else _attention(native, given[name], layout)
        for name, layout in layouts.items()
    ]
    _check_parts(native, arrays, layouts)
    return parts


def _check_parts(
    native: lib.Context, arrays: SequenceKV[Any], layouts: dict[str, PartLayout]
) -> None:
    """Refuse parts of different tokens: each must have the cells that the next token sees."""
    last = int(arrays.positions.max(initial=-1))
    recurrent, window = arrays.recurrent, arrays.window
    if recurrent is not None and "attention" in layouts and recurrent.position != last:
        message = f"the states end at {recurrent.position}, but the attention part at {last}"
        raise StateError(message, "recurrent position", recurrent.position, last)
    if window is None:
        return
    held = Counter(np.asarray(window.positions).tolist())
    every = Counter(arrays.positions.tolist())
    if any(every[position] != n for position, n in held.items()):
        raise StateError("the window part holds tokens that the attention part does not")
    first = native.window_needed(last + 1)
    missing = min((p for p in every if p >= first and p not in held), default=None)
    if missing is not None:
        message = f"the window part lacks position {missing}, which the next token sees"
        raise StateError(message, "window position", missing)


def _attention(native: lib.Context, arrays: SequenceKV[Any], layout: PartLayout) -> Part:
    if not isinstance(arrays.layers, Sequence) or not all(
        isinstance(layer, LayerKV) for layer in arrays.layers
    ):
        raise TypeError("layers must be a sequence of LayerKV")
    positions = _positions(arrays, layout)
    n, n_layers = len(positions), sum(rows.what == "k" for rows in layout.rows)
    if len(arrays.layers) != n_layers:
        message = f"{len(arrays.layers)} layers given, but the cache has {n_layers}"
        raise StateError(message, "layers", len(arrays.layers), n_layers)
    ext = None if arrays.extended is None else np.asarray(arrays.extended, np.int32)
    tensors: list[ByteArray] = []
    part = Part(layout, positions, ext, ())
    for i, rows in enumerate(layout.rows):
        layer = arrays.layers[i % n_layers]
        what = f"{layout.part} layers[{i % n_layers}]"
        _same_layer(layer.layer, rows.layer, what)
        shape = n, rows.n_head, rows.head_dim
        given, what = (
            (layer.keys, f"{what}.keys") if rows.what == "k" else (layer.values, f"{what}.values")
        )
        if rows.what == "k" and not arrays.rope:
            given = _floats(given, shape, what).astype(np.float32)
            facts = native.rope(rows.layer)
            given = rotate(given, positions, facts, undo=False, operation="write_kv")
        # Untransposed values imply flash attention.
        flash = not layout.v_trans
        stored = _rows(given, shape, rows, what, flash=flash)
        if part.is_transposed(i):
            columns = as_stored(stored, rows.type).reshape(n, rows.n_embd).T
            stored = np.ascontiguousarray(columns).view(np.uint8)
        tensors.append(stored.reshape(part.shape(i)))
    return replace(part, tensors=tuple(tensors))


def _positions(arrays: SequenceKV, layout: PartLayout) -> npt.NDArray[np.int32]:
    positions = np.asarray(arrays.positions)
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise StateError("positions must be a vector of integers")
    _in_range("positions", "position", positions, 0)
    if (arrays.extended is None) == layout.extended:
        needs = "needs" if arrays.extended is None else "has no"
        raise StateError(f"this memory {needs} extended positions (M-RoPE)", what="extended")
    if arrays.extended is not None:
        extended = np.asarray(arrays.extended)
        if extended.shape != (len(positions), 3) or extended.dtype.kind not in "iu":
            message = (
                f"extended must hold integers of shape ({len(positions)}, 3), "
                f"not {extended.dtype} of shape {extended.shape}"
            )
            raise StateError(message, "extended", extended.shape, (len(positions), 3))
        _in_range("extended", "extended position", extended, -1)
    return positions.astype(np.int32)


def _in_range(what: str, one: str, values: npt.NDArray[Any], least: int) -> None:
    for wrong in (int(values.min()), int(values.max())) if values.size else ():
        if not least <= wrong < 2**31 - 1:
            message = f"{one} {wrong} is not in [{least}, 2147483647)"
            raise StateError(message, what, wrong, 2**31 - 2)


def _recurrent(state: RecurrentState, layout: PartLayout) -> Part:
    if not all(isinstance(layer, LayerState) for layer in state.layers):
        raise TypeError("recurrent layers must be a sequence of LayerState")
    if not -1 <= state.position < 2**31 - 1:
        raise StateError("the position of a state must be in [-1, 2147483647)")
    if any(rows.what == "ple" for rows in layout.rows):
        raise UnsupportedOperation("write_kv", "the history of per-layer embeddings is unknown")
    indices = sorted({rows.layer for rows in layout.rows})
    if len(state.layers) != len(indices):
        message = f"{len(state.layers)} recurrent layers given, but the model has {len(indices)}"
        raise StateError(message, "recurrent layers", len(state.layers), len(indices))
    n = int(state.position >= 0)
    part = Part(layout, np.full(n, state.position, np.int32), None, ())
    tensors = []
    for i, rows in enumerate(layout.rows):
        at = indices.index(rows.layer)
        _same_layer(state.layers[at].layer, rows.layer, f"recurrent layers[{at}]")
        what = f"recurrent layers[{at}].{rows.what}"
        values = _floats(getattr(state.layers[at], rows.what), (rows.n_embd * n,), what)
        shape = n, 1, rows.n_embd
        stored = _rows(values.reshape(shape), shape, rows, what, flash=False)
        tensors.append(stored.reshape(part.shape(i)))
    return replace(part, tensors=tuple(tensors))


def _rows(
    given: Array, shape: tuple[int, int, int], rows: Rows, what: str, *, flash: bool
) -> ByteArray:
    """Convert floats or stored bits to rows of the cache's type, safe for attention."""
    array = np.asarray(given)
    if array.dtype == stored_dtype(rows.type) and rows.type not in NATURAL:
        n, n_head, _ = shape
        bits = n, n_head, rows.row_bytes // n_head
        stored = np.ascontiguousarray(array).view(np.uint8)
        if stored.shape != bits:
            message = f"{what} has {stored.shape} bytes: expected {bits}"
            raise StateError(message, what, stored.shape, bits)
    else:
        stored = as_rows(_floats(array, shape, what), rows.type, rows.rotation)
    values = as_floats(stored, rows.type, 0)
    if not np.isfinite(values).all():
        raise StateError(
            f"{what} holds NaN, infinity, or a value too large for the cache's type", what=what
        )
    largest = lib.largest_value(rows.n_embd, flash and rows.type == GgmlType.F32)
    found = float(np.abs(values).max(initial=0))
    if found > largest:
        message = f"{what} holds {found:.4g}: products of values over {largest:.4g} overflow"
        raise StateError(message, what, found, largest)
    return stored


def _floats(given: Array, shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    array = np.asarray(given)
    if array.shape != shape:
        message = f"{what} has shape {array.shape}: expected {shape}"
        raise StateError(message, what, array.shape, shape)
    if array.dtype.kind != "f":
        raise StateError(
            f"{what} must hold floats, not {array.dtype}", what=what, value=str(array.dtype)
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(array.astype(np.float32)).all():
            raise StateError(
                f"{what} holds NaN, infinity, or a value too large for float32", what=what
            )
    return array


def _same_layer(given: int, layer: int, what: str) -> None:
    if given not in (-1, layer):
        message = f"{what} is of layer {given}: expected layer {layer}"
        raise StateError(message, what, given, layer)
