"""The state methods of `LlamaContext`, and partial states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy.typing as npt

from pykvcache._arguments import ByteArray, TokenInput, as_bytes, as_path, check_kind
from pykvcache._native import lib
from pykvcache.enums import MemoryKind
from pykvcache.errors import ClosedError, StateFormatError, StateLayoutMismatch, StateModelMismatch
from pykvcache.model import LlamaModel
from pykvcache.state.container import naming
from pykvcache.state.convert import fit_parts
from pykvcache.state.facts import Fingerprint, fingerprint_of
from pykvcache.state.layout import Part, PartLayout, layouts_from_native, set_parts, split
from pykvcache.state.llama_files import LlamaStateFile
from pykvcache.state.saved import Path, check_tokens
from pykvcache.state.sequence import SequenceState
from pykvcache.state.whole import ContextState

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PartialState", "StateMethods"]


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


class StateMethods:
    """Save and restore sequences; base class of `LlamaContext`."""

    _native: lib.Context
    _model: LlamaModel

    # Containers ---------------------------------------------------------------------------

    def sequence_state(
        self,
        seq_id: SupportsIndex,
        tokens: TokenInput | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SequenceState:
        """Copy the state of a sequence, with its model's fingerprint.

        Parameters
        ----------
        seq_id
            Sequence id.
        tokens
            Token ids, one per held position; stored with the state.
        metadata
            JSON-serializable values with str keys, nested at most 100 deep; stored with the state.

        Raises
        ------
        SequenceIdError, UnsupportedOperation
            As for `get_state`.
        ValueError, TypeError
            The number of tokens differs from the number of positions, or the metadata is not JSON.
        ModelLoadError
            The model's file changed after it was loaded, so it cannot be fingerprinted.
        """
        if seq_id is None:
            raise TypeError("seq_id must be an integer, not None: see context_state")
        fingerprint = self.fingerprint
        state, firsts = self._native.take_state(seq_id, spare=True)
        parts = [streams[0] for streams in self._split(state, whole=False)]
        first = firsts[0][1] if firsts else 0
        return SequenceState(parts, fingerprint, first=first, tokens=tokens, metadata=metadata)

    def restore_sequence(
        self, state: SequenceState, seq_id: SupportsIndex, *, convert: bool = False
    ) -> None:
        """Replace a sequence with a saved state; on any error nothing changes.

        The context may differ from the source's in ``n_ctx``, ``n_seq_max``, ``kv_unified``,
        ``swa_full``, flash attention and sequence id, unless these decide whether attention uses an
        index (MiniMax M3). There are no logits until a token is decoded.

        Parameters
        ----------
        state
            From `sequence_state`, `SequenceState.load`, a slice or `SequenceState.join`.
        seq_id
            Sequence id; its cells are replaced.
        convert
            Convert K and V if this context stores other types, which rounds each value: to f16 by
            at most 2^-11 of itself, to bf16 by 2^-8. Quantised types (after the rotation that
            llama.cpp applies to them) round by at most this fraction of the largest value in the
            block of 32: q8_0 1/225, q5_1 1/29, q5_0 1/15, q4_1 1/14, q4_0 1/7, iq4_nl 1/4; scales
            are stored as f16, which adds up to 2^-18 if all values of a block are tiny.

        Raises
        ------
        StateModelMismatch
            The state belongs to another model.
        StateLayoutMismatch
            The state was computed under other settings, or stores other types and ``convert`` is
            false.
        StateError
            With ``convert``: the state holds NaN, or values too large for the target type.
        SequenceIdError, NoKvCacheSlot, UnsupportedOperation
            As for `set_state`.
        """
        self._check_open()
        check_kind(state, SequenceState, "state", "restore_sequence(state, seq_id)")
        state.fingerprint.check(self.fingerprint)
        parts = fit_parts([[part] for part in state.parts], self._layouts, convert=convert)
        set_parts(self._native, seq_id, parts, [(index(seq_id), state.first)])

    def save_sequence(
        self,
        path: Path,
        seq_id: SupportsIndex,
        tokens: TokenInput | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        sync: bool = True,
    ) -> int:
        """Save a sequence to a file (`sequence_state`, `SequenceState.save`); return its size.

        Parameters
        ----------
        path, sync
            As for `SequenceState.save`.
        seq_id, tokens, metadata
            As for `sequence_state`.
        """
        self._check_open()
        name = as_path(path, order="save_sequence(path, seq_id)")
        return self.sequence_state(seq_id, tokens, metadata).save(name, sync=sync)

    def load_sequence(
        self, path: Path, seq_id: SupportsIndex, *, convert: bool = False, mapped: bool = True
    ) -> SequenceState:
        """Restore a sequence from a file (`SequenceState.load`, `restore_sequence`); return it.

        Everything is checked before the context changes; on any error it is unchanged.

        Parameters
        ----------
        path, mapped
            As for `SequenceState.load`. If you keep the returned state of a mapped file and read
            its ``parts``, overwriting or truncating the file in place ends the process.
        seq_id, convert
            As for `restore_sequence`.
        """
        self._check_open()
        name = as_path(path, order="load_sequence(path, seq_id)")
        state = SequenceState.load(name, mapped=mapped)
        with naming(name):
            self.restore_sequence(state, seq_id, convert=convert)
        return state

    def context_state(
        self,
        tokens: Mapping[int, TokenInput] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> ContextState:
        """Copy the state of the whole context; shared cells are copied once.

        Parameters
        ----------
        tokens
            Token ids by sequence id, for any subset of the sequences.
        metadata
            JSON-serializable values with str keys.

        Raises
        ------
        ValueError, TypeError, UnsupportedOperation, ModelLoadError
            As for `sequence_state`.
        """
        fingerprint = self.fingerprint
        state, firsts = self._native.take_state(None)
        parts = self._split(state, whole=True)
        return ContextState(parts, fingerprint, dict(firsts), tokens=tokens, metadata=metadata)

    def restore_context(self, state: ContextState, *, convert: bool = False) -> None:
        """Replace the content of the context with a saved state; on any error nothing changes.

        Raises
        ------
        StateLayoutMismatch
            As for `restore_sequence`; or the state has other streams, or sequence ids that do not
            exist here. Restore single sequences in this case, with `ContextState.sequence`.
        StateModelMismatch, NoKvCacheSlot, UnsupportedOperation
            As for `restore_sequence`.
        """
        self._check_open()
        check_kind(state, ContextState, "state")
        state.fingerprint.check(self.fingerprint)
        for streams, layout in zip(state.parts, self._layouts, strict=False):
            if layout.part != "recurrent" and len(streams) != layout.n_stream:
                message = (
                    f"the state has {len(streams)} streams, but this context has {layout.n_stream} "
                    "(kv_unified, n_seq_max): restore single sequences instead"
                )
                raise StateLayoutMismatch(message, "streams", len(streams), layout.n_stream)
        parts = fit_parts(state.parts, self._layouts, convert=convert)
        set_parts(self._native, None, parts, list(state.firsts.items()))

    def save_context(
        self,
        path: Path,
        tokens: Mapping[int, TokenInput] | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        sync: bool = True,
    ) -> int:
        """Save the context to a file (`context_state`, `ContextState.save`); return its size."""
        self._check_open()
        name = as_path(path, order="save_context(path, tokens)")
        return self.context_state(tokens, metadata).save(name, sync=sync)

    def load_context(
        self, path: Path, *, convert: bool = False, mapped: bool = True
    ) -> ContextState:
        """Restore the context from a file (`ContextState.load`, `restore_context`); return it.

        Parameters
        ----------
        path, mapped
            As for `load_sequence`.
        convert
            As for `restore_sequence`.
        """
        self._check_open()
        name = as_path(path, order="load_context(path)")
        state = ContextState.load(name, mapped=mapped)
        with naming(name):
            self.restore_context(state, convert=convert)
        return state

    # llama.cpp's own files -----------------------------------------------------------------

    def save_llama_file(
        self,
        path: Path,
        seq_id: SupportsIndex | None = None,
        tokens: TokenInput | None = None,
        *,
        sync: bool = True,
    ) -> int:
        """Save a sequence or the whole context in llama.cpp's own file format; return the size.

        Writes the same bytes as ``llama_state_seq_save_file``, or as ``llama_state_save_file`` for
        ``None``; llama-server restores the former as a slot. The file has no checksum and does not
        identify its model: use `save_sequence` for that.

        Parameters
        ----------
        path, sync
            As for `SequenceState.save`.
        seq_id
            Sequence id; ``None`` for the whole context.
        tokens
            Token ids, one per held position of the sequence, or any number for a context. ``None``
            writes none; llama-server treats such a slot as empty.

        Raises
        ------
        SequenceIdError, UnsupportedOperation
            As for `get_state`.
        ValueError, TypeError
            The number of tokens differs from the number of positions, or they are not tokens.
        StateFileError
            The file cannot be written; an older file of that name is unchanged.
        """
        self._check_open()
        name = as_path(path, order="save_llama_file(path, seq_id)")
        state, firsts = self._native.take_state(seq_id)
        file = LlamaStateFile(state, () if tokens is None else tokens)
        if seq_id is not None and tokens is not None:
            part = self._split(state, whole=False)[0][0]
            held = len(part)
            if part.layout.part == "recurrent" and held:
                held = int(part.positions[0]) - firsts[0][1] + 1
            check_tokens(file.tokens, held)
        return file.save(name, sync=sync)

    def load_llama_file(
        self, path: Path, seq_id: SupportsIndex | None = None, *, mapped: bool = True
    ) -> LlamaStateFile:
        """Restore a sequence or the whole context from one of llama.cpp's own files.

        A file of ``llama_state_seq_save_file`` or of a llama-server slot restores a sequence, one
        of ``llama_state_save_file`` the whole context. The content is checked as in `set_state`
        before anything changes. The file does not record its model and settings: you must make
        sure that they match and that the file is undamaged. Returns the file; its ``tokens`` may be
        more or fewer than the held positions.

        Parameters
        ----------
        path, mapped
            As for `SequenceState.load`.
        seq_id
            Sequence id, may differ from the source's; ``None`` for the whole context.

        Raises
        ------
        StateFileError, StateFormatError, StateVersionError, StateTruncated, StateDamaged
            As for `LlamaStateFile.load`; or the file does not hold one complete state, or a context
            where a sequence was requested, or the reverse.
        StateModelMismatch
            A token is not in the vocabulary of this model.
        StateLayoutMismatch
            The state is from a different memory; or it is an old file (version 2) of quantised K/V,
            which newer versions of llama.cpp store rotated.
        SequenceIdError, StateTrailingBytes, NoKvCacheSlot, PositionError, UnsupportedOperation
            As for `set_state`.
        """
        self._check_open()
        name = as_path(path, order="load_llama_file(path, seq_id)")
        file = LlamaStateFile.load(name, mapped=mapped)
        with naming(name):
            self._put(file, seq_id)
        return file

    def _put(self, file: LlamaStateFile, seq_id: SupportsIndex | None) -> None:
        if (file.kind == "context") != (seq_id is None):
            hint = "pass no seq_id" if file.kind == "context" else "pass its new seq_id"
            raise StateFormatError(
                f"the file holds a {file.kind}: {hint}", what="kind", value=file.kind
            )
        foreign = file.tokens[file.tokens >= max(self._model.n_vocab, 1)]
        if foreign.size or (file.tokens < (-1 if file.n_media else 0)).any():
            worst = foreign[0] if foreign.size else file.tokens.min()
            message = (
                f"the file has token {worst}, but the vocabulary has {self._model.n_vocab} tokens"
            )
            raise StateModelMismatch(message, "tokens", int(worst), self._model.n_vocab - 1)
        if file.version == 2 and any(rows.rotation for part in self._layouts for rows in part.rows):
            message = (
                "the file has version 2, which does not record whether quantised keys and values "
                "are rotated as in this context"
            )
            raise StateLayoutMismatch(message, "version", 2)
        self._native.set_state(seq_id, file._pieces, None)

    # Raw bytes ----------------------------------------------------------------------------

    def state_size(self, seq_id: SupportsIndex | None = None) -> int:
        """Return the size in bytes of a raw state taken now (``llama_state_seq_get_size``).

        Raises
        ------
        SequenceIdError, UnsupportedOperation
            As for `get_state`.
        """
        return self._native.state_size(seq_id)

    def get_state(
        self, seq_id: SupportsIndex | None = None, *, out: Buffer | npt.NDArray[Any] | None = None
    ) -> ByteArray:
        """Copy the state of a sequence, or of the whole context, in llama.cpp's format.

        One copy at memory speed, without the GIL (``llama_state_seq_get_data``,
        ``llama_state_get_data``); sequence states of 512 KiB and more use two threads, unless
        ``n_threads_batch`` is 1. Pending shifts and copies are applied first. The bytes have no
        checksum and do not identify their model: `save_sequence` adds both. Logits are not part of
        a state.

        Parameters
        ----------
        seq_id
            Sequence id; ``None`` for the whole context.
        out
            A writable, C-contiguous buffer of at least `state_size` bytes; nothing else may use it
            during the call. ``None`` allocates a new array.

        Returns
        -------
        ndarray
            uint8, shape (n_bytes,): new, or a view of the written part of ``out``.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        ValueError
            ``out`` is too small, read-only, or not contiguous; nothing was written.
        UnsupportedOperation
            The model keeps no memory, or the layout of its memory is unknown, or the cells depend
            on an encoder's input; or the sequence holds remains of an aborted decode.
        """
        target = None if out is None else as_bytes(out, "out", writable=True)
        return self._native.get_state(seq_id, target)

    def set_state(
        self, buffer: Buffer | npt.NDArray[Any], seq_id: SupportsIndex | None = None
    ) -> None:
        """Replace a sequence, or the whole context, with a raw state.

        Structure, exact length, layers, types and positions are checked first, as is that values
        are finite and do not overflow in attention; on any error nothing changes. Only
        `load_sequence` can also detect other damage or a different model. The sequence has no
        logits until a token is decoded; logits of other sequences stay. A recurrent state does not
        record its first position: it is assumed to be 0.

        Parameters
        ----------
        buffer
            A C-contiguous buffer from `get_state`; it must not be written to during the call.
        seq_id
            Sequence id, may differ from the source's; ``None`` for the whole context, whose
            sequences are all replaced.

        Raises
        ------
        SequenceIdError, UnsupportedOperation
            As for `get_state`.
        StateTruncated, StateTrailingBytes, StateDamaged
            The bytes are not one complete state, or values are NaN, infinite or too large.
        PositionError
            The state holds a position past `LlamaContext.max_position`.
        StateLayoutMismatch
            The state is from a different memory: other layers, types, streams or sequences.
        NoKvCacheSlot
            There is no room for that many cells.
        """
        order = "set_state(buffer, seq_id)"
        self._native.set_state(seq_id, [as_bytes(buffer, "buffer", order=order)], None)

    # Partial states ------------------------------------------------------------------------

    def get_partial_state(self, seq_id: SupportsIndex) -> PartialState:
        """Copy the part of a sequence that cannot be rewound, as a checkpoint.

        Take one at each position you may return to (the end of a prompt, each turn of a chat) and
        pass it to `set_partial_state`. It costs one copy of a state or a window, independent of the
        length of the sequence (``llama_state_seq_get_data_ext`` with
        ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``). Pending shifts and copies are applied first.

        Raises
        ------
        SequenceIdError, UnsupportedOperation
            As for `get_state`; and for plain attention memory, which `clear_kv_cache_seq` rewinds.
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
        check_kind(state, PartialState, "state")
        self._native.set_partial_state(state._native)

    # Constant while the context is open ---------------------------------------------------

    @cached_property
    def _layouts(self) -> tuple[PartLayout, ...]:
        return layouts_from_native(self._native)

    @cached_property
    def _plain_fingerprint(self) -> Fingerprint:
        return fingerprint_of(self._native, self._model.fingerprint)

    @property
    def fingerprint(self) -> Fingerprint:
        """The model and the settings that states of this context were computed with.

        Raises
        ------
        ModelLoadError
            The model's file changed after it was loaded, so it cannot be fingerprinted.
        """
        names = self._native.adapter_names
        return (
            replace(self._plain_fingerprint, adapters=names) if names else self._plain_fingerprint
        )

    def _split(self, state: ByteArray, *, whole: bool) -> list[list[Part]]:
        return split(self._native, state, self._layouts, whole=whole)

    def _check_open(self) -> None:
        """Raise ClosedError before any error about a file or a state."""
        if self._native.is_closed:
            raise ClosedError("the context is closed")
