"""Looking into a context's memory: kind, cells, positions, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache.enums import GgmlType, MemoryKind, MemoryPart

__all__ = ["BufferBytes", "CellTable", "IntrospectionMethods", "MemoryInfo", "SequenceRange"]


@dataclass(frozen=True)
class MemoryInfo:
    """What the memory of a context is and can do.

    Attributes
    ----------
    kind
        ``"attention"``, ``"sliding-window"``, ``"recurrent"``, ``"hybrid"``,
        ``"hybrid-sliding-window"``, ``"none"``, or ``"other"``: a class of llama.cpp of
        which only whole sequences are handled.
    class_name
        llama.cpp's C++ class.
    kv_unified
        Whether all sequences share one pool of cells.
    n_streams
        Number of separate pools; 0 without memory.
    n_cells
        Cells per stream; states of a recurrent memory.
    n_swa
        Sliding window in tokens; 0 if there is none.
    type_k, type_v
        Stored types of keys and values.
    can_shift
        Whether positions can be moved at all; single calls may still be refused.
    can_copy_partial, can_remove_partial
        Whether a part of a sequence can be copied, or removed.
    max_rollback
        Tokens that a recurrent state can step back at most: ``n_rs_seq`` of `LlamaContext`.
    bytes_total
        Bytes of the buffers.
    bytes_per_token
        Bytes of one attention cell over all layers; 0 for recurrent memory, whose
        size does not depend on the length.
    buffer_types
        Where it lies: ggml's names of the types of its buffers, such as ``"CPU"`` and ``"CUDA0"``.
        How many bytes in each: `LlamaContext.memory_breakdown`.
    """

    kind: MemoryKind
    class_name: str
    kv_unified: bool
    n_streams: int
    n_cells: int
    n_swa: int
    type_k: GgmlType
    type_v: GgmlType
    can_shift: bool
    can_copy_partial: bool
    can_remove_partial: bool
    max_rollback: int
    bytes_total: int
    bytes_per_token: int
    buffer_types: tuple[str, ...]


class BufferBytes(NamedTuple):
    """Bytes in buffers of one type: of the model's weights, the context's memory, the graphs."""

    model: int
    context: int
    compute: int


class SequenceRange(NamedTuple):
    """Lowest and highest position that a sequence holds, and in how many cells."""

    pos_min: int
    pos_max: int
    n_cells: int


@dataclass(frozen=True, repr=False)
class CellTable:
    """The used cells of a memory, one row each; a copy.

    Attributes
    ----------
    stream, cell
        Where the cell is; int32, shape (n,).
    pos
        Its position; int32, shape (n,).
    members
        Which sequences hold it; bool, shape (n, n_seq_max).
    """

    stream: npt.NDArray[np.int32]
    cell: npt.NDArray[np.int32]
    pos: npt.NDArray[np.int32]
    members: npt.NDArray[np.bool_]

    def __repr__(self) -> str:
        held = int(self.members.any(axis=0).sum())
        return f"<CellTable: {len(self)} cells of {held} sequences>"

    def __len__(self) -> int:
        return len(self.pos)


class IntrospectionMethods:
    """What the memory is, and what it holds now."""

    _native: lib.Context
    _type_k: GgmlType
    _type_v: GgmlType

    @property
    def memory_kind(self) -> MemoryKind:
        """Kind of memory.

        ``"attention"``, ``"sliding-window"``, ``"recurrent"``, ``"hybrid"``,
        ``"hybrid-sliding-window"``, ``"none"``, or ``"other"``: a class of llama.cpp
        of which only whole sequences are handled.
        """
        return self._native.memory_kind

    @property
    def memory_info(self) -> MemoryInfo:
        """What the memory is and can do."""
        facts: dict[str, Any] = self._native.memory_info()
        return MemoryInfo(type_k=self._type_k, type_v=self._type_v, **facts)

    def memory_breakdown(self) -> dict[str, BufferBytes]:
        """Return what model and context take, in bytes (``llama_get_memory_breakdown``).

        Returns
        -------
        dict of str to BufferBytes
            By ggml's name of the type of buffer: ``"CPU"``, ``"CPU_Mapped"`` for weights that
            stay in the file, ``"CUDA0"``.
        """
        return {name: BufferBytes(*sizes) for name, *sizes in self._native.memory_breakdown()}

    @property
    def n_cells_used(self) -> int:
        """Number of cells in use over all streams; states of a recurrent memory."""
        return self._native.n_cells_used

    def cells(self, part: MemoryPart | None = None) -> CellTable:
        """Return every used cell with its position and its sequences.

        Parameters
        ----------
        part
            ``"attention"``, ``"window"`` (the cache of sliding-window layers), ``"recurrent"`` or
            ``"index"`` (of sparse attention). Default: attention, or recurrent where there is
            nothing else.
        """
        return CellTable(*self._native.cells(part))

    def sequences(self) -> dict[int, SequenceRange]:
        """Return the sequences that hold anything, with their ranges."""
        return {s: SequenceRange(*r) for s, r in self._native.sequences().items()}

    def kv_cache_seq_pos_max(self, seq_id: SupportsIndex) -> int:
        """Return the highest position of a sequence; -1 if empty, unused or out of range."""
        return self._native.seq_pos(seq_id, True)

    def kv_cache_seq_pos_min(self, seq_id: SupportsIndex) -> int:
        """Return the lowest position of a sequence; -1 if empty, unused or out of range.

        On a sliding-window memory: the lowest one that the window still holds.
        """
        return self._native.seq_pos(seq_id, False)

    def can_resume(self, seq_id: SupportsIndex, pos: SupportsIndex) -> bool:
        """Tell whether a decode at ``pos``, after removing from ``pos`` on, would be right.

        Right means: attention over exactly the cells that are left, which is a fresh run
        where nothing was removed from the middle, shifted or divided before. Decided by the
        cells that are really there: a recurrent state can only go on at its end, or with
        `n_rs_seq` step back over the last decode's tokens; a sliding window must still hold
        what the query at ``pos`` sees. True at 0 always; an empty sequence can resume at 0 only.
        """
        return self._native.can_resume(seq_id, pos)
