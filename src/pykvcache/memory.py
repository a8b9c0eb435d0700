"""The methods of a context that change its memory: fork, rewind, shift and clear."""

from __future__ import annotations

from typing import SupportsIndex

from pykvcache._native import lib

__all__ = ["KvCacheMethods"]


class KvCacheMethods:
    """The memory methods of `LlamaContext`; a base class.

    A sequence holds (token, position) pairs. After a successful call the next logits are
    those of attention over exactly the cells of the sequence. Operations that a memory does
    not support are refused before llama.cpp is called, with nothing changed.

    A range ``[p0, p1)`` selects cells like a slice: ends may lie beyond the sequence, equal ends
    select nothing, ``None`` is an open end. Reversed ranges and negative positions raise
    `PositionError`.
    """

    _native: lib.Context

    def copy_cache(self, src: SupportsIndex, dest: SupportsIndex, size: SupportsIndex) -> None:
        """Replace ``dest`` with the positions ``[0, size)`` of ``src``.

        Equals ``copy_kv_cache_seq(src, dest, 0, size)``; a size of 0 empties ``dest``.
        """
        self._native.copy_cache(src, dest, size)

    def copy_kv_cache_seq(
        self,
        src: SupportsIndex,
        dest: SupportsIndex,
        p0: SupportsIndex | None = None,
        p1: SupportsIndex | None = None,
    ) -> None:
        """Replace ``dest`` with the positions ``[p0, p1)`` of ``src`` (``llama_memory_seq_cp``).

        With ``kv_unified=True`` the cells are shared and the copy costs no memory; otherwise
        the data is copied at the next decode or `kv_cache_update`. If the range is empty,
        ``dest`` is empty afterwards. A copy to itself does nothing.

        Parameters
        ----------
        src, dest
            Sequence ids.
        p0, p1
            Half-open range of positions; ``None`` is an open end.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32.
        SequenceIdError, PositionError
            A value is out of range, or the range is reversed.
        UnsupportedOperation
            This memory cannot copy a part: recurrent and hybrid memory, streams, or a sliding
            window that has dropped cells of that part.
        """
        self._native.seq_cp(src, dest, p0, p1, "copy_kv_cache_seq")

    def copy_prefix(self, src: SupportsIndex, dest: SupportsIndex, n: SupportsIndex) -> None:
        """Replace ``dest`` with the positions below ``n`` of ``src``.

        A copy to itself keeps the prefix. An ``n`` of 0 empties ``dest``; an ``n`` beyond the end
        of ``src`` copies all of it.

        Raises
        ------
        SequenceIdError, PositionError, SeqIdTooLarge, P1TooLarge
            A value is out of range.
        UnsupportedOperation
            As in `copy_kv_cache_seq`.
        """
        self._native.copy_prefix(src, dest, n)

    def clear_kv_cache_seq(
        self,
        src: SupportsIndex | None = None,
        p0: SupportsIndex | None = None,
        p1: SupportsIndex | None = None,
    ) -> bool:
        """Remove the positions ``[p0, p1)`` of a sequence (``llama_memory_seq_rm``).

        Parameters
        ----------
        src
            Sequence id; ``None`` for all sequences.
        p0, p1
            Half-open range of positions; ``None`` is an open end.

        Returns
        -------
        bool
            ``False``, with nothing changed, if this memory cannot remove the part: recurrent and
            hybrid memory (except the last tokens, with `n_rs_seq`), or a sliding window that has
            dropped cells which the next token would see. Removing a whole sequence always
            succeeds. `get_partial_state` and `set_partial_state` rewind these memories.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32; nothing is removed.
        SequenceIdError, PositionError
            A value is out of range, or the range is reversed.
        """
        return self._native.seq_rm(src, p0, p1)

    def remove(
        self, seq_id: SupportsIndex, p0: SupportsIndex | None, p1: SupportsIndex | None = None
    ) -> None:
        """Remove the positions ``[p0, p1)`` and shift later ones to close the gap.

        All or nothing. The later tokens keep K/V computed while the removed ones were visible, so
        the next logits differ from those of a fresh run.

        Parameters
        ----------
        seq_id
            Sequence id.
        p0, p1
            Half-open range of positions; ``None`` is an open end.

        Raises
        ------
        SequenceIdError, PositionError, SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value is out of range, or the range is reversed.
        UnsupportedOperation
            The memory cannot remove that part, or later cells cannot be shifted: shared with
            another sequence, M-RoPE, recurrent state, or dropped window cells.
        """
        self._native.remove(seq_id, p0, p1)

    def clear_kv_cache(self) -> None:
        """Remove all cells and zero their data (``llama_memory_clear``)."""
        self._native.clear(True)

    def kv_cache_seq_keep(self, seq_id: SupportsIndex) -> None:
        """Remove every sequence but one, in every stream (``llama_memory_seq_keep``)."""
        self._native.seq_keep(seq_id)

    def kv_cache_seq_add(
        self,
        seq_id: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        delta: SupportsIndex,
    ) -> None:
        """Add ``delta`` to the positions in ``[p0, p1)`` (``llama_memory_seq_add``).

        Keys are rotated to their new positions at the next decode, or now by
        `kv_cache_update`. Nothing is evaluated again, so the next logits differ from those of a
        fresh run.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32.
        SequenceIdError
            The sequence id is out of range.
        PositionError
            A position would become negative, exceed `max_position` or collide with another one;
            or the range is reversed.
        UnsupportedOperation
            M-RoPE, architectures and types whose keys cannot be rotated again, cells shared with
            another sequence, windows that have dropped cells, and parts of recurrent or hybrid
            sequences.
        """
        self._native.seq_add(seq_id, p0, p1, delta)

    def kv_cache_seq_div(
        self,
        seq_id: SupportsIndex,
        p0: SupportsIndex | None,
        p1: SupportsIndex | None,
        d: SupportsIndex,
    ) -> None:
        """Divide the positions in ``[p0, p1)`` by ``d``, an integer in [1, 255].

        Several cells may then share a position. ``llama_memory_seq_div`` rotates keys the wrong
        way; here each key is rotated by its cell's own shift. Raises like `kv_cache_seq_add`.
        """
        self._native.seq_div(seq_id, p0, p1, d)

    def kv_cache_can_shift(self) -> bool:
        """Return whether this memory supports `kv_cache_seq_add` at all."""
        return self._native.can_shift()

    def kv_cache_update(self) -> None:
        """Apply pending shifts and copies now instead of at the next decode."""
        self._native.update()

    def kv_cache_compact(self) -> int:
        """Move used cells to the lowest free places, so that decodes attend to fewer cells.

        llama.cpp attends to all cells up to the highest used one of any sequence, so a sequence in
        high cells is as slow as a full cache, even if it is the only one. Only speed changes:
        positions, forks, logits and partial states stay the same. Pending shifts and copies are
        applied first.

        Returns
        -------
        int
            Number of moved cells over all parts of the memory.

        Raises
        ------
        UnsupportedOperation
            The model has no memory, or one whose cells must keep their order.
        """
        return self._native.compact()
