"""A live sequence's keys and values as NumPy arrays, and back.

The bytes between are llama.cpp's own sequence state (``llama_state_seq_get_data``):
a header, the cells' positions, then per layer all keys and per layer all values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache.enums import GgmlType
from pykvcache.errors import StateError, UnsupportedOperation

__all__ = ["KvMethods", "LayerKV", "SequenceKV"]

#: ``LLAMA_STATE_SEQ_MAGIC``: what a sequence state begins with.
MAGIC = 0xAF143CD8
DTYPES: dict[GgmlType, npt.DTypeLike] = {GgmlType.F32: np.float32, GgmlType.F16: np.float16}


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer.

    Attributes
    ----------
    keys
        Shape (n_tokens, n_head_kv, head_dim), rotated to the positions of the cells.
    values
        Shape (n_tokens, n_head_kv, value head_dim).
    """

    keys: npt.NDArray[np.floating[Any]]
    values: npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class SequenceKV:
    """What a sequence holds: positions, and keys and values per layer.

    Attributes
    ----------
    positions
        Position of each token; int32, shape (n_tokens,), in the order of the arrays.
    layers
        One entry per layer that caches anything.
    """

    positions: npt.NDArray[np.int32]
    layers: Sequence[LayerKV]

    def __len__(self) -> int:
        return len(self.positions)


class KvMethods:
    """The array methods of `LlamaContext`."""

    _native: lib.Context
    _type_k: GgmlType
    _type_v: GgmlType

    def kv(self, seq_id: SupportsIndex) -> SequenceKV:
        """Return the keys and values that a sequence holds, as copies in the stored type.

        Pending shifts are applied first, so keys are rotated to the positions given. The
        tokens are in the order of their positions.

        Raises
        ------
        UnsupportedOperation
            The memory is not plain attention, stores several positions per token
            (M-RoPE), or stores a type that NumPy does not have (only f32 and f16 yet).
        """
        layout = self._layout("kv")
        state = self._native.seq_get_state(seq_id)
        return layout.read(memoryview(state.data))

    def write_kv(self, seq_id: SupportsIndex, arrays: SequenceKV) -> None:
        """Make a sequence hold these keys and values, and nothing else.

        All or nothing. Keys must be rotated to the positions given; several tokens may share
        a position, as they do after a division. The sequence has no
        logits until a token is decoded.

        Raises
        ------
        StateError
            Shapes, types or positions do not fit this context; nothing is changed.
        NoKvCacheSlot
            There is no room for that many cells; nothing is changed.
        UnsupportedOperation
            As for `kv`.
        """
        layout = self._layout("write_kv")
        if not isinstance(arrays, SequenceKV):
            raise TypeError(f"arrays must be a SequenceKV, not {type(arrays).__name__}")
        if self._native.model.has_encoder:
            raise UnsupportedOperation("write_kv", "the cells depend on the encoder's input")
        state = layout.write(arrays)
        self._native.seq_set_state(seq_id, np.frombuffer(state, np.uint8), len(arrays))

    def _layout(self, operation: str) -> _Layout:
        if self._native.memory_kind != "attention":
            raise UnsupportedOperation(
                operation, f"arrays of {self._native.memory_kind} memory are not there yet"
            )
        if self._native.model.rope_type in (8, 24, 40):
            raise UnsupportedOperation(operation, "M-RoPE stores several positions per token")
        for kind in (self._type_k, self._type_v):
            if kind not in DTYPES:
                raise UnsupportedOperation(
                    operation, f"NumPy has no {kind.name.lower()}: only f32 and f16 are there yet"
                )
        return _Layout(
            self._native.layer_shapes(),
            self._type_k,
            self._type_v,
            not self._native.flash_attn,
            self._native.n_streams,
        )


class _Layout:
    """Where things are in the state of a plain attention cache."""

    def __init__(
        self,
        shapes: list[tuple[int, int, int]],
        type_k: GgmlType,
        type_v: GgmlType,
        v_trans: bool,
        n_streams: int,
    ) -> None:
        self.shapes = shapes
        self.types = (type_k, type_v)
        self.dtypes = (np.dtype(DTYPES[type_k]), np.dtype(DTYPES[type_v]))
        self.v_trans = v_trans
        self.n_streams = n_streams

    def read(self, state: memoryview) -> SequenceKV:
        at = struct.calcsize("<Ii")
        (n_stream,) = struct.unpack_from("<I", state, at)
        at += 4
        counts = []
        for _ in range(n_stream):
            (n,) = struct.unpack_from("<I", state, at)
            at += 4
            counts.append(n)
            if n:
                break
        n = counts[-1]
        if n == 0:
            return self._empty()
        cells = np.frombuffer(state, "<i4", 3 * n, at).reshape(n, 3)
        order = np.argsort(cells[:, 0], kind="stable")
        at += cells.nbytes + struct.calcsize("<II")
        keys, values = [], []
        for heads, dim, _ in self.shapes:
            at += struct.calcsize("<iQ")
            rows = np.frombuffer(state, self.dtypes[0], n * heads * dim, at)
            at += rows.nbytes
            keys.append(rows.reshape(n, heads, dim)[order])
        for heads, _, dim in self.shapes:
            at += struct.calcsize("<iII" if self.v_trans else "<iQ")
            rows = np.frombuffer(state, self.dtypes[1], n * heads * dim, at)
            at += rows.nbytes
            grid = rows.reshape(heads * dim, n).T if self.v_trans else rows.reshape(n, heads * dim)
            values.append(grid[order].reshape(n, heads, dim))
        if at + 4 * (n_stream - len(counts)) != len(state):
            raise UnsupportedOperation("kv", "the cells of this model hold more than K and V")
        positions = cells[order, 0].astype(np.int32)
        return SequenceKV(positions, [LayerKV(k, v) for k, v in zip(keys, values, strict=True)])

    def _empty(self) -> SequenceKV:
        layers = [
            LayerKV(np.empty((0, h, k), self.dtypes[0]), np.empty((0, h, v), self.dtypes[1]))
            for h, k, v in self.shapes
        ]
        return SequenceKV(np.empty(0, np.int32), layers)

    def write(self, arrays: SequenceKV) -> bytes:
        positions = self._positions(arrays)
        n = len(positions)
        parts = [struct.pack("<IiII", MAGIC, 0, self.n_streams, n)]
        if n:
            # Per cell: position, number of sequences, and the sequence, which is not read back.
            cells = np.tile(np.array([0, 1, 0], "<i4"), (n, 1))
            cells[:, 0] = positions
            parts += [cells.tobytes(), struct.pack("<II", self.v_trans, len(self.shapes))]
            parts += self._keys(arrays, n)
            parts += self._values(arrays, n)
        parts.append(bytes(4 * (self.n_streams - 1)))  # the other streams hold nothing
        return b"".join(parts)

    def _positions(self, arrays: SequenceKV) -> npt.NDArray[np.int32]:
        positions = np.asarray(arrays.positions)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            raise StateError("positions must be a vector of integers")
        if not isinstance(arrays.layers, Sequence) or not all(
            isinstance(layer, LayerKV) for layer in arrays.layers
        ):
            raise TypeError("layers must be a sequence of LayerKV")
        if len(arrays.layers) != len(self.shapes):
            raise StateError(f"{len(arrays.layers)} layers given, the cache has {len(self.shapes)}")
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < 2**31 - 1:
            raise StateError("positions must be in [0, 2147483647)")
        return positions.astype(np.int32)

    def _keys(self, arrays: SequenceKV, n: int) -> list[bytes]:
        parts = []
        for i, (heads, dim, _) in enumerate(self.shapes):
            rows = self._checked(arrays.layers[i].keys, (n, heads, dim), 0, f"layers[{i}].keys")
            row_bytes = heads * dim * self.dtypes[0].itemsize
            parts += [struct.pack("<iQ", self.types[0], row_bytes), rows.tobytes()]
        return parts

    def _values(self, arrays: SequenceKV, n: int) -> list[bytes]:
        parts = []
        for i, (heads, _, dim) in enumerate(self.shapes):
            rows = self._checked(arrays.layers[i].values, (n, heads, dim), 1, f"layers[{i}].values")
            size = self.dtypes[1].itemsize
            if self.v_trans:
                head = struct.pack("<iII", self.types[1], size, heads * dim)
                rows = rows.reshape(n, heads * dim).T
            else:
                head = struct.pack("<iQ", self.types[1], heads * dim * size)
            parts += [head, np.ascontiguousarray(rows).tobytes()]
        return parts

    def _checked(
        self, rows: npt.NDArray[Any], shape: tuple[int, ...], which: int, what: str
    ) -> npt.NDArray[Any]:
        array = np.asarray(rows)
        if array.shape != shape:
            raise StateError(f"{what} has shape {array.shape}: {shape} is expected")
        if array.dtype.kind != "f":
            raise StateError(f"{what} must hold floats, not {array.dtype}")
        dtype = self.dtypes[which]
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(array, dtype=dtype)
        if not np.isfinite(stored).all():
            raise StateError(f"{what} holds NaN, infinity, or a value too large for {dtype}")
        return stored
