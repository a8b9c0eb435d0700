"""Arrays as the bytes of a llama.cpp state; all is checked before a byte is written."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._kv_codec import NATURAL, as_floats, as_rows, as_stored, stored_dtype
from pykvcache._kv_rope import rotate
from pykvcache._kv_types import Array, LayerKV, LayerState, RecurrentState, SequenceKV
from pykvcache._native import lib
from pykvcache.enums import GgmlType
from pykvcache.errors import StateError, UnsupportedOperation

__all__ = ["encode"]

#: ``LLAMA_STATE_SEQ_MAGIC``: what a sequence state begins with.
MAGIC = 0xAF143CD8

Bytes = npt.NDArray[np.uint8]


def encode(native: lib.Context, arrays: SequenceKV) -> list[Bytes]:
    """Return the pieces of the state of a sequence that holds these arrays."""
    layout = native.state_layout()
    parts = {part["part"]: part for part in layout}
    given = {"window": arrays.window, "recurrent": arrays.recurrent}
    for name, present in given.items():
        if (present is None) == (name in parts):
            needs = "needs a" if present is None else "has no"
            raise StateError(f"a {native.memory_kind} memory {needs} {name} half")
    if "attention" not in parts and (len(arrays.positions) or len(arrays.layers)):
        raise StateError(f"a {native.memory_kind} memory has no attention layers")
    pieces = [np.frombuffer(struct.pack("<Ii", MAGIC, 0), np.uint8)]
    for part in layout:
        if part["part"] == "recurrent":
            pieces += _recurrent(arrays.recurrent, part)
        else:
            half = arrays if part["part"] == "attention" else arrays.window
            pieces += _attention(native, half, part)
    _check_halves(native, arrays, parts)
    return pieces


def _check_halves(native: lib.Context, arrays: SequenceKV, parts: dict[str, Any]) -> None:
    """Refuse halves of different tokens: what the next one sees must be there in each."""
    last = int(arrays.positions.max(initial=-1))
    recurrent, window = arrays.recurrent, arrays.window
    if recurrent is not None and "attention" in parts and recurrent.position != last:
        raise StateError(f"the states end at {recurrent.position}, the attention half at {last}")
    if window is None:
        return
    found, counts = np.unique(window.positions, return_counts=True)
    every, all_counts = np.unique(arrays.positions, return_counts=True)
    have = dict(zip(found.tolist(), counts.tolist(), strict=True))
    expected = dict(zip(every.tolist(), all_counts.tolist(), strict=True))
    if any(expected.get(position) != n for position, n in have.items()):
        raise StateError("the window half holds tokens that the attention half does not")
    seen = every[native.in_window(every.astype(np.int32), last + 1)]
    missing = [position for position in seen.tolist() if position not in have]
    if missing:
        raise StateError(f"the window half lacks position {missing[0]}, which is in the window")


def _attention(native: lib.Context, half: SequenceKV | None, part: dict[str, Any]) -> list[Bytes]:
    if not isinstance(half, SequenceKV):
        raise TypeError(f"window must be a SequenceKV, not {type(half).__name__}")
    positions = _positions(half, part)
    n, streams = len(positions), part["n_stream"]
    rows = [row for row in part["rows"] if row[0] == "k"]
    if not isinstance(half.layers, Sequence) or not all(
        isinstance(layer, LayerKV) for layer in half.layers
    ):
        raise TypeError("layers must be a sequence of LayerKV")
    if len(half.layers) != len(rows):
        raise StateError(f"{len(half.layers)} layers given, the cache has {len(rows)}")
    edges = native.hadamard(part["part"])
    data: list[Bytes] = []
    for i, (_, layer, kind, _, row_bytes, heads, dim) in enumerate(rows):
        _same_layer(half.layers[i].layer, layer, f"layers[{i}]")
        keys = half.layers[i].keys
        what = f"{part['part']} layers[{i}].keys"
        if not half.rope:
            keys = _floats(keys, (n, heads, dim), what).astype(np.float32)
            facts = native.rope(layer)
            keys = rotate(keys, positions, facts, undo=False, operation="write_kv")
        stored = _rows(keys, (n, heads, dim), kind, edges[0], what)
        data += [_packed("<iQ", kind, row_bytes), stored.reshape(-1)]
    values = [row for row in part["rows"] if row[0] != "k"]
    for i, (what, _, kind, n_embd, row_bytes, heads, dim) in enumerate(values):
        name = f"{part['part']} layers[{i}].values"
        stored = _rows(half.layers[i].values, (n, heads, dim), kind, edges[1], name)
        if what == "v":
            data += [_packed("<iQ", kind, row_bytes), stored.reshape(-1)]
        else:
            size = GgmlType(kind).block_bytes
            data += [_packed("<iII", kind, size, n_embd)]
            columns = as_stored(stored, kind).reshape(n, n_embd).T
            data += [np.ascontiguousarray(columns).reshape(-1).view(np.uint8)]
    pieces = [_packed("<II", streams, n)]
    if n:
        pieces += [_cells(half, positions), _packed("<II", part["v_trans"], part["n_layer"]), *data]
    return [*pieces, np.zeros(4 * (streams - 1), np.uint8)]  # the other streams hold nothing


def _positions(half: SequenceKV, part: dict[str, Any]) -> npt.NDArray[np.int32]:
    positions = np.asarray(half.positions)
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise StateError("positions must be a vector of integers")
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < 2**31 - 1:
        raise StateError("positions must be in [0, 2147483647)")
    if (half.extended is None) == part["extended"]:
        needs = "needs" if half.extended is None else "has no"
        raise StateError(f"this memory {needs} extended positions (M-RoPE)")
    if half.extended is not None:
        extended = np.asarray(half.extended)
        if extended.shape != (len(positions), 3) or extended.dtype.kind not in "iu":
            raise StateError(
                f"extended must hold integers of shape ({len(positions)}, 3), "
                f"not {extended.dtype} of shape {extended.shape}"
            )
        if extended.size and not -1 <= int(extended.min()) <= int(extended.max()) < 2**31 - 1:
            raise StateError("extended positions must be in [-1, 2147483647)")
    return positions.astype(np.int32)


def _cells(half: SequenceKV, positions: npt.NDArray[np.int32]) -> Bytes:
    """Per cell: position, number of sequences, what extends it, and a sequence that is not read."""
    columns = [positions, np.ones_like(positions)]
    if half.extended is not None:
        columns += list(np.asarray(half.extended, np.int32).T)
    cells = np.stack([*columns, np.zeros_like(positions)], axis=1).astype("<i4")
    return np.ascontiguousarray(cells).reshape(-1).view(np.uint8)


def _recurrent(state: RecurrentState | None, part: dict[str, Any]) -> list[Bytes]:
    if not isinstance(state, RecurrentState):
        raise TypeError(f"recurrent must be a RecurrentState, not {type(state).__name__}")
    if not all(isinstance(layer, LayerState) for layer in state.layers):
        raise TypeError("recurrent layers must be a sequence of LayerState")
    if not -1 <= state.position < 2**31 - 1:
        raise StateError("the position of a state must be in [-1, 2147483647)")
    rows = part["rows"]
    if any(row[0] == "ple" for row in rows):
        raise UnsupportedOperation("write_kv", "the history of per-layer embeddings is not known")
    indices = sorted({row[1] for row in rows})
    if len(state.layers) != len(indices):
        raise StateError(f"{len(state.layers)} recurrent layers given, there are {len(indices)}")
    n = int(state.position >= 0)
    pieces = [_packed("<I", n)]
    if n:
        pieces += [_packed("<iI", state.position, 0)]
    pieces += [_packed("<II", 0, part["n_layer"])]
    for what, layer, kind, n_embd, row_bytes, *_ in rows:
        given = state.layers[indices.index(layer)]
        name = f"recurrent layers[{indices.index(layer)}]"
        _same_layer(given.layer, layer, name)
        values = _floats(getattr(given, what), (n_embd * n,), f"{name}.{what}")
        pieces += [_packed("<iQ", kind, row_bytes)]
        if n:
            stored = _rows(values.reshape(1, 1, -1), (1, 1, n_embd), kind, 0, f"{name}.{what}")
            pieces += [stored.reshape(-1)]
    return pieces


def _rows(given: Array, shape: tuple[int, int, int], kind: int, edge: int, what: str) -> Bytes:
    """Floats, or stored bits, as rows of the cache's type."""
    array = np.asarray(given)
    if array.dtype == stored_dtype(kind) and kind not in NATURAL:
        bits = (*shape[:2], as_rows(np.zeros((1, 1, shape[2]), np.float32), kind, 0).shape[-1])
        rows = np.ascontiguousarray(array).view(np.uint8)
        if rows.shape != bits:
            raise StateError(f"{what} has {rows.shape} bytes: {bits} are expected")
    else:
        rows = as_rows(_floats(array, shape, what), kind, edge)
    if not np.isfinite(as_floats(rows, kind, 0)).all():
        raise StateError(f"{what} holds NaN, infinity, or a value too large for the cache's type")
    return rows


def _floats(given: Array, shape: tuple[int, ...], what: str) -> npt.NDArray[Any]:
    array = np.asarray(given)
    if array.shape != shape:
        raise StateError(f"{what} has shape {array.shape}: {shape} is expected")
    if array.dtype.kind != "f":
        raise StateError(f"{what} must hold floats, not {array.dtype}")
    with np.errstate(over="ignore"):
        if not np.isfinite(array.astype(np.float32)).all():
            raise StateError(f"{what} holds NaN, infinity, or a value too large for float32")
    return array


def _same_layer(given: int, layer: int, what: str) -> None:
    if given not in (-1, layer):
        raise StateError(f"{what} is of layer {given} of a model: layer {layer} is expected")


def _packed(form: str, *values: int) -> Bytes:
    return np.frombuffer(struct.pack(form, *values), np.uint8)
