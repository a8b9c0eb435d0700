"""Control over a context's memory: the methods that fork, rewind, shift and clear."""

from __future__ import annotations

from typing import SupportsIndex

from pykvcache._native import lib

__all__ = ["KvCacheMethods"]


class KvCacheMethods:
    """The memory methods of `LlamaContext`; not made by itself.

    A sequence holds (token, position) pairs. After every method that succeeds, the
    next logits are those of attention over exactly the cells that the sequence holds.
    What a memory cannot do is refused before llama.cpp is called, with nothing changed.

    A range ``[p0, p1)`` selects the cells that the sequence holds there, as slices do: ends
    beyond them select no more, equal ends nothing, ``None`` leaves an end open. One that runs
    backwards is a `PositionError`, as negative positions are.
    """

    _native: lib.Context

    def copy_cache(self, src: SupportsIndex, dest: SupportsIndex, size: SupportsIndex) -> None:
        """Make ``dest`` hold the positions ``[0, size)`` of ``src``.

        The same as ``copy_kv_cache_seq(src, dest, 0, size)``: a size of 0 empties ``dest``.
        """
        self._native.copy_cache(src, dest, size)

    def copy_kv_cache_seq(
        self,
        src: SupportsIndex,
        dest: SupportsIndex,
        p0: SupportsIndex | None = None,
        p1: SupportsIndex | None = None,
    ) -> None:
        """Make ``dest`` hold what ``src`` holds in ``[p0, p1)`` (``llama_memory_seq_cp``).

        What ``dest`` held before is removed. With ``kv_unified=True`` the cells are
        shared, and the copy costs no memory; otherwise the data is copied at the next
        decode or `kv_cache_update`. Where ``src`` holds nothing in that range, ``dest`` is
        empty afterwards. A copy to itself does nothing.

        Parameters
        ----------
        src, dest
            Sequence ids.
        p0, p1
            Half-open range of positions; ``None`` leaves that end open.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32.
        SequenceIdError, PositionError
            A value is out of range, or the range runs backwards.
        UnsupportedOperation
            This memory cannot copy a part: recurrent and hybrid memory, streams, a
            sliding window that has dropped cells of that part.
        """
        self._native.seq_cp(src, dest, p0, p1, "copy_kv_cache_seq")

    def copy_prefix(self, src: SupportsIndex, dest: SupportsIndex, n: SupportsIndex) -> None:
        """Make ``dest`` hold the positions below ``n`` of ``src``, and nothing else.

        To itself it keeps the prefix. An ``n`` of 0 empties ``dest``, one beyond what ``src``
        holds copies all of it.

        Raises
        ------
        SequenceIdError, PositionError, SeqIdTooLarge, P1TooLarge
            A value is out of range.
        UnsupportedOperation
            As for `copy_kv_cache_seq`.
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
            Half-open range of positions; ``None`` leaves that end open.

        Returns
        -------
        bool
            ``False``, with nothing changed, where this memory cannot remove a part:
            recurrent and hybrid memory (but for the last tokens, with `n_rs_seq`), and a sliding
            window that has dropped what would be seen afterwards. Removing all that a
            sequence holds always succeeds; `get_partial_state` and `set_partial_state` rewind
            those memories.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32; no removal is attempted.
        SequenceIdError, PositionError
            A value is out of range, or the range runs backwards.
        """
        return self._native.seq_rm(src, p0, p1)

    def remove(
        self, seq_id: SupportsIndex, p0: SupportsIndex | None, p1: SupportsIndex | None = None
    ) -> None:
        """Remove the positions ``[p0, p1)`` and move what follows down to close the gap.

        All or nothing. Beyond what the sequence holds there is nothing to remove or to move.

        Parameters
        ----------
        seq_id
            Sequence id.
        p0, p1
            Half-open range of positions; ``None`` leaves that end open.

        Raises
        ------
        SequenceIdError, PositionError, SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value is out of range, or the range runs backwards.
        UnsupportedOperation
            The memory cannot remove that part, or what follows cannot be moved:
            shared with another sequence, M-RoPE, recurrent state, dropped window cells.
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
        `kv_cache_update`.

        Raises
        ------
        SeqIdTooLarge, P0TooLarge, P1TooLarge
            A value does not fit an int32.
        SequenceIdError
            The sequence id is out of range.
        PositionError
            A position would become negative, larger than `max_position`, or one that is
            held already; or the range runs backwards.
        UnsupportedOperation
            M-RoPE, architectures and types whose keys cannot be rotated again, cells
            that another sequence shares, windows that dropped cells, and a part of a
            recurrent or hybrid sequence.
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

        Several cells may then share a position. ``llama_memory_seq_div`` rotates keys
        the wrong way; here each cell gets the shift that it moved by. Raises as
        `kv_cache_seq_add`.
        """
        self._native.seq_div(seq_id, p0, p1, d)

    def kv_cache_can_shift(self) -> bool:
        """Tell whether `kv_cache_seq_add` can be done on this memory at all."""
        return self._native.can_shift()

    def kv_cache_update(self) -> None:
        """Apply pending shifts and copies now instead of at the next decode."""
        self._native.update()

    def kv_cache_compact(self) -> int:
        """Move cells down to the lowest free ones, so that decodes look at fewer cells.

        llama.cpp attends over all cells up to the highest used one, in whichever sequence: a
        sequence in high cells is as slow as a full cache, also when the others are gone.
        Nothing is computed, and nothing changes but speed: positions, forks, logits and partial
        states stay what they are. Shifts and copies that are pending are applied first.

        Returns
        -------
        int
            Number of cells that moved, over all parts of the memory.

        Raises
        ------
        UnsupportedOperation
            The model keeps no memory, or one whose cells must stay in their order.
        """
        return self._native.compact()
