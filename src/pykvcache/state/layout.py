"""What each part of a memory stores per cell, and cells as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import ByteArray
from pykvcache._native import lib
from pykvcache.enums import GgmlType
from pykvcache.errors import ArgumentError, StateLayoutMismatch

__all__ = [
    "Part",
    "PartLayout",
    "Rows",
    "layouts_from_native",
    "need_equal",
    "set_parts",
    "split",
]

IntArray = npt.NDArray[np.int32]
#: CSR lists of sequence ids: cell i belongs to ids[offsets[i]:offsets[i + 1]].
Members = tuple[IntArray, IntArray]


def need_equal(what: str, found: object, wanted: object) -> None:
    """Raise `StateLayoutMismatch` if a state differs from this context."""
    if found != wanted:
        message = f"{what} is {found!r} in the state, but {wanted!r} in this context"
        raise StateLayoutMismatch(message, what, found, wanted)


@dataclass(frozen=True)
class Rows:
    """Layout of one tensor, a row per cell.

    Attributes
    ----------
    what
        ``"k"`` or ``"v"`` of attention; ``"r"``, ``"s"`` or ``"ple"`` of recurrent layers.
    layer
        Index of the layer in the model.
    type
        ``ggml_type`` of the elements.
    n_embd
        Elements per cell.
    row_bytes
        Bytes per cell.
    n_head, head_dim
        For attention, their product is ``n_embd``; 0 for other parts.
    rotation
        Edge of the Hadamard matrices that every head is multiplied by before it is stored,
        or 0.
    """

    what: str
    layer: int
    type: int
    n_embd: int
    row_bytes: int
    n_head: int = 0
    head_dim: int = 0
    rotation: int = 0

    @property
    def type_name(self) -> str:
        """The name of `type`."""
        return {int(t): t.name.lower() for t in GgmlType}.get(self.type, f"type {self.type}")


@dataclass(frozen=True)
class PartLayout:
    """One cache of a memory.

    Attributes
    ----------
    part
        ``"attention"``, ``"window"``, ``"recurrent"``, or ``"index"`` (the index cells of sparse
        attention).
    n_layer
        Number of layers, as llama.cpp's states count them.
    extended
        Whether cells carry ``llama_kv_cell_ext`` (M-RoPE positions, token ids).
    v_trans
        Whether values are stored one row per dimension (flash attention off).
    rows
        The tensors, in the order of llama.cpp's states.
    n_stream
        Streams of the context; not a property of a saved sequence.
    """

    part: str
    n_layer: int
    extended: bool
    v_trans: bool
    rows: tuple[Rows, ...]
    n_stream: int = field(default=1, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON description for a file."""
        return {
            "part": self.part,
            "n_layer": self.n_layer,
            "extended": self.extended,
            "v_trans": self.v_trans,
            "rows": [list(astuple(rows)) for rows in self.rows],  # names of blocks hash its repr
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PartLayout:
        """Parse the output of `to_json`; raise ValueError, TypeError or KeyError if invalid."""
        rows = tuple(Rows(str(r[0]), *(_count(n) for n in r[1:])) for r in data["rows"])
        if any(len(r) != 8 for r in data["rows"]) or data["part"] not in PARTS:
            raise ValueError("not a part")
        if any(row.type >= 2**31 for row in rows):
            raise ValueError("not a type")
        return cls(
            data["part"],
            _count(data["n_layer"]),
            data["extended"] is True,
            data["v_trans"] is True,
            rows,
        )


PARTS = ("attention", "window", "recurrent", "index")

#: Parts stored in prefix-cache blocks: a row per token, restorable in any range.
BLOCK_PARTS = ("attention", "index")


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ArgumentError(f"{value!r} is not a count", "count", value)
    return value


def layouts_from_native(native: lib.Context, *operation: str) -> tuple[PartLayout, ...]:
    """Return the layouts of a context's parts; errors name `operation`."""
    layouts = []
    for part in native.state_layout(*operation):
        rotations = dict(zip("kv", native.hadamard(part["part"]), strict=True))
        rows = []
        for what, layer, kind, n_embd, row_bytes, n_head, head_dim in part["rows"]:
            name = "v" if what == "v_trans" else what
            edge = rotations.get(name, 0)
            rows.append(Rows(name, layer, kind, n_embd, row_bytes, n_head, head_dim, edge))
        layouts.append(
            PartLayout(
                part["part"],
                part["n_layer"],
                part["extended"],
                part["v_trans"],
                tuple(rows),
                part["n_stream"],
            )
        )
    return tuple(layouts)


@dataclass(frozen=True)
class Part:
    """The cells of one stream of one part.

    Attributes
    ----------
    layout
        Layout of the tensors.
    positions
        int32, shape (n_cells,).
    ext
        int32, shape (n_cells, 3): x, y and token of ``llama_kv_cell_ext``; None if absent.
    tensors
        Per entry of ``layout.rows``: uint8, shape (n_cells, row_bytes); transposed values
        have the shape (n_embd, n_cells, bytes of an element) instead.
    members
        Sequences of each cell as (offsets, ids), int32; only in a state of several sequences.
    """

    layout: PartLayout
    positions: IntArray
    ext: IntArray | None
    tensors: tuple[ByteArray, ...]
    members: Members | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def is_transposed(self, i: int) -> bool:
        """Whether tensor i has one row per dimension."""
        return self.layout.v_trans and self.layout.rows[i].what == "v"

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the required shape of tensor i as uint8."""
        rows = self.layout.rows[i]
        if self.is_transposed(i):
            return rows.n_embd, len(self), rows.row_bytes // max(rows.n_embd, 1)
        return len(self), rows.row_bytes

    def take(self, which: slice | npt.NDArray[np.intp]) -> Part:
        """Return some of the cells: views for a slice, copies for an index array."""
        tensors = tuple(
            t[:, which] if self.is_transposed(i) else t[which] for i, t in enumerate(self.tensors)
        )
        ext = None if self.ext is None else self.ext[which]
        return replace(
            self, positions=self.positions[which], ext=ext, tensors=tensors, members=None
        )

    def freeze(self) -> Part:
        """Make the arrays read-only; return the part."""
        for array in (self.positions, self.ext, *(self.members or ()), *self.tensors):
            if array is not None and array.flags.writeable:
                array.flags.writeable = False
        return self

    def in_order(self) -> Part:
        """Return the cells by position; `self` if they are sorted already."""
        if len(self) < 2 or bool((self.positions[:-1] <= self.positions[1:]).all()):
            return self
        return self.take(np.argsort(self.positions, kind="stable"))


# Only the compiled layer reads and writes the bytes; docs/state-format.md shows their layout.


def split(
    native: lib.Context, state: ByteArray, layouts: Sequence[PartLayout], *, whole: bool
) -> list[list[Part]]:
    """Return the cells of each part by stream, as views of the state."""
    result = []
    given = native.split_state(state, whole)
    for layout, streams in zip(layouts, given, strict=True):
        found = []
        for positions, ext, members, places in streams:
            part = Part(layout, positions, ext, (), members)
            rows = [state[at : at + size] for at, size in places] or [state[:0]] * len(layout.rows)
            tensors = [row.reshape(part.shape(i)) for i, row in enumerate(rows)]
            found.append(replace(part, tensors=tuple(tensors)))
        result.append(found)
    return result


def set_parts(
    native: lib.Context,
    seq_id: SupportsIndex | None,
    parts: Sequence[Sequence[Part]],
    firsts: list[tuple[int, int]] | None,
) -> None:
    """Replace the cells of a sequence, or of the whole context for None; atomic."""
    given = [[_as_given(part) for part in streams] for streams in parts]
    native.set_parts(seq_id, given, firsts)


def _as_given(part: Part) -> tuple[IntArray, IntArray | None, Members | None, list[ByteArray]]:
    ext = None if part.ext is None else np.ascontiguousarray(part.ext, np.int32).reshape(-1)
    rows = [np.ascontiguousarray(tensor).reshape(-1) for tensor in part.tensors]
    return np.ascontiguousarray(part.positions, np.int32), ext, part.members, rows
