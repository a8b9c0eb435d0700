"""llama.cpp's state bytes to parts and back, without copying tensors.

``lib.Context.check_state`` has walked the bytes and says where everything lies; the layout is
described in docs/state-format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pykvcache.state.buffers import ByteArray
from pykvcache.state.layout import IntArray, Part, PartLayout, Rows

__all__ = ["Block", "encode", "split"]

#: ``LLAMA_STATE_SEQ_MAGIC``: what a sequence's state begins with.
MAGIC = 0xAF143CD8
#: part, what, stream, layer, number of cells, offset, size
Block = tuple[str, str, int, int, int, int, int]


def split(
    state: ByteArray, blocks: Sequence[Block], layouts: Sequence[PartLayout], *, whole: bool
) -> list[list[Part]]:
    """Return, per part, the cells of each stream, as views of the state."""
    result = []
    for layout in layouts:
        streams: list[list[Block]] = [[] for _ in range(layout.n_stream)]
        for block in blocks:
            if block[0] == layout.part:
                streams[block[2]].append(block)
        found = [_part(state, own, layout, whole=whole) for own in streams]
        if not whole:
            # A sequence lies in one stream; its state does not depend on which one.
            found = [next((p for p in found if len(p)), found[0])]
        result.append(found)
    return result


def _part(state: ByteArray, blocks: Sequence[Block], layout: PartLayout, *, whole: bool) -> Part:
    if not blocks:
        none = np.empty(0, np.int32)
        return empty(layout, (np.zeros(1, np.int32), none) if whole else None)
    _, what, _, _, n, at, size = blocks[0]
    assert what == "cells"
    words = state[at : at + size].view(np.int32)
    n_ids = 1 if layout.part != "recurrent" else 0
    width = 2 + 3 * layout.extended
    members: tuple[IntArray, IntArray] | None = None
    if whole:
        heads, members = _members(words, n, width)
    else:
        heads = words.reshape(n, width + n_ids)[:, :width]
    part = Part(
        layout,
        np.ascontiguousarray(heads[:, 0]),
        np.ascontiguousarray(heads[:, 2:5]) if layout.extended else None,
        (),
        members,
    )
    tensors = [
        state[at : at + size].reshape(part.shape(i)) for i, (*_, at, size) in enumerate(blocks[1:])
    ]
    return Part(layout, part.positions, part.ext, tuple(tensors), members)


def _members(
    words: IntArray, n: int, width: int
) -> tuple[npt.NDArray[np.int32], tuple[IntArray, IntArray]]:
    """Separate records of different lengths: their heads, and the ids behind each."""
    starts = np.empty(n + 1, np.int64)
    at = 0
    counts = words.tolist()  # a list is read several times faster than an array
    for i in range(n):
        starts[i] = at
        at += width + counts[at + 1]
    starts[n] = at
    heads = words[starts[:-1, None] + np.arange(width)]
    is_id = np.ones(len(words), bool)
    is_id[(starts[:-1, None] + np.arange(width)).ravel()] = False
    offsets = np.concatenate([[0], np.cumsum(heads[:, 1])]).astype(np.int32)
    return heads, (offsets, words[is_id])


def empty(layout: PartLayout, members: tuple[IntArray, IntArray] | None = None) -> Part:
    """Return a part without cells."""
    ext = np.empty((0, 3), np.int32) if layout.extended else None
    part = Part(layout, np.empty(0, np.int32), ext, ())
    tensors = tuple(np.empty(part.shape(i), np.uint8) for i in range(len(layout.rows)))
    return Part(layout, part.positions, ext, tensors, members)


def encode(
    parts: Sequence[Sequence[Part]], arch: str | None, n_streams: Sequence[int]
) -> list[ByteArray]:
    """Return the bytes of a state as pieces, of which the tensors are not copied.

    ``arch`` begins a whole context's state; a sequence's state goes to the first stream of each
    part, and the others are empty.
    """
    writer = _Writer()
    if arch is None:
        writer.add(struct.pack("<Ii", MAGIC, 0))
    else:
        writer.add(struct.pack("<I", len(arch)) + arch.encode())
    for streams, n_stream in zip(parts, n_streams, strict=True):
        recurrent = streams[0].layout.part == "recurrent"
        if not recurrent:
            writer.add(struct.pack("<I", n_stream))
        for part in streams:
            writer.add(struct.pack("<I", len(part)) + _records(part))
            if len(part) or recurrent:
                _data(writer, part)
        writer.add(bytes(4 * (n_stream - len(streams))))
    return writer.pieces


def _records(part: Part) -> bytes:
    n, width = len(part), 2 + 3 * part.layout.extended
    if part.members is None:
        n_ids = 1 if part.layout.part != "recurrent" else 0
        table = np.zeros((n, width + n_ids), "<i4")
        table[:, 0], table[:, 1] = part.positions, n_ids
        if part.ext is not None:
            table[:, 2:5] = part.ext
        return table.tobytes()
    offsets, ids = part.members
    counts = np.diff(offsets)
    starts = np.arange(n) * width + offsets[:-1]
    words = np.zeros(n * width + len(ids), "<i4")
    heads = starts[:, None] + np.arange(width)
    table = np.zeros((n, width), "<i4")
    table[:, 0], table[:, 1] = part.positions, counts
    if part.ext is not None:
        table[:, 2:5] = part.ext
    is_id = np.ones(len(words), bool)
    is_id[heads.ravel()] = False
    words[heads], words[is_id] = table, ids
    return words.tobytes()


def _data(writer: _Writer, part: Part) -> None:
    layout = part.layout
    writer.add(struct.pack("<II", layout.v_trans, layout.n_layer))
    for i, (rows, tensor) in enumerate(zip(layout.rows, part.tensors, strict=True)):
        writer.add(_head(rows, transposed=part.is_transposed(i)))
        writer.add_tensor(tensor)


def _head(rows: Rows, *, transposed: bool) -> bytes:
    if transposed:
        return struct.pack("<iII", rows.type, rows.row_bytes // rows.n_embd, rows.n_embd)
    if rows.what == "ple":
        return struct.pack("<Q", rows.row_bytes)
    return struct.pack("<iQ", rows.type, rows.row_bytes)


class _Writer:
    """Small runs of bytes are joined, tensors stay where they are."""

    def __init__(self) -> None:
        self._pieces: list[ByteArray] = []
        self._small: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._small.append(data)

    def add_tensor(self, tensor: ByteArray) -> None:
        self._flush()
        self._pieces.append(np.ascontiguousarray(tensor).reshape(-1))

    def _flush(self) -> None:
        if self._small:
            self._pieces.append(np.frombuffer(b"".join(self._small), np.uint8))
            self._small = []

    @property
    def pieces(self) -> list[ByteArray]:
        self._flush()
        return self._pieces
