"""Convert a part for another context: transposed values, other types of K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import ByteArray, as_bool
from pykvcache._codec import as_floats, as_rows
from pykvcache.errors import StateDamaged, StateError, StateLayoutMismatch
from pykvcache.state.layout import Part, PartLayout, Rows, need_equal

__all__ = ["fit_parts"]

Floats = npt.NDArray[np.float32]


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
