"""Convert cells: ggml's types to floats and back, and parts for another context.

Before llama.cpp quantises K and V, it multiplies each head by a Hadamard matrix, which spreads
outliers. The matrix is symmetric and orthonormal, so the same product undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import ByteArray, as_bool
from pykvcache._native import lib
from pykvcache.enums import GgmlType
from pykvcache.errors import StateDamaged, StateError, StateLayoutMismatch
from pykvcache.state.layout import Part, PartLayout, Rows, need_equal

__all__ = ["NATURAL", "as_floats", "as_rows", "as_stored", "fit_parts", "stored_dtype"]

Floats = npt.NDArray[np.float32]

#: Float types that NumPy has.
NATURAL: dict[int, np.dtype[Any]] = {
    GgmlType.F32: np.dtype(np.float32),
    GgmlType.F16: np.dtype(np.float16),
}


def stored_dtype(kind: int) -> np.dtype[Any]:
    """Return the dtype of stored values: uint16 for bf16, uint8 for blocks of quantised types."""
    if kind == GgmlType.BF16:
        return np.dtype(np.uint16)
    return NATURAL.get(kind, np.dtype(np.uint8))


def as_stored(rows: ByteArray, kind: int) -> npt.NDArray[Any]:
    """View rows (tokens, heads, bytes of a head) as values of the stored type."""
    return rows.view(stored_dtype(kind))


def as_floats(rows: ByteArray, kind: int, edge: int) -> Floats:
    """Convert rows (tokens, heads, bytes of a head) to float32, undoing a Hadamard rotation."""
    if kind in NATURAL:
        floats = as_stored(rows, kind).astype(np.float32)
    else:
        flat = lib.dequantize(kind, rows.reshape(-1))
        known = GgmlType(kind)
        head_dim = rows.shape[-1] // known.block_bytes * known.block_size
        floats = flat.reshape(*rows.shape[:-1], head_dim)
    return rotated(floats, edge) if edge and floats.size else floats


def as_rows(floats: Floats, kind: int, edge: int) -> ByteArray:
    """Convert finite floats (tokens, heads, head_dim) to rows, as llama.cpp stores them."""
    if edge and floats.size:
        floats = rotated(floats, edge)
    if kind in NATURAL:
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(floats, NATURAL[kind]).reshape(-1).view(np.uint8)
    else:
        flat = lib.quantize(kind, np.ascontiguousarray(floats, np.float32).reshape(-1))
    known = GgmlType(kind)
    n_bytes = floats.shape[-1] // known.block_size * known.block_bytes
    return flat.reshape(*floats.shape[:-1], n_bytes)


def _hadamard(edge: int) -> Floats:
    """Return the orthonormal matrix of Sylvester's construction."""
    matrix = np.full((1, 1), edge**-0.5, np.float32)
    while len(matrix) < edge:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotated(floats: Floats, edge: int) -> Floats:
    """Multiply every `edge` values by the Hadamard matrix."""
    turned: Floats = floats.reshape(*floats.shape[:-1], -1, edge) @ _hadamard(edge)
    return turned.reshape(floats.shape)


def fit_parts(
    parts: Sequence[Sequence[Part]], layouts: Sequence[PartLayout], *, convert: bool
) -> list[list[Part]]:
    """Return parts as another context stores them; reuse the tensors where nothing differs.

    Raises
    ------
    StateLayoutMismatch
        Parts, layers or heads differ, or types do and ``convert`` is false.
    """
    convert = as_bool(convert, "convert")
    need_equal("kinds of cache", len(parts), len(layouts))
    return [
        [_fit(part, layout, convert=convert) for part in streams]
        for streams, layout in zip(parts, layouts, strict=True)
    ]


def _fit(part: Part, target: PartLayout, *, convert: bool) -> Part:
    _compare(part.layout, target, convert=convert)
    tensors = []
    for i, (rows, wanted) in enumerate(zip(part.layout.rows, target.rows, strict=True)):
        tensor, transposed = part.tensors[i], part.is_transposed(i)
        if (rows.type, rows.rotation) != (wanted.type, wanted.rotation):
            plain = _transpose(tensor, rows) if transposed else tensor
            tensor, transposed = _store(_load(plain, rows), wanted), False
        if transposed != (target.v_trans and wanted.what == "v"):
            tensor = _transpose(tensor, wanted)
        tensors.append(tensor)
    return replace(part, layout=target, tensors=tuple(tensors))


def _compare(layout: PartLayout, target: PartLayout, *, convert: bool) -> None:
    for what in ("part", "n_layer", "extended"):
        need_equal(what, getattr(layout, what), getattr(target, what))
    need_equal(f"number of {layout.part} tensors", len(layout.rows), len(target.rows))
    for rows, wanted in zip(layout.rows, target.rows, strict=True):
        for what in ("what", "layer", "n_embd", "n_head", "head_dim"):
            name = f"{what} of layer {wanted.layer}"
            need_equal(name, getattr(rows, what), getattr(wanted, what))
        if rows.type == wanted.type and rows.rotation == wanted.rotation:
            need_equal(f"bytes of a row of layer {wanted.layer}", rows.row_bytes, wanted.row_bytes)
        elif rows.what not in ("k", "v"):
            message = (
                f"the recurrent state of layer {rows.layer} has a different type in this context"
            )
            raise StateLayoutMismatch(message, f"layer {rows.layer}")
        elif not convert:
            message = (
                f"{rows.what.upper()} is stored as {_name(rows)} in the state and as "
                f"{_name(wanted)} in this context: pass convert=True to convert it, with rounding"
            )
            raise StateLayoutMismatch(message, rows.what, _name(rows), _name(wanted))


def _name(rows: Rows) -> str:
    return ("rotated " if rows.rotation else "") + rows.type_name


def _transpose(tensor: ByteArray, rows: Rows) -> ByteArray:
    """Swap cells and dimensions of values; block types are never stored transposed."""
    size = rows.row_bytes // rows.n_embd
    if tensor.ndim == 2:
        tensor = tensor.reshape(len(tensor), rows.n_embd, size)
        return np.ascontiguousarray(tensor.transpose(1, 0, 2))
    plain: ByteArray = np.ascontiguousarray(tensor.transpose(1, 0, 2))
    return plain.reshape(len(plain), rows.row_bytes)


def _load(tensor: ByteArray, rows: Rows) -> Floats:
    """Return dequantized, unrotated values: float32, shape (n_cells, n_head, head_dim)."""
    n_bytes = rows.row_bytes // max(rows.n_head, 1)
    try:
        heads = np.ascontiguousarray(tensor).reshape(len(tensor), rows.n_head, n_bytes)
        return as_floats(heads, rows.type, rows.rotation)
    except ValueError as error:
        raise StateLayoutMismatch(str(error)) from None


def _store(values: Floats, rows: Rows) -> ByteArray:
    if not np.isfinite(values).all():
        raise StateDamaged(
            "the state holds NaN or infinity, which cannot be converted", what="values"
        )
    try:
        stored = as_rows(values, rows.type, rows.rotation)
    except ValueError as error:
        raise StateLayoutMismatch(str(error)) from None
    # The scale of a quantised block is an f16, so such types overflow too.
    if not np.isfinite(as_floats(stored, rows.type, 0)).all():
        raise StateError(f"the state holds values too large for {_name(rows)}", what=_name(rows))
    return stored.reshape(len(values), rows.row_bytes)
