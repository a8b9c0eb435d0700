"""Convert rows of a cache to floats and back: ggml's types and the Hadamard rotation.

Before llama.cpp quantises K and V, it multiplies each head by a Hadamard matrix, which spreads
outliers. The matrix is symmetric and orthonormal, so the same product undoes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache.enums import GgmlType

__all__ = ["NATURAL", "as_floats", "as_rows", "as_stored", "stored_dtype"]

Bytes = npt.NDArray[np.uint8]
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


def as_stored(rows: Bytes, kind: int) -> npt.NDArray[Any]:
    """View rows (tokens, heads, bytes of a head) as values of the stored type."""
    return rows.view(stored_dtype(kind))


def head_dim(n_bytes: int, kind: int) -> int:
    """Return how many values of a stored type `n_bytes` bytes hold."""
    known = GgmlType(kind)
    return n_bytes // known.block_bytes * known.block_size


def as_floats(rows: Bytes, kind: int, edge: int) -> Floats:
    """Convert rows (tokens, heads, bytes of a head) to float32, undoing a Hadamard rotation."""
    if kind in NATURAL:
        floats = as_stored(rows, kind).astype(np.float32)
    else:
        flat = lib.dequantize(kind, rows.reshape(-1))
        floats = flat.reshape(*rows.shape[:-1], head_dim(rows.shape[-1], kind))
    return rotated(floats, edge) if edge and floats.size else floats


def as_rows(floats: Floats, kind: int, edge: int) -> Bytes:
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
