"""The parts of a state as arrays: parsed from raw states, and passed to the compiled layer.

Only the compiled layer reads and writes the bytes; docs/state-format.md shows their layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from pykvcache._native import lib
from pykvcache.state.buffers import ByteArray
from pykvcache.state.layout import IntArray, Members, Part, PartLayout

__all__ = ["set_parts", "split"]


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
            found.append(Part(layout, positions, ext, tuple(tensors), members))
        result.append(found)
    return result


def set_parts(
    native: lib.Context,
    seq_id: SupportsIndex | None,
    parts: Sequence[Sequence[Part]],
    firsts: list[tuple[int, int]] | None,
) -> None:
    """Replace the cells of a sequence, or with None of the context; atomic."""
    given = [[_as_given(part) for part in streams] for streams in parts]
    native.set_parts(seq_id, given, firsts)


def _as_given(part: Part) -> tuple[IntArray, IntArray | None, Members | None, list[ByteArray]]:
    ext = None if part.ext is None else np.ascontiguousarray(part.ext, np.int32).reshape(-1)
    rows = [np.ascontiguousarray(tensor).reshape(-1) for tensor in part.tensors]
    return np.ascontiguousarray(part.positions, np.int32), ext, part.members, rows
