"""Partial states: the rewind of memories that cannot rewind."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from pykvcache._native import lib
from pykvcache.enums import MemoryKind
from pykvcache.errors import ClosedError

__all__ = ["PartialState", "PartialStateMethods"]


class PartialState:
    """The part of a sequence's memory that cannot be rewound, as it was at one position.

    That is the window of a sliding-window cache, the recurrent state of a hybrid, both where
    there are both, and all of a recurrent memory. The other part is not copied: it grows, and is
    cut. So the object belongs to one sequence of one context, for as long as that sequence
    still holds what it held then. Made by `LlamaContext.get_partial_state`; it keeps its own
    bytes, and keeps neither the context nor the cells alive.
    """

    __slots__ = ("_native",)

    _native: lib.Partial

    def __init__(self) -> None:
        raise TypeError("a PartialState is made by LlamaContext.get_partial_state()")

    @classmethod
    def _of(cls, native: lib.Partial) -> PartialState:
        self = object.__new__(cls)
        self._native = native
        return self

    @property
    def seq_id(self) -> int:
        """The sequence it was taken from, and goes back to."""
        return self._native.seq_id

    @property
    def pos(self) -> int:
        """Last position of the sequence then; -1 if it was empty."""
        return self._native.pos

    @property
    def nbytes(self) -> int:
        """Size of the copy in bytes."""
        return self._native.nbytes

    @property
    def memory_kind(self) -> MemoryKind:
        """What kind of memory it is of, as `LlamaContext.memory_kind` says."""
        return self._native.memory_kind

    @property
    def is_valid(self) -> bool:
        """Whether `LlamaContext.set_partial_state` would take it now, room permitting.

        False for good once the sequence was removed, copied over, moved, restored or rewound at
        or below `pos`, or the context was closed. What is decoded after `pos` does not matter.
        The state of a recurrent memory is all of it, and stays valid with its context.
        """
        return self._native.is_valid

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PartialState belongs to a live context: get_state() keeps all of it")

    def __repr__(self) -> str:
        valid = "" if self.is_valid else ", no longer valid"
        return (
            f"<PartialState {self.memory_kind}, sequence {self.seq_id} up to position {self.pos}, "
            f"{self.nbytes:,} bytes{valid}>"
        )


class PartialStateMethods:
    """The partial-state methods of `LlamaContext`; not made by itself."""

    _native: lib.Context

    def get_partial_state(self, seq_id: SupportsIndex) -> PartialState:
        """Copy the part of a sequence that cannot be rewound, to rewind to here later.

        Attention rewinds by itself: the cells at the end are removed. A recurrent state and a
        window that has slid do not. Take a partial state at each position that may be gone
        back to (the end of a prompt, each turn of a chat) and give it to `set_partial_state`.
        It costs one copy of a state or a window, however long the sequence is
        (``llama_state_seq_get_data_ext`` with ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``). Shifts
        and copies that are pending are applied first.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        UnsupportedOperation
            Plain attention memory, which needs none: `clear_kv_cache_seq` rewinds it. Or the
            model keeps no memory, or one whose layout is not known here, or the sequence holds
            the rest of an aborted decode.

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
        """Make a sequence hold again what it held when a partial state was taken.

        What came after ``state.pos`` is removed from the part that keeps all, and the other part
        is put back: the next logits are those of the tokens that were held then. Other
        sequences keep what they have, forks included. A state may be put back any number of
        times. It also cures the sequence after an aborted decode. There are no logits
        until a token is decoded.

        Raises
        ------
        PartialStateError
            The state is of another context, or the sequence has changed at or below
            ``state.pos`` (see `PartialState.is_valid`). Nothing was changed.
        NoKvCacheSlot
            Other sequences hold too much of the window's cache. Nothing was changed.
        UnsupportedOperation
            As for `get_partial_state`.
        """
        if self._native.is_closed:
            raise ClosedError("the context is closed")
        if not isinstance(state, PartialState):
            raise TypeError(f"state must be a PartialState, not {type(state).__name__}")
        self._native.set_partial_state(state._native)
