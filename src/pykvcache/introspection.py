"""Inspect a context's memory: kind, cells, positions, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvcache._native import lib
from pykvcache.enums import GgmlType, MemoryKind, MemoryPart

__all__ = [
    "BufferBytes",
    "CellTable",
    "IntrospectionMethods",
    "MemoryInfo",
    "PerfData",
    "SequenceRange",
]


@dataclass(frozen=True)
class MemoryInfo:
    """Kind and capabilities of a context's memory.

    Attributes
    ----------
    kind
        As in `LlamaContext.memory_kind`.
    class_name
        llama.cpp's C++ class.
    kv_unified
        Whether all sequences share one pool of cells.
    n_streams
        Number of separate pools; 0 without memory.
    n_cells
        Cells per stream; number of states of a recurrent memory.
    n_swa
        Sliding window in tokens; 0 for none.
    type_k, type_v
        Stored types of keys and values.
    can_shift
        Whether positions can be shifted in principle; single calls may still be refused.
    can_copy_partial, can_remove_partial
        Whether a part of a sequence can be copied or removed.
    max_rollback
        Maximum number of tokens by which a recurrent state can be rolled back: ``n_rs_seq``.
    bytes_total
        Bytes of the buffers.
    bytes_per_token
        Bytes of one attention cell over all layers; 0 for recurrent memory, whose
        size does not depend on the length.
    buffer_types
        ggml's names of its buffer types, such as ``"CPU"`` and ``"CUDA0"``. For the bytes in each,
        see `LlamaContext.memory_breakdown`.
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
    """Bytes in buffers of one type: model weights, context memory, compute graphs."""

    model: int
    context: int
    compute: int


class SequenceRange(NamedTuple):
    """Lowest and highest position of a sequence, and its number of cells."""

    pos_min: int
    pos_max: int
    n_cells: int


@dataclass(frozen=True, repr=False)
class CellTable:
    """Copy of the used cells of a memory, one row each.

    Attributes
    ----------
    stream, cell
        Stream and number of the cell; int32, shape (n,).
    pos
        Position; int32, shape (n,).
    members
        Which sequences have the cell; bool, shape (n, n_seq_max).
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


@dataclass(frozen=True)
class PerfData:
    """Measurements of ``llama_perf_context``; times in milliseconds.

    llama.cpp counts a call with one token as generation and any other as prompt.
    """

    t_load_ms: float
    t_p_eval_ms: float
    t_eval_ms: float
    n_p_eval: int
    n_eval: int
    n_reused: int


class IntrospectionMethods:
    """The inspecting methods of `LlamaContext`; a base class."""

    _native: lib.Context
    _type_k: GgmlType
    _type_v: GgmlType

    @property
    def memory_kind(self) -> MemoryKind:
        """Kind of memory.

        ``"attention"``, ``"sliding-window"``, ``"recurrent"``, ``"hybrid"``,
        ``"hybrid-sliding-window"``, ``"none"``, or ``"other"``: sparse attention, which cannot
        shift. With DeepSeek 4, only whole sequences can be copied or removed.
        """
        return self._native.memory_kind

    @property
    def memory_info(self) -> MemoryInfo:
        """Kind and capabilities of the memory."""
        facts: dict[str, Any] = self._native.memory_info()
        return MemoryInfo(type_k=self._type_k, type_v=self._type_v, **facts)

    def memory_breakdown(self) -> dict[str, BufferBytes]:
        """Return the bytes of model and context by buffer type (``llama_get_memory_breakdown``).

        Returns
        -------
        dict of str to BufferBytes
            Keys are ggml's names of buffer types: ``"CPU"``, ``"CPU_Mapped"`` for weights in a
            mapped file, ``"CUDA0"``.
        """
        return {name: BufferBytes(*sizes) for name, *sizes in self._native.memory_breakdown()}

    @property
    def n_cells_used(self) -> int:
        """Number of used cells over all streams; number of states of a recurrent memory."""
        return self._native.n_cells_used

    def cells(self, part: MemoryPart | None = None) -> CellTable:
        """Return all used cells with their positions and sequences.

        Parameters
        ----------
        part
            ``"attention"``, ``"window"`` (the cache of sliding-window layers), ``"recurrent"`` or
            ``"index"`` (of sparse attention). Default: attention, or recurrent if there is no
            attention part.
        """
        return CellTable(*self._native.cells(part))

    def sequences(self) -> dict[int, SequenceRange]:
        """Return the non-empty sequences with their ranges."""
        return {s: SequenceRange(*r) for s, r in self._native.sequences().items()}

    def kv_cache_seq_pos_max(self, seq_id: SupportsIndex) -> int:
        """Return the highest position of a sequence; -1 if empty, unused or out of range."""
        return self._native.seq_pos(seq_id, True)

    def kv_cache_seq_pos_min(self, seq_id: SupportsIndex) -> int:
        """Return the lowest position of a sequence; -1 if empty, unused or out of range.

        On a sliding-window memory: the lowest one in the window.
        """
        return self._native.seq_pos(seq_id, False)

    def can_resume(self, seq_id: SupportsIndex, pos: SupportsIndex) -> bool:
        """Return whether removing from ``pos`` on and decoding at ``pos`` gives the right logits.

        Right means attention over exactly the remaining cells, which equals a fresh run unless
        cells were removed from the middle or their positions were shifted or divided before. The
        existing cells decide: a recurrent state can only continue at its end or, with `n_rs_seq`,
        be rolled back within the last decode's tokens; a sliding window must still have the cells
        that the query at ``pos`` sees. Always True at 0; an empty sequence can resume at 0 only.
        """
        return self._native.can_resume(seq_id, pos)
