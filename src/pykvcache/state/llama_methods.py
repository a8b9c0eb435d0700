"""The methods of `LlamaContext` for llama.cpp's own state files."""

from __future__ import annotations

from typing import SupportsIndex

from pykvcache._arguments import TokenInput, as_path
from pykvcache.errors import (
    ArgumentError,
    StateFormatError,
    StateLayoutMismatch,
    StateModelMismatch,
)
from pykvcache.state.container import naming
from pykvcache.state.llama_files import LlamaStateFile
from pykvcache.state.methods import StateMethods
from pykvcache.state.saved import Path

__all__ = ["LlamaFileMethods"]


class LlamaFileMethods(StateMethods):
    """Exchange files with llama.cpp and llama-server; base class of `LlamaContext`."""

    def save_llama_file(
        self,
        path: Path,
        seq_id: SupportsIndex | None = None,
        tokens: TokenInput | None = None,
        *,
        sync: bool = True,
    ) -> int:
        """Save a sequence or the whole context in llama.cpp's own file format.

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

        Returns
        -------
        int
            Size of the file in bytes.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        ValueError, TypeError
            The number of tokens differs from the number of positions, or they are not tokens.
        UnsupportedOperation
            As for `get_state`.
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
            if len(file.tokens) != held:
                raise ArgumentError(
                    f"{len(file.tokens)} tokens given, but the sequence holds {held}",
                    "tokens",
                    len(file.tokens),
                    held,
                )
        return file.save(name, sync=sync)

    def load_llama_file(
        self, path: Path, seq_id: SupportsIndex | None = None, *, mapped: bool = True
    ) -> LlamaStateFile:
        """Restore a sequence or the whole context from one of llama.cpp's own files.

        A file of ``llama_state_seq_save_file`` or of a llama-server slot restores a sequence, one
        of ``llama_state_save_file`` the whole context. The content is checked as in `set_state`
        before anything changes. The file does not record its model and settings: you must make
        sure that they match and that the file is undamaged.

        Parameters
        ----------
        path, mapped
            As for `SequenceState.load`.
        seq_id
            Sequence id, may differ from the source's; ``None`` for the whole context.

        Returns
        -------
        LlamaStateFile
            The loaded file, with its ``tokens``: as many as were written, which may differ
            from the number of held positions.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        StateFileError, StateFormatError, StateVersionError, StateTruncated, StateDamaged
            As for `LlamaStateFile.load`; or the file does not hold one complete state.
        StateFormatError
            The file holds a context where a sequence was requested, or the reverse.
        StateModelMismatch
            A token is not in the vocabulary of this model.
        StateLayoutMismatch
            The state is from a different memory; or it is an old file (version 2) of quantised K/V,
            which newer versions of llama.cpp store rotated.
        StateTrailingBytes, NoKvCacheSlot, PositionError, UnsupportedOperation
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
            raise StateModelMismatch(
                f"the file has token {worst}, but the vocabulary has {self._model.n_vocab} tokens",
                what="tokens",
                value=int(worst),
                limit=self._model.n_vocab - 1,
            )
        if file.version == 2 and any(rows.rotation for part in self._layouts for rows in part.rows):
            raise StateLayoutMismatch(
                "the file has version 2, which does not record whether quantised keys and values "
                "are rotated as in this context",
                what="version",
                value=2,
            )
        self._native.set_state(seq_id, file._pieces, None)
