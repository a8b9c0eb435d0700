"""Partial states: rollback for memories that cannot be rewound."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from pykvcache._native import lib
from pykvcache.enums import MemoryKind
from pykvcache.errors import ClosedError

__all__ = ["PartialState", "PartialStateMethods"]


class PartialState:
    """Copy of the part of a sequence's memory that cannot be rewound, at one position.

    That is the window of a sliding-window cache, the recurrent state of a hybrid (or both), and
    all of a recurrent memory. The other part is not copied: rollback truncates it. So the object
    belongs to one sequence of one context, and is valid while that sequence still holds its
    earlier tokens. Created by `LlamaContext.get_partial_state`; it owns its bytes, and does not
    keep the context or the cells alive.
    """

    __slots__ = ("_native",)

    _native: lib.Partial

    def __init__(self) -> None:
        raise TypeError("create a PartialState with LlamaContext.get_partial_state()")

    @classmethod
    def _of(cls, native: lib.Partial) -> PartialState:
        self = object.__new__(cls)
        self._native = native
        return self

    @property
    def seq_id(self) -> int:
        """The sequence it was taken from, the only one it can restore."""
        return self._native.seq_id

    @property
    def pos(self) -> int:
        """Last position of the sequence when it was taken; -1 if it was empty."""
        return self._native.pos

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return self._native.nbytes

    @property
    def memory_kind(self) -> MemoryKind:
        """Kind of the memory, as in `LlamaContext.memory_kind`."""
        return self._native.memory_kind

    @property
    def is_valid(self) -> bool:
        """Whether `LlamaContext.set_partial_state` would accept it now, given enough room.

        Permanently False once the sequence was removed, overwritten, moved, restored or rewound at
        or below `pos`, or the context was closed. Tokens decoded after `pos` do not matter. A
        recurrent memory is copied whole, so its state stays valid as long as the context.
        """
        return self._native.is_valid

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PartialState belongs to a live context: get_state() copies all of it")

    def __repr__(self) -> str:
        valid = "" if self.is_valid else ", no longer valid"
        return (
            f"<PartialState {self.memory_kind}, sequence {self.seq_id} up to position {self.pos}, "
            f"{self.nbytes:,} bytes{valid}>"
        )


class PartialStateMethods:
    """The partial-state methods of `LlamaContext`."""

    _native: lib.Context

    def get_partial_state(self, seq_id: SupportsIndex) -> PartialState:
        """Copy the part of a sequence that cannot be rewound, as a checkpoint.

        Take one at each position you may return to (the end of a prompt, each turn of a chat) and
        pass it to `set_partial_state`. It costs one copy of a state or a window, independent of the
        length of the sequence (``llama_state_seq_get_data_ext`` with
        ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``). Pending shifts and copies are applied first.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        UnsupportedOperation
            Plain attention memory, which needs none: `clear_kv_cache_seq` rewinds it. Or the
            model keeps no memory, or the layout of its memory is unknown, or the sequence holds
            remains of an aborted decode.

        Examples
        --------
        >>> import pytest
        >>> from pykvcache import LlamaContext, LlamaModel
        >>> from pykvcache.errors import UnsupportedOperation
        >>> from pykvcache import embedded_model_path
        >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model) as ctx:
        ...     with pytest.raises(UnsupportedOperation, match="needs none"):
        ...         ctx.get_partial_state(0)
        """
        return PartialState._of(self._native.get_partial_state(seq_id))

    def set_partial_state(self, state: PartialState) -> None:
        """Roll a sequence back to the position of a partial state.

        Cells after ``state.pos`` are removed from the part that can be rewound, and the other part
        is restored: the next logits are those of the earlier tokens. Other sequences, including
        forks, keep their cells. A state can be restored any number of times. This also repairs the
        sequence after an aborted decode. There are no logits until a token is decoded.

        Raises
        ------
        PartialStateError
            The state is from another context, or the sequence has changed at or below
            ``state.pos`` (see `PartialState.is_valid`). Nothing was changed.
        NoKvCacheSlot
            Other sequences occupy too much of the window's cache. Nothing was changed.
        UnsupportedOperation
            As for `get_partial_state`.
        """
        self._check_open()
        if not isinstance(state, PartialState):
            raise TypeError(f"state must be a PartialState, not {type(state).__name__}")
        self._native.set_partial_state(state._native)

    def _check_open(self) -> None:
        """Raise ClosedError before any error about a file or a state."""
        if self._native.is_closed:
            raise ClosedError("the context is closed")
