"""The state methods of `LlamaContext`."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

from pykvcache._native import lib
from pykvcache.state.buffers import ByteArray, as_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["StateMethods"]


class StateMethods:
    """Take sequences out of a context and put them back; not made by itself."""

    _native: lib.Context

    def state_size(self, seq_id: SupportsIndex | None = None) -> int:
        """Return the size in bytes of a raw state taken now (``llama_state_seq_get_size``).

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        UnsupportedOperation
            As for `get_state`.
        """
        return self._native.state_size(seq_id)

    def get_state(
        self, seq_id: SupportsIndex | None = None, *, out: Buffer | None = None
    ) -> ByteArray:
        """Copy what a sequence holds, or the whole context, as llama.cpp's bytes.

        One copy at memory speed, without the GIL (``llama_state_seq_get_data``,
        ``llama_state_get_data``). Shifts and copies that are pending are applied first. The
        bytes carry no checksum and do not say which model they belong to: `save_sequence`
        does. Logits are not part of a state.

        Parameters
        ----------
        seq_id
            Sequence id; ``None`` for the whole context.
        out
            A writable, C-contiguous buffer of at least `state_size` bytes; nothing else may
            use it meanwhile. ``None`` makes a new array.

        Returns
        -------
        ndarray
            uint8, shape (n_bytes,): new, or a view of the part of ``out`` that was written.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        ValueError
            ``out`` is too small, read-only, or not contiguous; nothing is written.
        UnsupportedOperation
            The model keeps no memory, or one whose layout is not known here, or the cells
            depend on an encoder's input; or the sequence holds the rest of an aborted decode.
        """
        target = None if out is None else as_bytes(out, "out", writable=True)
        return self._native.get_state(seq_id, target)

    def set_state(self, buffer: Buffer, seq_id: SupportsIndex | None = None) -> None:
        """Make a sequence, or the whole context, hold what a raw state holds.

        What it held before is replaced. Structure, exact length, layers, types and positions
        are checked before anything is changed; on any error all is as it was. That the data
        is undamaged, and this model's, only `load_sequence` can tell. There are no logits
        until a token is decoded. A recurrent state does not tell where its sequence began:
        it is taken to begin at 0.

        Parameters
        ----------
        buffer
            A C-contiguous buffer that `get_state` filled; nothing may write to it meanwhile.
        seq_id
            Sequence id, which need not be that of the source; ``None`` for the whole context,
            every sequence of which is replaced.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        StateTruncated, StateTrailingBytes, StateDamaged
            The bytes are not one whole state.
        StateLayoutMismatch
            It is the state of another memory: other layers, types, streams or sequences.
        NoKvCacheSlot
            There is no room for that many cells.
        UnsupportedOperation
            As for `get_state`.
        """
        self._native.set_state(seq_id, [as_bytes(buffer, "buffer")], None)
